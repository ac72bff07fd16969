"""Reads a what-if file: TOML with machines, links, a model and preferences of a hypothetical swarm. Pure.

`docs/explain/planner.md` lists every field. The format differs from the lab's topologies, which describe emulated links
with their queues and no hardware.
"""

from __future__ import annotations

import math
import tomllib
from collections import Counter
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.coordinator.planner.links import MeasuredPath, links_from_paths
from atoll.coordinator.planner.problem import (
    Goal,
    Layer,
    Links,
    Machine,
    Pin,
    Problem,
    Reach,
    Training,
    Wishes,
    decoder_layers,
)
from atoll.core.errors import PlanInputInvalid

GB = 1e9
MBIT_BYTES = 1e6 / 8
TFLOPS = 1e12
MOST_MACHINES = 2000

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Positive = Annotated[float, Field(gt=0, le=1e12)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1, le=10**12)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class _Model(_Table):
    blocks: Annotated[int, Field(ge=1, le=1000)]
    dimension: Count
    hidden_dimension: Count
    heads: Count
    kv_heads: Count
    vocabulary: Count = 32_000
    sequence_length: Count = 2048
    tied: bool = False

    def layers(self) -> tuple[Layer, ...]:
        attention = self.dimension * (self.dimension // self.heads) * (2 * self.heads + 2 * self.kv_heads)
        return decoder_layers(
            blocks=self.blocks,
            dimension=self.dimension,
            block_parameters=attention + 3 * self.dimension * self.hidden_dimension + 2 * self.dimension,
            vocabulary=self.vocabulary,
            sequence_length=self.sequence_length,
            tied=self.tied,
        )


class _Training(_Table):
    micro_batch_samples: Count = 1
    micro_batches: Count = 8
    round_tokens: Count
    ahead: Annotated[int, Field(ge=0, le=64)] = 5


class _Wishes(_Table):
    goal: Goal = Goal.TIME
    trusted_ends: bool = False
    rtt_cap_ms: Positive = 1000 * Wishes.rtt_cap_seconds


class _MachineRow(_Table):
    name: Name
    count: Annotated[int, Field(ge=1, le=MOST_MACHINES)] = 1  # more than one: NAME-1, NAME-2, …
    region: Name
    kind: str = ""
    memory_gb: Positive
    host_memory_gb: Positive = 64.0
    tflops: Positive  # reached in training
    uplink_mbit: Positive = 100.0
    downlink_mbit: Positive = 100.0
    reach: Reach = Reach.PUBLIC
    minimum_step_seconds: Annotated[float, Field(ge=0, le=3600)] = 0.0
    price_per_hour: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    availability: Share = 1.0
    failures_per_hour: Annotated[float, Field(ge=0, le=1e3)] = 0.0
    trusted: bool = True

    def machines(self) -> tuple[Machine, ...]:
        names = [self.name] if self.count == 1 else [f"{self.name}-{number + 1}" for number in range(self.count)]
        return tuple(
            Machine(
                name=name,
                device_memory_bytes=self.memory_gb * GB,
                host_memory_bytes=self.host_memory_gb * GB,
                uplink_bytes_per_second=self.uplink_mbit * MBIT_BYTES,
                downlink_bytes_per_second=self.downlink_mbit * MBIT_BYTES,
                flops_per_second=self.tflops * TFLOPS,
                region=self.region,
                reach=self.reach,
                minimum_step_seconds=self.minimum_step_seconds,
                price_per_hour=self.price_per_hour,
                availability=self.availability,
                failures_per_hour=self.failures_per_hour,
                trusted=self.trusted,
                kind=self.kind,
            )
            for name in names
        )


class _PathRow(_Table):
    between: tuple[Name, Name]  # machines or regions
    rtt_ms: Annotated[float, Field(ge=0, le=60_000)]
    mbit: Annotated[float, Field(ge=0, le=1e9)] | None = None  # first to second; none: only access links limit
    back_mbit: Annotated[float, Field(ge=0, le=1e9)] | None = None  # second to first; none: the same

    def path(self) -> MeasuredPath:
        forward = math.inf if self.mbit is None else self.mbit * MBIT_BYTES
        back = None if self.back_mbit is None else self.back_mbit * MBIT_BYTES
        return MeasuredPath(*self.between, self.rtt_ms / 1000, forward, back)


class _PinRow(_Table):
    machine: Name
    layers: tuple[int, int] | None = None  # first and last; none: excluded from training


class _File(_Table):
    model: _Model
    training: _Training
    wishes: _Wishes = _Wishes()
    machine: Annotated[tuple[_MachineRow, ...], Field(min_length=1)]
    path: tuple[_PathRow, ...] = ()
    pin: tuple[_PinRow, ...] = ()


def read_what_if(text: str, where: str) -> Problem:
    """Parse a what-if file into a problem. Raises `PlanInputInvalid` that names the field."""
    try:
        document = tomllib.loads(text)
        file = _File.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        field = _place(first["loc"], document)
        raise PlanInputInvalid(
            f"{where}: {field}: {first['msg']}", "docs/explain/planner.md lists every field"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanInputInvalid(f"{where} is not TOML: {error}") from error
    machines = tuple(machine for row in file.machine for machine in row.machines())
    if len(machines) > MOST_MACHINES:
        raise PlanInputInvalid(f"{where}: {len(machines)} machines; at most {MOST_MACHINES} are allowed")
    twice = [pair for pair, times in Counter(frozenset(row.between) for row in file.path).items() if times > 1]
    if twice:
        ends = sorted(twice[0])
        raise PlanInputInvalid(
            f"{where}: two [[path]] entries are between {ends[0]} and {ends[-1]}",
            "use one entry for both directions: mbit, back_mbit",
        )
    links = links_from_paths(machines, [row.path() for row in file.path])
    _check_paths(machines, links, where)
    return Problem(
        machines=machines,
        links=links,
        layers=file.model.layers(),
        training=Training(
            micro_batch_tokens=file.training.micro_batch_samples * file.model.sequence_length,
            micro_batches=file.training.micro_batches,
            round_tokens=file.training.round_tokens,
            ahead=file.training.ahead,
        ),
        wishes=Wishes(
            goal=file.wishes.goal,
            pins=tuple(Pin(row.machine, row.layers) for row in file.pin),
            trusted_ends=file.wishes.trusted_ends,
            rtt_cap_seconds=file.wishes.rtt_cap_ms / 1000,
        ),
    )


def _place(loc: tuple[int | str, ...], file: dict[str, Any]) -> str:
    """Format a field's location in the file's terms: `[[machine]] 3 ("attic").memory_gb`."""
    if len(loc) < 2 or not isinstance(loc[1], int):
        return ".".join(map(str, loc))
    row = file[str(loc[0])][loc[1]]
    name = f' ("{row["name"]}")' if isinstance(row, dict) and isinstance(row.get("name"), str) else ""
    return ".".join([f"[[{loc[0]}]] {loc[1] + 1}{name}", *map(str, loc[2:])])


def _check_paths(machines: tuple[Machine, ...], links: Links, where: str) -> None:
    """Raise `PlanInputInvalid` for a machine without a path to any other machine."""
    far = np.isinf(links.rtt_seconds).sum(axis=1) == len(machines) - 1
    lonely = next((machine for machine, alone in zip(machines, far, strict=True) if alone), None)
    if lonely is not None and len(machines) > 1:
        raise PlanInputInvalid(
            f"{where}: no [[path]] connects {lonely.name} (region {lonely.region}) to another machine",
            f'add one for each pair of regions, and one within the region: between = ["{lonely.region}", '
            f'"{lonely.region}"], rtt_ms = 2',
        )
