"""The placement problem as plain data: machines, links, layers, training parameters, the operator's preferences.

A solver turns a `Problem` into a `Layout`: routes whose stages hold the layers. `cost.py` is the only module that
evaluates a layout. `docs/explain/planner.md` states the problem in words and formulas. Quantities are in bytes,
seconds, tokens and FLOPs. A machine is identified by its index in `Problem.machines`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from atoll.coordinator.planner.question import Preferences
from atoll.core.document_masks import NO_MASKS, MaskMemory
from atoll.core.layer_kinds import is_block
from atoll.v1 import plan_pb2

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

INT8_OF_FP32 = (1 + 2 / 128) / 4  # 128-element blocks with a two-byte scale
INT4_BYTES = 0.5 + 2 / 128  # per parameter
_BLOCK_WORKSPACE = 12  # activations that a block keeps while it is recomputed, in units of its output
_EDGE_WORKSPACE = 2  # the same for the embedding and the head
FP32_BYTES = 4
_SAVED_OUTPUTS = 4 / 3  # copies of a block's matrix outputs that are kept between forward and backward
_SAVED_WIDTHS = 5.0  # vectors of the model's width that a block keeps in addition
_GRADIENT_OUTPUTS = 1 / 3  # share of a block's output gradients that exist at the same time
_LARGEST_MATRIX = 0.25  # share of a block's parameters
_LOGITS = 3  # logits, their log-softmax, its gradient


class Reach(StrEnum):
    """Reachability of a machine: the ways in which others can connect to it."""

    PUBLIC = "public"
    RELAYED = "relayed"  # behind NAT: connects to public machines directly, to others through a relay
    OUTBOUND = "outbound"  # connects to public machines only


class Goal(StrEnum):
    """The quantity that a plan minimises."""

    TIME = "time"  # seconds per token
    PRICE = "price"  # money per token


@dataclass(frozen=True)
class Layer:
    """A row of the layer table."""

    name: str
    kind: str
    parameters: int
    flops_per_token: float  # forward
    activation_bytes_per_token: int  # its output, fp32
    tied_to: tuple[str, ...] = ()  # layers whose parameters it shares
    workspace_bytes_per_token: int = 0  # held while this layer is recomputed and differentiated
    saved_bytes_per_token: int = 0  # held while other layers of its span are differentiated; 0: its output
    workspace_bytes: int = 0  # independent of the tokens: a matrix's gradient before it is accumulated
    frozen_parameters: int = 0  # held in addition to `parameters`; neither trained nor averaged
    masked_bytes_per_token: int = 0  # held in addition in a run with document masks (`core/document_masks.py`)


@dataclass(frozen=True)
class Machine:
    """A node's properties, within its owner's limits."""

    name: str
    device_memory_bytes: float
    host_memory_bytes: float
    uplink_bytes_per_second: float
    downlink_bytes_per_second: float
    flops_per_second: float = 0.0  # reached in training; used for layer kinds without a measured time
    seconds_per_token: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # kind → forward, backward
    region: str = ""  # a label; breaks ties between measured distances
    reach: Reach = Reach.PUBLIC
    shares_memory: bool = False  # device and host memory are the same: a CPU
    holds_whole: bool | None = None  # the node's own report of whether all layers fit; None: computed here
    minimum_step_seconds: float = 0.0  # lower bound for an inner step of its route, set by its owner
    price_per_hour: float = 0.0
    availability: float = 1.0  # share of the time that it is present
    failures_per_hour: float = 0.0
    trusted: bool = True
    kind: str = ""  # of hardware, for display
    speed_measured: bool = True  # measured in training; False: only claimed by the node


@dataclass(frozen=True)
class Links:
    """Paths between machines, [N, N]; `links.py` estimates missing ones from measured ones."""

    rtt_seconds: FloatArray  # symmetric; inf: no path is known
    bytes_per_second: FloatArray  # [source, target]; inf: only the access links limit it; 0: closed


@dataclass(frozen=True)
class Training:
    """Training parameters of the run that matter for placement."""

    micro_batch_tokens: int
    micro_batches: int  # per inner step (flush) of one route
    round_tokens: int  # of the whole swarm between two outer rounds
    ahead: int = 5  # micro-batches in flight on each link, in addition to those that the stages compute
    activation_ratio: float = INT8_OF_FP32  # bytes on the wire per byte of fp32 activation
    gradient_ratio: float = INT8_OF_FP32
    outer_bytes_per_parameter: float = INT4_BYTES
    device_bytes_per_parameter: float = 16.0  # fp32 weight, gradient, two AdamW moments
    tied_user_bytes_per_parameter: float = 8.0  # a tied matrix at its user: values and gradient, without moments
    tied_owner_bytes_per_parameter: float = 0.0  # a tied matrix at its owner: buffers for transfers
    host_bytes_per_parameter: float = 12.0  # anchor, outer momentum, pseudo-gradient
    tie_bytes_per_parameter: float = 4.0  # values to the user, gradient to the owner, once a flush each
    backward_per_forward: float = 2.0  # FLOPs, for machines without a measured time
    masks: MaskMemory = NO_MASKS  # of documents
    activation_checkpointing: bool = False  # on machines that hold all layers; stages always recompute
    link_efficiency: float = 0.9  # share of a measured bandwidth that transfers reach
    protocol_round_trips: float = 6.0  # of an outer round, in addition to its transfers

    def in_flight(self, stages: int) -> int:
        """Largest number of micro-batches on a route of `stages` stages: the credits of its first stage."""
        return min(self.micro_batches, (stages - 1) * (1 + self.ahead) + 1)


@dataclass(frozen=True)
class Pin:
    """The operator's order for one machine: exactly this span (first, last), or no part in training."""

    machine: str
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Wishes:
    """The operator's preferences, and the weights of the score."""

    goal: Goal = Goal.TIME
    pins: tuple[Pin, ...] = ()
    allowed_spans: tuple[Pin, ...] = ()  # like pins, but a machine without a place costs nothing
    trusted_ends: bool = False  # only trusted machines hold the first or the last layer
    rtt_cap_seconds: float = Preferences.rtt_cap_seconds  # between neighbours of a route
    rtt_weight: float = 2.0  # penalty for each second above the cap, in seconds, in addition to the real cost
    sole_holder_discount: float = 0.05  # of the score if every layer has only one holder
    unused_pin_discount: float = 1e-6  # factor on the score per pinned machine without a place: a last resort
    recovery_seconds: float = 60.0  # from a stage's failure until its route trains again
    hysteresis: float = Preferences.hysteresis  # share by which a new plan must be better
    # used instead if a machine would be replaced by one whose speed is only claimed
    unmeasured_speed_hysteresis: float = 0.2
    # time within which a plan's gain must exceed the cost of its moves
    horizon_seconds: float = Preferences.horizon_seconds


