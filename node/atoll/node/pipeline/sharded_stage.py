"""A stage on a node with several devices. Each device computes its samples of every micro-batch.

The span's weights are sharded over the devices (`FsdpModel`), with one process (rank) per device. Rank 0 has the route.
It wraps its part in `LeaderStage`, which sends each operation to the other ranks before executing it. Rank 0 scatters
samples and gathers outputs, so neighbours see whole tensors. Losses, norms and gradients are sums over all devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple, Unpack

import torch
from torch import Tensor

from atoll.core.errors import InvalidRequest
from atoll.core.run_spec import OptimizerSection, RunSpec
from atoll.node.model.run_model import RunModel
from atoll.node.model.span import Span
from atoll.node.pipeline.messages import Message
from atoll.node.pipeline.rank_order import RankOrder
from atoll.node.pipeline.stage import Stage
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.device import working_precision
from atoll.node.training.device_group import DeviceGroup
from atoll.node.training.fsdp_model import FsdpModel, shard_model
from atoll.node.training.targets import IGNORED, divisor

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class ShardedStage(Stage):
    """One device's part of a stage. Tensors from the route are None on all ranks but rank 0."""

    def __init__(
        self, model: FsdpModel, section: OptimizerSection, room: MicroBatchShape, precision: str, group: DeviceGroup
    ) -> None:
        super().__init__(model, section, room, precision)
        self._fsdp_model, self._group = model, group
        self._rows: dict[int, int] = {}  # micro-batch in flight → number of its samples on all devices
        self._targets_by_rank: tuple[int, ...] = ()  # of the current micro-batch: targets in each device's samples
        self._loss_divisor = 1.0  # turns the mean over this device's targets into its share of the micro-batch's mean
        self._tied_gradient_VD: Tensor | None = None

    def targets_by_rank(self, targets_BT: Tensor) -> tuple[int, ...]:
        """Count the targets in the samples of each device."""
        counts = [int((targets_BT[rows] != IGNORED).sum()) for rows in self._group.rows_by_rank(len(targets_BT))]
        return tuple(counts)

    def forward_part(
        self,
        micro_batch: int,
        rows: int,
        targets: tuple[int, ...],
        x: Tensor | None,
        targets_BT: Tensor | None,
        starts_BT: Tensor | None,
    ) -> Tensor:
        """Run `forward` on this device's share of `rows` samples. Rank 0 returns the output of all samples.

        `targets`: what `targets_by_rank` returned on rank 0.
        """
        span_definition, tokens, before = (
            self._fsdp_model.span_definition,
            self._micro_batch_shape.tokens,
            self._flush_tokens,
        )
        shape, dtype = (
            ((tokens,), torch.int64)
            if span_definition.is_first
            else ((tokens, span_definition.dimension), torch.float32)
        )
        x_here = self._group.scatter(rows, shape, dtype, x)
        targets_here = self._group.scatter(rows, (tokens,), torch.int64, targets_BT)
        self._rows[micro_batch] = rows
        self._targets_by_rank = targets
        self._loss_divisor = divisor(sum(targets), targets[self._group.rank])
        starts_here = None
        if self._micro_batch_shape.document_masks:
            starts_here = self._group.scatter(rows, (tokens,), torch.uint8, starts_BT).bool()
        output = self.forward(micro_batch, x_here, targets_here, starts_here)
        self._flush_tokens = before + rows * tokens
        return output if span_definition.is_last else self._group.gather(rows, output)

    def backward_part(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        """Run `backward` on this device's samples. Rank 0 returns the gradient of all samples."""
        span_definition, rows = self._fsdp_model.span_definition, self._rows.pop(micro_batch)
        shape = (self._micro_batch_shape.tokens, span_definition.dimension)
        gradient = None if span_definition.is_last else self._group.scatter(rows, shape, torch.float32, gradient_BTD)
        found = self.backward(micro_batch, gradient)
        return None if found is None else self._group.gather(rows, found)

    def _mean_loss(self, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
        return super()._mean_loss(x, targets_BT, starts_BT) / self._loss_divisor

    def _divisor_of(self, targets_BT: Tensor) -> float:
        if self._targets is None:
            return self._micro_batches
        return divisor(self._targets, sum(self._targets_by_rank))

    def _samples(self, micro_batch: int) -> int | None:
        """Samples on all devices: a neighbour sends the gradient of all of them."""
        return self._rows.get(micro_batch)

    def norms(self) -> tuple[float, ...]:
        self._fsdp_model.gather_gradients()
        if self._tied_gradient_VD is not None:
            self._fsdp_model.add_to_tied_gradient(self._tied_gradient_VD)
            self._tied_gradient_VD = None
        return super().norms()

    def loss(self) -> float:
        return float(self._group.all_reduce_sum(self._loss_sum.clone()))

    def abort(self) -> None:
        self._rows.clear()
        self._tied_gradient_VD = None
        super().abort()

    def end_evaluation(self) -> int:
        self._rows.clear()
        return super().end_evaluation()

    def tied_weights(self) -> Tensor:
        return self._fsdp_model.gather_tied_weight()

    def set_tied_weights_part(self, weights_VD: Tensor | None) -> None:
        """Broadcast rank 0's copy of the tied weight, and use it from now on."""
        with torch.no_grad():
            if weights_VD is not None:
                self._fsdp_model.tied_weight_copy.copy_(weights_VD)
        self._group.broadcast(self._fsdp_model.tied_weight_copy.data)

    def tied_gradient(self) -> Tensor:
        return self._group.all_reduce_sum(super().tied_gradient())

    def add_tied_part(self, gradient_VD: Tensor | None) -> None:
        """Broadcast rank 0's gradient of the tied weight. `norms` adds it after gathering the gradients."""
        whole_VD = torch.empty(self._fsdp_model.tied_weight.shape, device=self._fsdp_model.device)
        if gradient_VD is not None:
            whole_VD.copy_(gradient_VD)
        self._tied_gradient_VD = self._group.broadcast(whole_VD)

    def run_order(self, order: RankOrder) -> None:
        """Execute this device's part of one of `RANK_METHODS`. Raises `InvalidRequest` for any other name."""
        if order.method not in RANK_METHODS:
            raise InvalidRequest(f"a rank executes no operation {order.method!r}")
        getattr(self, order.method)(*order.arguments)


RANK_METHODS = frozenset(
    {
        "abort", "add_tied_part", "backward_part", "begin", "begin_evaluation", "end_evaluation", "forward_part",
        "loss", "norms", "set_tied_weights_part", "step", "tied_gradient", "tied_weights",
    }
)  # fmt: skip


def build_sharded_stage(spec: RunSpec, run: RunModel, span: Span, group: DeviceGroup) -> ShardedStage:
    """Load this device's part of a span. Raises `InvalidRequest`, `ConfigError`."""
    section = spec.optimizer
    room = MicroBatchShape.of(spec)
    precision = working_precision(section.precision, group.device)
    return ShardedStage(shard_model(run, span, group, section), section, room, precision, group)


class LeaderStage:
    """The whole stage as rank 0 sees it: each operation of `StageCompute` runs on all ranks."""

    def __init__(self, part: ShardedStage, send_to_ranks: Callable[[RankOrder], object]) -> None:
        """`part`: rank 0's part. `send_to_ranks` sends an order to all other ranks."""
        self._part, self._send_to_ranks = part, send_to_ranks

    def _on_all_ranks(self, method: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Call a method of `ShardedStage` on all ranks. Ranks other than rank 0 get None for tensors."""
        known = tuple(None if isinstance(value, Tensor) else value for value in arguments)
        self._send_to_ranks(RankOrder(method.__name__, known))
        return method(*arguments)

    def check(self, message: Message) -> None:
        self._part.check(message)

    def begin(self, micro_batches: int, targets: int | None = None) -> None:
        self._on_all_ranks(self._part.begin, micro_batches, targets)

    def forward(self, micro_batch: int, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        targets, rows = self._part.targets_by_rank(targets_BT), len(targets_BT)
        return self._on_all_ranks(self._part.forward_part, micro_batch, rows, targets, x, targets_BT, starts_BT)

    def backward(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        return self._on_all_ranks(self._part.backward_part, micro_batch, gradient_BTD)

    def norms(self) -> tuple[float, ...]:
        return self._on_all_ranks(self._part.norms)

    def loss(self) -> float:
        return self._on_all_ranks(self._part.loss)

    def step(self, factor: float | None) -> None:
        self._on_all_ranks(self._part.step, factor)

    def abort(self) -> None:
        self._on_all_ranks(self._part.abort)

    def begin_evaluation(self, micro_batches: int, targets: int | None = None) -> None:
        self._on_all_ranks(self._part.begin_evaluation, micro_batches, targets)

    def end_evaluation(self) -> int:
        return self._on_all_ranks(self._part.end_evaluation)

    def tied_weights(self) -> Tensor:
        return self._on_all_ranks(self._part.tied_weights)

    def set_tied_weights(self, weights_VD: Tensor) -> None:
        self._on_all_ranks(self._part.set_tied_weights_part, weights_VD)

    def tied_gradient(self) -> Tensor:
        return self._on_all_ranks(self._part.tied_gradient)

    def add_tied(self, gradient_VD: Tensor) -> None:
        self._on_all_ranks(self._part.add_tied_part, gradient_VD)
