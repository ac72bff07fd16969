"""Layer times on disk, by device and model: a daemon that starts again does not measure what it knows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Set
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import DataDirUnusable
from atoll.core.files import write_atomic
from atoll.core.run_spec import RunSpec
from atoll.node.model.run_model import RunModel
from atoll.node.trainer.layer_times import LayerTimes
from atoll.node.training.device import DeviceFacts, working_precision

MAX_AGE = timedelta(days=7)  # drivers, clocks and what else the machine does change
ENTRIES = 16
_Seconds = Annotated[FiniteFloat, Field(ge=0)]  # a token


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    unix: float
    times: list[tuple[str, _Seconds, _Seconds]] = Field(min_length=1)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    entries: dict[str, _Entry]


def key_of(spec: RunSpec, run: RunModel, facts: DeviceFacts, cpu_threads: int) -> str:
    """Everything that the times follow from: device, libraries, precision, the layers and what they are given."""
    device = torch.device(facts.device)
    parts = (
        facts.device,
        facts.name,
        facts.uuid,
        torch.__version__,
        _transformers(),
        cpu_threads if device.type == "cpu" else 0,
        working_precision(spec.optimizer.precision, device),
        spec.optimizer.micro_batch_samples,
        spec.data.sequence_length,
        run.table.SerializeToString(deterministic=True).hex(),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _transformers() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return ""


class LayerTimesCache:
    """One file, of a machine. It never keeps a trainer from starting: what cannot be read is measured again."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock

    def recall(self, key: str, kinds: Set[str]) -> LayerTimes:
        """What was measured in the last days of layers of these kinds; nothing when it was not, or cannot be read."""
        entry = self._entries().get(key)
        if entry is None or not 0 <= self._clock.unix() - entry.unix <= MAX_AGE.total_seconds():
            return ()
        told = {kind: forward + backward for kind, forward, backward in entry.times}
        believed = told.keys() == kinds and len(told) == len(entry.times) and sum(told.values()) > 0
        return tuple(entry.times) if believed else ()

    def keep(self, key: str, times: LayerTimes) -> None:
        """Remember them; the oldest make room."""
        now = self._clock.unix()
        entries = {known: entry for known, entry in self._entries().items() if entry.unix <= now}
        entries[key] = _Entry(unix=now, times=list(times))
        newest = sorted(entries, key=lambda known: entries[known].unix)[-ENTRIES:]
        document = _Document(entries={known: entries[known] for known in newest})
        try:
            write_atomic(self._path, document.model_dump_json().encode())
        except DataDirUnusable as error:
            log.get("trainer").warning("layer times are not kept", reason=str(error))

    def _entries(self) -> dict[str, _Entry]:
        try:
            if not self._path.is_file():
                return {}
            return _Document.model_validate_json(self._path.read_bytes()).entries
        except (OSError, ValidationError) as error:
            log.get("trainer").warning("layer times cannot be read", reason=str(error).splitlines()[0])
            return {}
