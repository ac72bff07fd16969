"""Forecast of a run from its spec alone: size, batch, rounds, bytes, disk. Pure.

`placement_forecast.py` adds the figures that depend on nodes. A figure that cannot be known here is None: the layer
table of a Hugging Face model, for example, can only be made by a node.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from atoll.coordinator.planner.problem import read_layers
from atoll.coordinator.planner.span_memory import training_of
from atoll.core.built_in_shape import FP32_BYTES, ModelShape, layer_table, resolve_shape
from atoll.core.errors import UnsupportedModel
from atoll.core.fragments import fragment_count
from atoll.core.model_memory import built_in_memory_bytes, replica_memory_bytes
from atoll.core.model_size import STATE_BYTES
from atoll.core.model_spec import ModelSection
from atoll.core.round_schedule import due_tokens, rounds_until
from atoll.core.run_spec import RunSpec
from atoll.v1 import plan_pb2

BYTE_VOCABULARY = 256
MOST_BLOCKS = 1 << 14  # a layer table has one row for each
CHECKPOINTS_KEPT = 3  # by a node, unless its owner set `checkpoint_keep`


@dataclass(frozen=True)
class KnownRun:
    """A run of the coordinator: its nodes measured their layers, and its layer table may be that of another spec."""

    run_id: str
    spec: RunSpec
    layers: plan_pb2.LayerTable  # empty before genesis


@dataclass(frozen=True)
class Model:
    """A model whose layers are known."""

    table: plan_pb2.LayerTable
    shape: ModelShape | None  # of the built-in decoder
    origin: str  # the run whose layer table it is; empty: computed from the spec

    @property
    def parameters(self) -> int:
        """Number of trained parameters: the averaged ones."""
        return sum(row.parameters for row in self.table.layers)

    def memory_bytes(self, spec: RunSpec, *, cuda: bool) -> int:
        """Memory for training all layers, by the estimate that nodes use to refuse a model."""
        samples = spec.optimizer.micro_batch_samples
        if self.shape is not None:
            return built_in_memory_bytes(spec, self.shape, samples, cuda=cuda)
        return replica_memory_bytes(self.table, spec, samples)


@dataclass(frozen=True)
class KindSize:
    """All layers of one kind."""

    kind: str
    layers: int
    parameters: int  # sum over all layers of this kind


@dataclass(frozen=True)
class Rounds:
    """Outer rounds of a run, and the size of a round after the first, smaller rounds."""

    members: int  # nodes that each hold all layers, or routes of nodes
    fragments: int
    total: int  # until stop_tokens
    tokens: int  # of one round
    steps: float  # inner steps of each member in a round, if all are equally fast


@dataclass(frozen=True)
class Traffic:
    """Bytes that a node with all layers sends, and also receives, for averaging among equal holders."""

    codec: str  # assumed codec
    holders: int
    round_bytes: float  # of one fragment, on average
    run_bytes: float
    day_bytes: float | None  # None if the pace is unknown


def known_model(spec: RunSpec, runs: Sequence[KnownRun] = ()) -> Model | None:
    """Find the layers of a spec's model; None if only a node can build their table. Raises `UnsupportedModel`."""
    if isinstance(spec.model, ModelSection):
        vocabulary = _vocabulary(spec, spec.model, runs)
        if vocabulary is None:
            return None
        size, origin = vocabulary
        shape = resolve_shape(spec.model, size)
        if shape.layers > MOST_BLOCKS:
            raise UnsupportedModel(f"{shape.layers} blocks are too many to count", f"at most {MOST_BLOCKS} are counted")
        return Model(layer_table(spec, shape), shape, origin)
    for run in runs:
        if run.layers.layers and _same_model(spec, run) and _table_part(spec) == _table_part(run.spec):
            return Model(run.layers, None, run.run_id)
    return None


def _vocabulary(spec: RunSpec, section: ModelSection, runs: Sequence[KnownRun]) -> tuple[int, str] | None:
    """Smallest possible size of the vocabulary, and the run that it is known from, if the spec does not give it."""
    bytes_only = spec.data.source != "corpus" and spec.data.tokenizer == "bytes"
    if bytes_only or section.vocabulary is not None:
        return (BYTE_VOCABULARY if bytes_only else section.vocabulary or 0), ""
    for run in runs:
        if run.layers.layers and _same_model(spec, run):
            return run.layers.layers[-1].activation_bytes_per_token // FP32_BYTES, run.run_id
    return None