@dataclass(frozen=True)
class Problem:
    """Everything that a solver may use."""

    machines: tuple[Machine, ...]
    links: Links
    layers: tuple[Layer, ...]
    training: Training
    wishes: Wishes = Wishes()

    @property
    def parameters(self) -> int:
        """Parameters of the model, tied ones counted once."""
        return sum(layer.parameters for layer in self.layers)


@dataclass(frozen=True)
class Stage:
    """One machine's span in a route."""

    machine: int
    first: int
    last: int  # inclusive


Route = tuple[Stage, ...]


@dataclass(frozen=True)
class Layout:
    """Routes whose stages cover all layers once; each machine is in one route at most."""

    routes: tuple[Route, ...]

    @property
    def machines(self) -> tuple[int, ...]:
        """All machines that have a place."""
        return tuple(stage.machine for route in self.routes for stage in route)


def read_layers(table: plan_pb2.LayerTable, sequence_length: int) -> tuple[Layer, ...]:
    """Read the rows of a run's layer table.

    The table has no activation memory. It is estimated from each layer's FLOPs, with the same formula by which nodes
    refuse spans that do not fit (`docs/explain/pipelines.md`).
    """
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
        masked_bytes_per_token=row.masked_bytes_per_token,
        workspace_bytes=0 if row.frozen_parameters else _dense_bytes(row.parameters, block),
    )


def _dense_bytes(parameters: int, block: bool) -> int:
    """Bytes of the gradient of a layer's largest matrix. Layers with frozen parameters train thin adapters only."""
    return int(FP32_BYTES * parameters * (_LARGEST_MATRIX if block else 1))


def decoder_layers(
    *, blocks: int, dimension: int, block_parameters: int, vocabulary: int, sequence_length: int, tied: bool = False
) -> tuple[Layer, ...]:
    """Build the layers of a decoder without a layer table: embedding, blocks, head."""
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
