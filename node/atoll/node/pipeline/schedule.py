"""What each stage of a route does in a flush, in which order: one forward, one backward (1F1B). Pure.

A flush is one optimiser step of the whole route over M micro-batches. Every stage begins with as many forwards as it
has credits, then takes turns, a backward giving back the credit that a forward took, and ends with backwards, a
report of its gradient's norms and the step (PipeDream-Flush: Narayanan et al. 2021, arXiv:2006.09503). So no stage
ever holds more micro-batches than its credits, and gradients are added up by micro-batch number on every stage,
however messages come: that is what makes a route's bits those of one process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Compute the span's output for one micro-batch (numbered from 0 within the flush) and send it on."""

    micro_batch: int


@dataclass(frozen=True)
class Backward:
    """Add one micro-batch's gradients to the span's, and send back that of the span's input."""

    micro_batch: int


@dataclass(frozen=True)
class SendReport:
    """The span's gradient is whole, and so are those downstream: tell their norms upstream."""


@dataclass(frozen=True)
class Step:
    """Clip by the factor that the first stage made of all norms, step, and leave the gradients zero."""


Action = Forward | Backward | SendReport | Step


def stage_credits(stages: int, micro_batches: int, ahead: int = 0) -> tuple[int, ...]:
    """For each stage, how many micro-batches it may have taken forward and not yet backward.

    `ahead` is how many more each link keeps on their way, so that computing overlaps transfers: 0 is plain 1F1B. A
    route whose slowest part takes p seconds a micro-batch is never idle for want of credits if a link carries an
    activation there and a gradient back, distance included, within `ahead` × p. The last stage holds one: it turns
    round at once.
    """
    return tuple(max(1, min(micro_batches, (stages - 1 - stage) * (1 + ahead) + 1)) for stage in range(stages))


def flush_actions(micro_batches: int, credits: int) -> tuple[Action, ...]:
    """One stage's flush."""
    order: list[Action] = [Forward(number) for number in range(min(credits, micro_batches))]
    for number in range(micro_batches):
        order.append(Backward(number))
        if number + credits < micro_batches:
            order.append(Forward(number + credits))
    return (*order, SendReport(), Step())


def evaluation_actions(micro_batches: int) -> tuple[Action, ...]:
    """One stage's part in a flush that only goes forward; it has no more micro-batches than there are credits."""
    return (*(Forward(number) for number in range(micro_batches)), SendReport())