def _same_model(spec: RunSpec, run: KnownRun) -> bool:
    return spec.data.corpus == run.spec.data.corpus and run.layers.model_hash == spec.model_hash()


def _table_part(spec: RunSpec) -> tuple[object, ...]:
    """Keys outside of the model's section on which a layer table depends."""
    return spec.data.sequence_length, spec.data.document_masks, spec.optimizer.precision


def known_kinds(spec: RunSpec, model: Model | None) -> tuple[KindSize, ...]:
    """Sizes by kind of layer; without a model, of the blocks only, if the spec gives them.

    Raises `UnsupportedModel`.
    """
    if model is not None:
        kinds = dict.fromkeys(row.kind for row in model.table.layers)
        rows = {kind: [row for row in model.table.layers if row.kind == kind] for kind in kinds}
        return tuple(KindSize(kind, len(of), sum(row.parameters for row in of)) for kind, of in rows.items())
    if not isinstance(spec.model, ModelSection):
        return ()
    shape = resolve_shape(spec.model, BYTE_VOCABULARY)  # blocks do not depend on the vocabulary
    return (KindSize("block", shape.layers, shape.layers * shape.block_parameters),)


def forecast_rounds(
    spec: RunSpec, layers: int | None, members: int, cuts: int = 0, pace: float | None = None, busy_seconds: float = 0.0
) -> Rounds:
    """Count rounds with `members` that train: nodes, or routes if the model has `cuts`.

    `pace` in tokens/s: `round_max_seconds` may end rounds early, but a round is never shorter than its exchange
    (`busy_seconds` for all fragments), nor than a step of one member.
    """
    fragments = spec.sync.fragments if layers is None else fragment_count(spec.sync.fragments, layers, cuts)
    step = spec.tokens_per_flush if cuts else spec.tokens_per_step
    stop, first = spec.run.stop_tokens, members * step
    turn = max(spec.sync.round_max_seconds.total_seconds(), busy_seconds)
    most = math.inf if pace is None else max(pace * turn / fragments, step)
    tokens = min(stop, max(1, int(min(due_tokens(spec.sync, stop, first, fragments), most))))
    total = rounds_until(spec.sync, stop, first, fragments, most)
    return Rounds(members, fragments, total, tokens, tokens / first)


def exchanged_vectors(holders: int) -> float:
    """Number of vectors that each of so many equal holders sends, and receives, to average one (`reduce_shares.py`)."""
    if holders < 2:
        return 0.0
    return 1 + (holders - 2) / holders


def forecast_traffic(
    spec: RunSpec, model: Model, rounds: Rounds, holders: int, seconds: float | None = None
) -> Traffic:
    """Bytes of averaging of a node with all layers, or of all stages of a route together.

    `seconds` that the run takes, for the mean of a day.
    """
    per_parameter = training_of(spec, read_layers(model.table, spec.data.sequence_length)).outer_bytes_per_parameter
    turn = per_parameter * model.parameters * exchanged_vectors(holders)
    run_bytes = turn / rounds.fragments * rounds.total
    return Traffic(
        codec="int4" if spec.sync.codec == "auto" else spec.sync.codec,
        holders=holders,
        round_bytes=turn / rounds.fragments,
        run_bytes=run_bytes,
        day_bytes=None if seconds is None else run_bytes * min(1.0, 86400 / seconds),
    )


def checkpoint_bytes(model: Model) -> int:
    """One checkpoint of all layers: anchor and outer momentum."""
    return STATE_BYTES * model.parameters


def unknown_of(spec: RunSpec, model: Model | None) -> Iterator[str]:
    """Yield sentences on what the spec does not determine, and how to find it out."""
    if model is not None:
        return
    if isinstance(spec.model, ModelSection):
        yield (
            "the vocabulary is that of the tokenizer, which only nodes have. With --set model.vocabulary=N all figures "
            "of the model are known"
        )
    else:
        yield (
            "only a node can make the layer table of a Hugging Face model. Once a run of this coordinator has the same "
            "model, sequence length and precision, its table is used here"
        )
