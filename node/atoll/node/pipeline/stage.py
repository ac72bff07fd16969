"""Computation of one stage: forward, recompute, backward and step of its span.

A stage keeps only the input of each micro-batch in flight; backward recomputes the span from it. The last stage runs
backward right after forward and keeps the graph instead. Gradients add up in the span's flat gradient. Nothing else
changes before the step, so zeroing the gradient undoes a flush.

Shape suffixes: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.run_spec import OptimizerSection
from atoll.node.model.span_model import StageModel
from atoll.node.pipeline.messages import Gradient, Message
from atoll.node.pipeline.stage_checks import MicroBatchShape, StageChecks
from atoll.node.training.inner_optimizer import InnerOptimizer
from atoll.node.training.targets import IGNORED, cross_entropy, divisor


class Stage:
    """One span in memory. `precision` is fp32, or bf16 for matrix products; there is no loss scaling.

    It has more than 20 methods: `StageCompute` alone demands 13. It has more than 15 attributes: the state of a flush,
    of each micro-batch in flight, and of an evaluation.
    """

    def __init__(
        self, model: StageModel, section: OptimizerSection, room: MicroBatchShape, precision: str = "fp32"
    ) -> None:
        self.model, self._micro_batch_shape, self._precision = model, room, precision
        self._checks = StageChecks(model, room)
        self.optimizer = InnerOptimizer(model.parameters(), model.embedding, section, model.device, model.muon_matrices)
        self.steps = self.tokens = self.skipped_steps = 0  # of finished flushes, skipped ones included
        self.anchor: Tensor | None = None  # for evaluations; the trainer's loop owns it
        self.anchor_tokens = 0  # committed tokens of the anchor
        self._evaluates = False
        self._flush_tokens = 0
        self._micro_batches = 1
        self._targets: int | None = None  # of the flush; None: all count
        self._divisor = 1.0  # divides a micro-batch's mean loss to give its share of the flush's mean loss
        self._inputs: dict[int, Tensor] = {}
        self._starts: dict[int, Tensor | None] = {}  # of documents, by micro-batch in flight
        self._losses: dict[int, Tensor] = {}
        self._loss_sum = torch.zeros((), device=model.device)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate from the next step on."""
        self.optimizer.set_learning_rate(learning_rate)

    # --- a flush ------------------------------------------------------------------------------------

    def begin(self, micro_batches: int, targets: int | None = None) -> None:
        """Begin a flush of this many micro-batches and targets (None: all count)."""
        self._micro_batches, self._targets, self._flush_tokens = micro_batches, targets, 0
        self._loss_sum.zero_()

    def forward(self, micro_batch: int, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """Compute activations [B,T,D]; on the last stage, the micro-batch's share of the flush's mean loss (scalar).

        `starts_BT` tells where documents start, in a run with document masks.
        """
        self._flush_tokens += targets_BT.numel()
        x = x.to(self.model.device, non_blocking=True)
        starts_BT = None if starts_BT is None else starts_BT.to(self.model.device, non_blocking=True)
        if self.model.span_definition.is_last:
            self._divisor = self._divisor_of(targets_BT)
            return self._forward_loss(micro_batch, x, targets_BT.to(self.model.device, non_blocking=True), starts_BT)
        if not self._evaluates:
            self._inputs[micro_batch], self._starts[micro_batch] = x, starts_BT
        with torch.no_grad():
            return self._run(x, starts_BT)

    def _forward_loss(self, micro_batch: int, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
        if self._evaluates:
            with torch.no_grad():
                loss = self._mean_loss(x, targets_BT, starts_BT)
            self._loss_sum += loss
            return loss
        x = _leaf(x)
        loss = self._mean_loss(x, targets_BT, starts_BT)
        self._inputs[micro_batch], self._losses[micro_batch] = x, loss
        self._loss_sum += loss.detach()
        return loss.detach()

    def _mean_loss(self, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
        """The micro-batch's share of the flush's mean loss."""
        return cross_entropy(self._run(x, starts_BT), targets_BT) / self._divisor

    def _divisor_of(self, targets_BT: Tensor) -> float:
        if self._targets is None:
            return self._micro_batches
        return divisor(self._targets, int((targets_BT != IGNORED).sum()))

    def backward(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        """Compute the gradient [B,T,D] of the span's input; None on the first stage.

        `gradient_BTD` is the gradient of the span's output; None on the last stage.
        """
        x, starts_BT = self._inputs.pop(micro_batch), self._starts.pop(micro_batch, None)
        if gradient_BTD is None:
            output = self._losses.pop(micro_batch)
        else:
            x = _leaf(x)
            output = self._run(x, starts_BT)
            gradient_BTD = gradient_BTD.to(self.model.device, non_blocking=True)
        if output.requires_grad:
            output.backward(gradient_BTD)  # type: ignore[no-untyped-call]
        return None if self.model.span_definition.is_first else x.grad

    def norms(self) -> tuple[float, ...]:
        """Norms of the span's gradient, one per layer."""
        return self.model.norms()

    def loss(self) -> float:
        """Mean loss of the flush, in nats per token."""
        return float(self._loss_sum)

    def step(self, factor: float | None) -> None:
        """Scale the gradient by `factor` and step; None skips the step. The gradient is zero afterwards."""
        if factor is None:
            self.skipped_steps += 1
        else:
            self.model.scale_gradients(factor)
            self.optimizer.step()
        self.model.zero_gradients()
        self.steps += 1
        self.tokens += self._flush_tokens

    def abort(self) -> None:
        """Undo the current flush."""
        if self._evaluates:
            self.end_evaluation()
        self._inputs.clear()
        self._starts.clear()
        self._losses.clear()
        self.model.zero_gradients()
        if self.model.span_definition.tie is not None and self.model.span_definition.is_last:
            self._borrowed_gradient().zero_()

    # --- an evaluation ------------------------------------------------------------------------------

    def begin_evaluation(self, micro_batches: int, targets: int | None = None) -> None:
        """Begin a forward-only flush over the anchor's parameters."""
        self.begin(micro_batches, targets)
        self._swap_weights_and_anchor()
        self._evaluates = True

    def end_evaluation(self) -> int:
        """Restore the stage's own weights. Returns the committed tokens of the anchor."""
        self._swap_weights_and_anchor()
        self._evaluates = False
        return self.anchor_tokens

    def _swap_weights_and_anchor(self) -> None:
        """Swap weights and anchor in place; needs memory for one layer."""
        assert self.anchor is not None
        for start, end in pairwise(self.model.trained_layout.layer_offsets):
            anchor = self.anchor[self.model.weights.local_slice(slice(start, end))]
            with self.model.weights.modify(slice(start, end)) as weights:
                kept = weights.clone()
                weights.copy_(anchor)
                anchor.copy_(kept)

    # --- tied weight --------------------------------------------------------------------------------

    def tied_weights(self) -> Tensor:
        """First stage: a copy [V,D] of the tied weight."""
        return self.model.tied_weight.detach().clone()

    def set_tied_weights(self, weights_VD: Tensor) -> None:
        """Last stage: use this tied weight in this flush."""
        with torch.no_grad():
            self.model.tied_weight_copy.copy_(weights_VD)

    def tied_gradient(self) -> Tensor:
        """Last stage: the tied weight's gradient [V,D] of this flush. Zeroes it afterwards."""
        gradient_VD = self._borrowed_gradient()
        returned_VD = gradient_VD.clone()
        gradient_VD.zero_()
        return returned_VD

    def add_tied(self, gradient_VD: Tensor) -> None:
        """First stage: add the last stage's gradient to the tied weight's."""
        gradient = self.model.tied_weight.grad
        assert gradient is not None
        gradient.add_(gradient_VD.to(gradient.device))

    def _borrowed_gradient(self) -> Tensor:
        gradient = self.model.tied_weight_copy.grad
        assert gradient is not None
        return gradient

    def check(self, message: Message) -> None:
        """Raise `PeerMisbehaved` unless the message's tensors have the shapes and dtypes of this run."""
        samples = self._samples(message.micro_batch) if isinstance(message, Gradient) else None
        self._checks.check(message, evaluates=self._evaluates, samples=samples)

    def _samples(self, micro_batch: int) -> int | None:
        """Samples of a micro-batch whose gradient is to come; None if there is no such micro-batch."""
        held = self._inputs.get(micro_batch)
        return None if held is None else len(held)

    def _run(self, x: Tensor, starts_BT: Tensor | None) -> Tensor:
        with torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=self._precision == "bf16"):
            return self.model.run(x, starts_BT)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.is_floating_point() else x
