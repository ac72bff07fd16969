"""The placement problem as plain data: machines, links, layers, how a run trains, what the operator wants.

`docs/explain/planner.md` states the same in words and formulas; `cost.py` is the one place that evaluates a layout. All
quantities are in bytes, seconds, tokens and FLOPs. Machines are known by their place in `Problem.machines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from atoll.coordinator.planner.question import Preferences
from atoll.core.layer_kinds import is_block
from atoll.v1 import plan_pb2

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

INT8_OF_FP32 = (1 + 2 / 128) / 4  # 128-element blocks with a two-byte scale
INT4_BYTES = 0.5 + 2 / 128  # per parameter
_BLOCK_WORKSPACE = 12  # activations that one block keeps while it is recomputed, in units of what leaves it
_EDGE_WORKSPACE = 2  # of the embedding and the head
FP32_BYTES = 4
_SAVED_OUTPUTS = 4 / 3  # times that the output of a block's matrix is kept between forward and backward
_SAVED_WIDTHS = 5.0  # and vectors of the model's width, a block
_GRADIENT_OUTPUTS = 1 / 3  # gradients of a block's outputs that exist at once
_LARGEST_MATRIX = 0.25  # of a block's elements
_LOGITS = 3  # logits, their log-softmax, its gradient


class Reach(StrEnum):
    """Who can open a connection to a machine."""

    PUBLIC = "public"
    RELAYED = "relayed"  # behind NAT: reaches public machines, and others through a relay
    OUTBOUND = "outbound"  # reaches public machines only


class Goal(StrEnum):
    """What a plan is to make small."""

    TIME = "time"  # seconds per token
    PRICE = "price"  # money per token


@dataclass(frozen=True)
class Layer:
    """A row of the layer table."""

    name: str
    kind: str
    parameters: int
    flops_per_token: float  # forward
    activation_bytes_per_token: int  # what leaves it, fp32
    tied_to: tuple[str, ...] = ()  # layers whose parameters it borrows
    workspace_bytes_per_token: int = 0  # kept while it is recomputed and differentiated
    saved_bytes_per_token: int = 0  # beside that, while others of its span are; 0: what leaves it
    workspace_bytes: int = 0  # whatever the tokens: a matrix's gradient before it is added
    frozen_parameters: int = 0  # held beside the others; neither trained nor averaged


@dataclass(frozen=True)
class Machine:
    """A node's profile, after its volunteer's limits."""

    name: str
    device_memory_bytes: float
    host_memory_bytes: float
    uplink_bytes_per_second: float
    downlink_bytes_per_second: float
    flops_per_second: float = 0.0  # that training reaches; used for kinds without a measured time
    seconds_per_token: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # kind → forward, backward
    region: str = ""  # a label; breaks ties between measured distances
    reach: Reach = Reach.PUBLIC
    shares_memory: bool = False  # device and host memory are one: a CPU
    holds_whole: bool | None = None  # its own word on whether all layers fit; None: as computed
    minimum_step_seconds: float = 0.0  # no inner step of a route that it is on is shorter
    price_per_hour: float = 0.0
    availability: float = 1.0  # share of the time that it is there
    failures_per_hour: float = 0.0
    trusted: bool = True
    kind: str = ""  # of hardware, for people
    speed_measured: bool = True  # its speed is that at which it was seen to work, not only told


@dataclass(frozen=True)
class Links:
    """Measured paths between machines, N × N. `unknown_pairs` were estimated from the others (`links.py`)."""

    rtt_seconds: FloatArray  # symmetric; inf: no path is known
    bytes_per_second: FloatArray  # [source, target]; inf: nothing but their access links limits it; 0: closed
    unknown_pairs: int = 0


@dataclass(frozen=True)
class Training:
    """How the run trains, as far as places matter."""

    micro_batch_tokens: int
    micro_batches: int  # per inner step (flush) of one route
    round_tokens: int  # of the whole swarm between two outer rounds
    ahead: int = 5  # micro-batches that each link keeps on their way beside those that stages work on
    activation_ratio: float = INT8_OF_FP32  # bytes on the wire per byte of fp32 activation
    gradient_ratio: float = INT8_OF_FP32
    outer_bytes_per_parameter: float = INT4_BYTES
    device_bytes_per_parameter: float = 16.0  # fp32 weight, gradient, two AdamW moments
    tied_user_bytes_per_parameter: float = (
        8.0  # of a tied matrix: here are its values and a gradient, elsewhere moments
    )
    tied_owner_bytes_per_parameter: float = 0.0  # of one: on its way
    host_bytes_per_parameter: float = 12.0  # anchor, outer momentum, pseudo-gradient
    state_bytes_per_parameter: float = 8.0  # anchor and momentum: what a new holder fetches
    tie_bytes_per_parameter: float = 4.0  # a borrowed matrix comes, and its gradient goes, once a flush
    backward_per_forward: float = 2.0  # FLOPs, for machines without a measured time
    activation_checkpointing: bool = False  # of machines that hold everything; stages always run forward again
    link_efficiency: float = 0.9  # of a measured link that transfers reach
    protocol_round_trips: float = 6.0  # of an outer round beside its bytes

    def in_flight(self, stages: int) -> int:
        """Micro-batches on a route of so many stages at a time, at most: its first stage's credits."""
        return min(self.micro_batches, (stages - 1) * (1 + self.ahead) + 1)


