"""Schedule of a flush: the order of each stage's actions, one forward and one backward in turn (1F1B). Pure.

A flush is one optimiser step of the whole route over M micro-batches. Each stage begins with as many forwards as it has
credits. Then backwards and forwards alternate; each backward returns the credit of one forward. It ends with the
remaining backwards, a report of its gradient's norms, and the step (PipeDream-Flush: Narayanan et al. 2021,
arXiv:2006.09503).

So no stage ever holds more micro-batches than its credits. Every stage adds gradients in the order of micro-batch
numbers, independent of the order of messages. A route therefore computes the same bits as one process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """Compute the span's output for one micro-batch (numbered from 0 in the flush) and send it downstream."""

    micro_batch: int


@dataclass(frozen=True)
class Backward:
    """Add one micro-batch's gradients to the span's, and send the gradient of the span's input upstream."""

    micro_batch: int


@dataclass(frozen=True)
class SendReport:
    """Send the complete gradient norms of this span and all downstream spans to the previous stage."""


@dataclass(frozen=True)
class Step:
    """Clip by the factor that the first stage computed from all norms, step, and zero the gradients."""


Action = Forward | Backward | SendReport | Step


def stage_credits(stages: int, micro_batches: int, ahead: int = 0) -> tuple[int, ...]:
    """Credits of each stage: the largest number of its micro-batches between forward and backward.

    `ahead` is the number of extra micro-batches in flight per link, so that computing overlaps transfers; 0 is plain
    1F1B. Let the slowest part of a route take p seconds per micro-batch. The route never waits for credits if a link
    transfers an activation forward and a gradient back, including latency, within `ahead` × p. The last stage has one
    credit, since it runs backward right after forward.
    """
    return tuple(max(1, min(micro_batches, (stages - 1 - stage) * (1 + ahead) + 1)) for stage in range(stages))


def flush_actions(micro_batches: int, credits: int) -> tuple[Action, ...]:
    """Actions of one stage in a flush that trains."""
    order: list[Action] = [Forward(number) for number in range(min(credits, micro_batches))]
    for number in range(micro_batches):
        order.append(Backward(number))
        if number + credits < micro_batches:
            order.append(Forward(number + credits))
    return (*order, SendReport(), Step())


def evaluation_actions(micro_batches: int) -> tuple[Action, ...]:
    """Actions of one stage in a forward-only flush, which has no more micro-batches than the stage has credits."""
    return (*(Forward(number) for number in range(micro_batches)), SendReport())
