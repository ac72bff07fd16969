"""Cache of layer times on disk, so that a restarted daemon need not measure them again.

An entry belongs to a device, a model and library versions (`key_of`). Any failure to read or write the file only means
that the trainer measures again.
"""

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

MAX_AGE = timedelta(days=7)  # drivers, clock rates and the machine's other load change
ENTRIES = 16
_Seconds = Annotated[FiniteFloat, Field(ge=0)]  # per token


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    unix: float
    times: list[tuple[str, _Seconds, _Seconds]] = Field(min_length=1)


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    entries: dict[str, _Entry]


def key_of(spec: RunSpec, run: RunModel, facts: DeviceFacts, cpu_threads: int) -> str:
    """Hash of everything that layer times depend on: device, libraries, precision, layers and size of their inputs."""
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
    """The cache file of one machine. Its errors never prevent a trainer from starting."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path, self._clock = path, clock

    def recall(self, key: str, kinds: Set[str]) -> LayerTimes:
        """Times of exactly these kinds that are at most `MAX_AGE` old. Empty without such an entry."""
        entry = self._entries().get(key)
        if entry is None or not 0 <= self._clock.unix() - entry.unix <= MAX_AGE.total_seconds():
            return ()
        seconds = {kind: forward + backward for kind, forward, backward in entry.times}
        valid = seconds.keys() == kinds and len(seconds) == len(entry.times) and sum(seconds.values()) > 0
        return tuple(entry.times) if valid else ()

    def newest(self, kinds: Set[str]) -> LayerTimes:
        """Newest times of exactly these kinds, of any device and library version. Empty if there are none."""
        entries = sorted(self._entries().values(), key=lambda entry: -entry.unix)
        found = (entry.times for entry in entries if {kind for kind, _, _ in entry.times} == kinds)
        return tuple(next(found, ()))

    def keep(self, key: str, times: LayerTimes) -> None:
        """Store the times. Drops the oldest entries beyond `ENTRIES`, and entries dated in the future."""
        now = self._clock.unix()
        entries = {known: entry for known, entry in self._entries().items() if entry.unix <= now}
        entries[key] = _Entry(unix=now, times=list(times))
        newest = sorted(entries, key=lambda known: entries[known].unix)[-ENTRIES:]
        document = _Document(entries={known: entries[known] for known in newest})
        try:
            write_atomic(self._path, document.model_dump_json().encode())
        except DataDirUnusable as error:
            log.get("trainer").warning("layer_times_not_saved", reason=str(error))

    def _entries(self) -> dict[str, _Entry]:
        try:
            if not self._path.is_file():
                return {}
            return _Document.model_validate_json(self._path.read_bytes()).entries
        except (OSError, ValidationError) as error:
            log.get("trainer").warning("layer_times_unreadable", reason=str(error).splitlines()[0])
            return {}