@dataclass(frozen=True)
class Pin:
    """The operator's word on one machine: exactly this span (first, last), or no part in training."""

    machine: str
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Wishes:
    """What the operator wants, and what weighs how much."""

    goal: Goal = Goal.TIME
    pins: tuple[Pin, ...] = ()
    kept: tuple[Pin, ...] = ()  # the same, but it costs nothing to leave them without a part
    trusted_ends: bool = False  # only trusted machines hold the first or the last layer
    rtt_cap_seconds: float = Preferences.rtt_cap_seconds  # inside a route
    rtt_weight: float = 2.0  # times that what is above the cap counts beside what it costs
    sole_holder_discount: float = 0.05  # of the score where every layer has only one holder
    unused_pin_discount: float = 1e-6  # of the score for each pinned machine without a place: only where it must be
    recovery_seconds: float = 60.0  # from a stage's failure until its route trains again
    hysteresis: float = Preferences.hysteresis  # a new plan must be better by this share
    unmeasured_speed_hysteresis: float = (
        0.2  # where it takes a place from somebody for a machine whose speed is only told
    )
    horizon_seconds: float = Preferences.horizon_seconds  # over which it must pay for its moves


@dataclass(frozen=True)
class Problem:
    """Everything a planner may look at."""

    machines: tuple[Machine, ...]
    links: Links
    layers: tuple[Layer, ...]
    training: Training
    wishes: Wishes = Wishes()

    @property
    def parameters(self) -> int:
        """Of the model, ties counted once."""
        return sum(layer.parameters for layer in self.layers)


@dataclass(frozen=True)
class Stage:
    """One machine's part in a route."""

    machine: int
    first: int
    last: int  # inclusive


Route = tuple[Stage, ...]


@dataclass(frozen=True)
class Layout:
    """Who holds what: routes whose stages cover all layers once, each machine in one route at most."""

    routes: tuple[Route, ...]

    @property
    def machines(self) -> tuple[int, ...]:
        """All that have a place."""
        return tuple(stage.machine for route in self.routes for stage in route)


def read_layers(table: plan_pb2.LayerTable, sequence_length: int) -> tuple[Layer, ...]:
    """The rows of a run's layer table. What a layer keeps while it is differentiated is not in it: it is estimated from
    its multiplications, as nodes do who refuse what does not fit (`docs/explain/pipelines.md`)."""
    width = table.layers[0].activation_bytes_per_token / FP32_BYTES if table.layers else 0.0
    return tuple(_read(row, width, sequence_length) for row in table.layers)


def _read(row: plan_pb2.LayerInfo, width: float, sequence_length: int) -> Layer:
    outputs = max(0.0, row.flops_per_token_forward / 2 / width - sequence_length) if width else 0.0  # of its matrices
    kept = FP32_BYTES * (_SAVED_OUTPUTS * outputs + _SAVED_WIDTHS * width)
    moving = FP32_BYTES * (_GRADIENT_OUTPUTS * outputs + 2 * width)
    block = is_block(row.kind)
    logits = _LOGITS * row.activation_bytes_per_token if row.kind == "head" else 0
    return Layer(
        name=row.name,
        kind=row.kind,
        parameters=row.parameters,
        flops_per_token=row.flops_per_token_forward,
        activation_bytes_per_token=row.activation_bytes_per_token,
        tied_to=tuple(row.tied_to),
        workspace_bytes_per_token=int(moving if block else FP32_BYTES * 2 * width + logits),
        saved_bytes_per_token=int(kept) if block else 0,
        frozen_parameters=row.frozen_parameters,
        workspace_bytes=0 if row.frozen_parameters else _dense_bytes(row.parameters, block),
    )


def _dense_bytes(parameters: int, block: bool) -> int:
    """The gradient of a layer's largest matrix; adapters beside frozen ones are thin."""
    return int(FP32_BYTES * parameters * (_LARGEST_MATRIX if block else 1))


def decoder_layers(
    *, blocks: int, dimension: int, block_parameters: int, vocabulary: int, sequence_length: int, tied: bool = False
) -> tuple[Layer, ...]:
    """The rows for a decoder that has no layer table yet: embedding, blocks, head."""
    matrix, activation = vocabulary * dimension, 4 * dimension
    block_flops = 2.0 * block_parameters + 2.0 * dimension * sequence_length  # weights; causal attention
    block = Layer("block", "block", block_parameters, block_flops, activation, (), _BLOCK_WORKSPACE * activation)
    return (
        Layer("embedding", "embedding", matrix, 0.0, activation, (), _EDGE_WORKSPACE * activation),
        *(replace(block, name=f"block.{number}") for number in range(blocks)),
        Layer(
            "head",
            "head",
            dimension + (0 if tied else matrix),
            2.0 * matrix,
            4 * vocabulary,
            ("embedding",) if tied else (),
            _EDGE_WORKSPACE * 4 * vocabulary,
        ),
    )
