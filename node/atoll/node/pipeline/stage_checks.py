"""Checks that the tensors of another stage's message have the shapes and values of this run.

Shape suffixes: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.errors import PeerMisbehaved
from atoll.core.run_spec import RunSpec
from atoll.node.model.span_model import StageModel
from atoll.node.pipeline.messages import Activation, Begin, Gradient, Message, Report, TiedGradient, TiedWeights
from atoll.node.training.targets import IGNORED


@dataclass(frozen=True)
class MicroBatchShape:
    """Bounds of a run's micro-batches."""

    samples: int  # at most
    tokens: int  # per sample, exactly
    document_masks: bool = False  # activations carry the starts of documents

    @classmethod
    def of(cls, spec: RunSpec) -> MicroBatchShape:
        """Bounds of the micro-batches of a run."""
        return cls(spec.optimizer.micro_batch_samples, spec.data.sequence_length, spec.data.document_masks)

    @property
    def targets(self) -> int:
        return self.samples * self.tokens


class StageChecks:
    """The checks of one stage."""

    def __init__(self, model: StageModel, shape: MicroBatchShape) -> None:
        self._model, self._shape = model, shape

    def check(self, message: Message, *, evaluates: bool, samples: int | None) -> None:
        """Raise `PeerMisbehaved` unless the message's tensors have the shapes and dtypes of this run.

        `samples`: in the micro-batch in flight to which a gradient belongs; None if there is none.
        """
        span_definition, problem = self._model.span_definition, ""
        match message:
            case Begin(micro_batches=count, targets=int(targets)) if targets > count * self._shape.targets:
                problem = f"has {targets} targets in {count} micro-batches"
            case Activation(x_BTD=x, targets_BT=targets_BT, starts_BT=starts_BT):
                problem = self._misfit(x) or self._mistarget(x, targets_BT) or self._misstart(x, starts_BT)
            case Gradient(gradient_BTD=gradient):
                problem = self._misfit(gradient) or _unlike(gradient, samples)
            case Report(norms=norms) if len(norms) != (
                0 if evaluates else span_definition.layers - 1 - span_definition.span.last
            ):
                problem = f"has {len(norms)} norms; must have one per layer after this span, none in an evaluation"
            case TiedGradient(gradient_VD=tied) if _differs(tied, self._model.tied_weight):
                problem = f"is {_described(tied)}"
            case TiedWeights(weights_VD=tied) if _differs(tied, self._model.tied_weight_copy):
                problem = f"is {_described(tied)}"
        if problem:
            raise PeerMisbehaved(f"{type(message).__name__} of flush {message.flush} {problem}")

    def _misfit(self, x_BTD: Tensor) -> str:
        room, span_definition = self._shape, self._model.span_definition
        fits = x_BTD.dim() == 3 and 1 <= x_BTD.shape[0] <= room.samples
        fits = (
            fits and tuple(x_BTD.shape[1:]) == (room.tokens, span_definition.dimension) and x_BTD.dtype is torch.float32
        )
        return "" if fits else f"is {_described(x_BTD)}"

    def _mistarget(self, x_BTD: Tensor, targets_BT: Tensor) -> str:
        if targets_BT.shape != x_BTD.shape[:2] or targets_BT.dtype is not torch.int64:
            return f"has targets that are {_described(targets_BT)}"
        low, high = (int(end) for end in torch.aminmax(targets_BT.masked_fill(targets_BT == IGNORED, 0)))
        return "" if 0 <= low <= high < self._model.span_definition.vocabulary else f"has targets from {low} to {high}"

    def _misstart(self, x_BTD: Tensor, starts_BT: Tensor | None) -> str:
        if (starts_BT is not None) != self._shape.document_masks:
            return "tells where documents start" if starts_BT is not None else "does not tell where documents start"
        if starts_BT is None:
            return ""
        if starts_BT.shape != x_BTD.shape[:2] or starts_BT.dtype is not torch.bool:
            return f"has document starts that are {_described(starts_BT)}"
        return "" if starts_BT[:, 0].all() else "has a sample that begins with no document"


def _differs(tensor: Tensor, other: Tensor) -> bool:
    return tensor.shape != other.shape or tensor.dtype != other.dtype


def _unlike(gradient_BTD: Tensor, samples: int | None) -> str:
    """The problem of a gradient that has another number of samples than its activation; empty if none."""
    unlike = samples is not None and samples != gradient_BTD.shape[0]
    return f"is {_described(gradient_BTD)}" if unlike else ""


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}".removeprefix("torch.")
