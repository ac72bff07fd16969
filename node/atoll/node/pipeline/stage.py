"""One stage's arithmetic: forward, recompute, backward and step of its span.

A stage keeps only the input of each micro-batch that is in flight; backward computes the span again from it. The last
stage turns round at once and keeps its graph instead. Gradients add up in the flat gradient of the span; nothing
else changes before the step, so a flush is forgotten by making that zero.

Shape suffixes: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.errors import PeerMisbehaved
from atoll.core.run_spec import OptimizerSection
from atoll.node.model.span_model import StageModel
from atoll.node.pipeline.messages import Activation, Gradient, Message, Report, TiedGradient, TiedWeights
from atoll.node.training.inner_optimizer import InnerOptimizer
from atoll.node.training.loop import cross_entropy


@dataclass(frozen=True)
class MicroBatchShape:
    """The largest micro-batch of a run."""

    samples: int  # at most
    tokens: int  # of each sample, exactly


class Stage:
    """Holds one span in memory. fp32, or bf16 where matrices are multiplied; there is no loss scaling."""

    def __init__(
        self, model: StageModel, section: OptimizerSection, room: MicroBatchShape, precision: str = "fp32"
    ) -> None:
        self.model, self._micro_batch_shape, self._precision = model, room, precision
        self.optimizer = InnerOptimizer(model.parameters(), model.embedding, section, model.device, model.muon_matrices)
        self.steps = self.tokens = self.skipped_steps = 0  # of flushes that ended here, skipped ones included
        self.anchor: Tensor | None = None  # what evaluations are of; its owner is the trainer's loop
        self.anchor_tokens = 0  # committed when it was made
        self._evaluates = False
        self._flush_tokens = 0
        self._micro_batches = 1
        self._inputs: dict[int, Tensor] = {}
        self._losses: dict[int, Tensor] = {}
        self._loss_sum = torch.zeros((), device=model.device)

    def set_learning_rate(self, learning_rate: float) -> None:
        """From the next step on."""
        self.optimizer.set_learning_rate(learning_rate)

    # --- a flush ------------------------------------------------------------------------------------

    def begin(self, micro_batches: int) -> None:
        """A flush of so many micro-batches."""
        self._micro_batches, self._flush_tokens = micro_batches, 0
        self._loss_sum.zero_()

    def forward(self, micro_batch: int, x: Tensor, targets_BT: Tensor) -> Tensor:
        """Activations [B,T,D]; on the last stage this micro-batch's share of the flush's loss, a number."""
        self._flush_tokens += targets_BT.numel()
        x = x.to(self.model.device, non_blocking=True)
        if self.model.span_definition.is_last:
            return self._forward_loss(micro_batch, x, targets_BT.to(self.model.device, non_blocking=True))
        if not self._evaluates:
            self._inputs[micro_batch] = x
        with torch.no_grad():
            return self._run(x)

    def _forward_loss(self, micro_batch: int, x: Tensor, targets_BT: Tensor) -> Tensor:
        if self._evaluates:
            with torch.no_grad():
                loss = self._mean_loss(x, targets_BT)
            self._loss_sum += loss
            return loss
        x = _leaf(x)
        loss = self._mean_loss(x, targets_BT)
        self._inputs[micro_batch], self._losses[micro_batch] = x, loss
        self._loss_sum += loss.detach()
        return loss.detach()

    def _mean_loss(self, x: Tensor, targets_BT: Tensor) -> Tensor:
        """Of a micro-batch, its share of the flush's."""
        return cross_entropy(self._run(x), targets_BT) / self._micro_batches

    def backward(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        """The gradient [B,T,D] of the span's input, None on the first stage. `gradient_BTD` is that of its output."""
        x = self._inputs.pop(micro_batch)
        if gradient_BTD is None:
            output = self._losses.pop(micro_batch)
        else:
            x = _leaf(x)
            output = self._run(x)
            gradient_BTD = gradient_BTD.to(self.model.device, non_blocking=True)
        if output.requires_grad:
            output.backward(gradient_BTD)  # type: ignore[no-untyped-call]
        return None if self.model.span_definition.is_first else x.grad

    def norms(self) -> tuple[float, ...]:
        """Of the span's gradient, layer by layer."""
        return self.model.norms()

    def loss(self) -> float:
        """Nats per token, mean over the flush."""
        return float(self._loss_sum)

    def step(self, factor: float | None) -> None:
        """Clip by `factor` and step; None takes no step. Leaves the gradient zero."""
        if factor is None:
            self.skipped_steps += 1
        else:
            self.model.scale_gradients(factor)
            self.optimizer.step()
        self.model.zero_gradients()
        self.steps += 1
        self.tokens += self._flush_tokens

    def abort(self) -> None:
        """As if the flush had not been."""
        if self._evaluates:
            self.end_evaluation()
        self._inputs.clear()
        self._losses.clear()
        self.model.zero_gradients()
        if self.model.span_definition.tie is not None and self.model.span_definition.is_last:
            self._borrowed_gradient().zero_()

    # --- an evaluation ------------------------------------------------------------------------------

    def begin_evaluation(self, micro_batches: int) -> None:
        """Forward only, over the anchor's parameters."""
        self.begin(micro_batches)
        self._swap_weights_and_anchor()
        self._evaluates = True

    def end_evaluation(self) -> int:
        """The committed tokens of the anchor; weights are the stage's own again."""
        self._swap_weights_and_anchor()
        self._evaluates = False
        return self.anchor_tokens

    def _swap_weights_and_anchor(self) -> None:
        """Weights for anchor, with room for a layer."""
        assert self.anchor is not None
        for start, end in pairwise(self.model.trained_layout.layer_offsets):
            anchor = self.anchor[self.model.weights.local_slice(slice(start, end))]
            with self.model.weights.modify(slice(start, end)) as weights:
                kept = weights.clone()
                weights.copy_(anchor)
                anchor.copy_(kept)

    # --- a tied matrix ------------------------------------------------------------------------------

    def tied_weights(self) -> Tensor:
        """A copy [V,D] of what this stage lends."""
        return self.model.tied_weight.detach().clone()

    def set_tied_weights(self, weights_VD: Tensor) -> None:
        """Take over what its owner lends for this flush."""
        with torch.no_grad():
            self.model.tied_weight_copy.copy_(weights_VD)

    def tied_gradient(self) -> Tensor:
        """What this stage returns [V,D]; its own sum begins again at zero."""
        gradient_VD = self._borrowed_gradient()
        returned_VD = gradient_VD.clone()
        gradient_VD.zero_()
        return returned_VD

    def add_tied(self, gradient_VD: Tensor) -> None:
        """Add what was returned to the owner's gradient."""
        gradient = self.model.tied_weight.grad
        assert gradient is not None
        gradient.add_(gradient_VD.to(gradient.device))

    def _borrowed_gradient(self) -> Tensor:
        gradient = self.model.tied_weight_copy.grad
        assert gradient is not None
        return gradient

    # --- what may come in ---------------------------------------------------------------------------

    def check(self, message: Message) -> None:
        """Raise `PeerMisbehaved` unless its tensors have the shapes and dtypes of this run."""
        span_definition, problem = self.model.span_definition, ""
        match message:
            case Activation(x_BTD=x, targets_BT=targets):
                problem = self._misfit(x) or self._mistarget(x, targets)
            case Gradient(micro_batch=number, gradient_BTD=gradient):
                problem = self._misfit(gradient) or _unlike(gradient, self._samples(number))
            case Report(norms=norms) if len(norms) != (
                0 if self._evaluates else span_definition.layers - 1 - span_definition.span.last
            ):
                problem = f"has {len(norms)} norms"
            case TiedGradient(gradient_VD=tied) if _differs(tied, self.model.tied_weight):
                problem = f"is {_described(tied)}"
            case TiedWeights(weights_VD=tied) if _differs(tied, self.model.tied_weight_copy):
                problem = f"is {_described(tied)}"
        if problem:
            raise PeerMisbehaved(f"{type(message).__name__} of flush {message.flush} {problem}")

    def _samples(self, micro_batch: int) -> int | None:
        """Of a micro-batch in flight."""
        held = self._inputs.get(micro_batch)
        return None if held is None else len(held)

    def _misfit(self, x_BTD: Tensor) -> str:
        room, span_definition = self._micro_batch_shape, self.model.span_definition
        fits = x_BTD.dim() == 3 and 1 <= x_BTD.shape[0] <= room.samples
        fits = (
            fits and tuple(x_BTD.shape[1:]) == (room.tokens, span_definition.dimension) and x_BTD.dtype is torch.float32
        )
        return "" if fits else f"is {_described(x_BTD)}"

    def _mistarget(self, x_BTD: Tensor, targets_BT: Tensor) -> str:
        if targets_BT.shape != x_BTD.shape[:2] or targets_BT.dtype is not torch.int64:
            return f"has targets that are {_described(targets_BT)}"
        low, high = (int(end) for end in torch.aminmax(targets_BT))
        return "" if 0 <= low <= high < self.model.span_definition.vocabulary else f"has targets from {low} to {high}"

    def _run(self, x: Tensor) -> Tensor:
        bf16 = self._precision == "bf16"
        with self._autocast(bf16):
            return self.model.run(x)

    def _autocast(self, enabled: bool) -> AbstractContextManager[None]:
        return torch.autocast(self.model.device.type, dtype=torch.bfloat16, enabled=enabled)


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_() if x.is_floating_point() else x


def _differs(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape != other.shape or tensor.dtype != other.dtype


def _unlike(gradient_BTD: Tensor, samples: int | None) -> str:
    """A gradient has as many samples as what was sent."""
    unlike = samples is not None and samples != gradient_BTD.shape[0]
    return f"is {_described(gradient_BTD)}" if unlike else ""


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
