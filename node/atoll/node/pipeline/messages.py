"""What the stages of a route tell each other in a flush. Data only.

Activations, gradients and reports pass between neighbours; what belongs to a tied matrix passes between the last
stage, which borrows it, and the first, which owns it. Flushes are numbered from 1 in each incarnation of the route;
`Join` and `Ready` belong to none and have number 0. Shape suffixes: B batch, T sequence, D model, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Decision:
    """How a flush ended, by names that no other flush of the route has."""

    incarnation: int
    flush: int
    factor: float | None = field(default=None, compare=False)  # as in `Verdict`


@dataclass(frozen=True)
class Join:
    """Downstream, the first word of an incarnation: the newest decision that is known."""

    decided: Decision | None = None
    flush: int = 0


@dataclass(frozen=True)
class Ready:
    """Upstream: the sender and all after it will take part in flushes."""

    flush: int = 0


@dataclass(frozen=True)
class Begin:
    """Downstream: a flush of so many micro-batches begins."""

    flush: int
    micro_batches: int
    anchor: int | None = None  # evaluate, forward only, the anchor of so many committed tokens; None: train


@dataclass(frozen=True)
class Activation:
    """Downstream: a micro-batch's way into the next span, and what the last stage will compare with.

    Into the first span goes what the driver takes from its corpus: tokens [B,T], int64, in the place of `x_BTD`.
    """

    flush: int
    micro_batch: int
    x_BTD: Tensor  # fp32
    targets_BT: Tensor  # int64


@dataclass(frozen=True)
class Gradient:
    """Upstream: the loss's gradient by the activation of the same micro-batch."""

    flush: int
    micro_batch: int
    gradient_BTD: Tensor  # fp32


@dataclass(frozen=True)
class Report:
    """Upstream: the gradient is whole in the sender's span and in all after it."""

    flush: int
    norms: tuple[float, ...]  # one a layer, from the sender's first layer to the model's last
    loss: float  # nats per token, mean over the flush
    at_same_anchor: bool = True  # of an evaluation: the sender and all after it stand at that anchor


@dataclass(frozen=True)
class Verdict:
    """Downstream: how the flush ends. The first stage decides it, once."""

    flush: int
    factor: float | None  # what gradients are multiplied by; None: drop them and take no step


@dataclass(frozen=True)
class TiedGradient:
    """Last stage to first: what the head adds to the gradient of the embedding's matrix, all micro-batches."""

    flush: int
    gradient_VD: Tensor


@dataclass(frozen=True)
class TiedWeights:
    """First stage to last: the embedding's matrix for this flush."""

    flush: int
    weights_VD: Tensor


Message = Join | Ready | Begin | Activation | Gradient | Report | Verdict | TiedGradient | TiedWeights
