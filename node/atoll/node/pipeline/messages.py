"""Messages between the stages of a route in a flush. Data only.

Most messages pass between neighbours. `TiedWeights` and `TiedGradient` pass between the first stage, which trains the
tied weight, and the last, which uses a copy of it. Downstream means towards the last stage. Flushes are numbered from 1
in each incarnation of the route; `Join` and `Ready` belong to no flush and have number 0.

Shape suffixes: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor


class MicroBatch(NamedTuple):
    """The driver's inputs to its first span, each [B,T]."""

    tokens_BT: Tensor  # int64
    targets_BT: Tensor  # int64; -100 where a target does not count
    starts_BT: Tensor | None = None  # as in `Activation`


@dataclass(frozen=True)
class Decision:
    """Decision on a flush. Incarnation and flush number identify the flush on its route."""

    incarnation: int
    flush: int
    factor: float | None = field(default=None, compare=False)  # as in `Verdict`


@dataclass(frozen=True)
class Join:
    """Downstream: the first message of an incarnation, with the newest decision that the sender knows."""

    decided: Decision | None = None
    flush: int = 0


@dataclass(frozen=True)
class Ready:
    """Upstream: the sender and all stages after it take part in flushes."""

    flush: int = 0


@dataclass(frozen=True)
class Begin:
    """Downstream: a flush of `micro_batches` micro-batches begins."""

    flush: int
    micro_batches: int
    anchor: int | None = None  # evaluate, forward only, the anchor with these committed tokens; None: train
    targets: int | None = None  # number of targets that count in all micro-batches; None: all


@dataclass(frozen=True)
class Activation:
    """Downstream: the input of the next span for one micro-batch, and the targets that the last stage needs.

    On the first stage, `x_BTD` has tokens of the corpus: [B,T], int64.
    """

    flush: int
    micro_batch: int
    x_BTD: Tensor  # fp32
    targets_BT: Tensor  # int64; -100 where a target does not count
    starts_BT: Tensor | None = None  # bool: where documents start, in a run with document masks


@dataclass(frozen=True)
class Gradient:
    """Upstream: gradient of the loss with respect to the activation of the same micro-batch."""

    flush: int
    micro_batch: int
    gradient_BTD: Tensor  # fp32


@dataclass(frozen=True)
class Report:
    """Upstream: the gradients of the sender's span, and of all spans after it, are complete."""

    flush: int
    norms: tuple[float, ...]  # one per layer, from the sender's first layer to the model's last
    loss: float  # nats per token, mean over the flush's targets
    at_same_anchor: bool = True  # evaluation: the sender and all stages after it have the evaluated anchor


@dataclass(frozen=True)
class Verdict:
    """Downstream: the first stage's decision on the end of the flush, made once."""

    flush: int
    factor: float | None  # by which gradients are multiplied; None: drop them and skip the step


@dataclass(frozen=True)
class TiedGradient:
    """Last stage to first: the head's part of the tied weight's gradient, over all micro-batches."""

    flush: int
    gradient_VD: Tensor


@dataclass(frozen=True)
class TiedWeights:
    """First stage to last: the tied weight (the embedding's matrix) for this flush."""

    flush: int
    weights_VD: Tensor


Message = Join | Ready | Begin | Activation | Gradient | Report | Verdict | TiedGradient | TiedWeights
