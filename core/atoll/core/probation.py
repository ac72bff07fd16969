"""Members on probation: the weight that they may have together, until the operator vouches for them. Pure.

It is unknown whether such a member trains. A thousand of them may be one attacker (Douceur, "The Sybil Attack", IPTPS
2002), so their number must not count. In a round, all of them together weigh at most a third of the other contributors,
which is a quarter of the sum. Their tokens do not count towards the run, so they cannot make rounds or the schedule
faster. Screening judges the size of an update by the tokens trained, not by the reduced weight: `judged_tokens`, which
is at most the largest count among the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.v1 import manifest_pb2

OTHERS_PER_PROBATION = 3  # weight of the others for one unit of weight on probation


def allowed_on_probation(weights: Sequence[int], on_probation: Sequence[bool]) -> int:
    """The weight that all contributions on probation may have together."""
    return sum(weight for weight, it in zip(weights, on_probation, strict=True) if not it) // OTHERS_PER_PROBATION


def limit_weights(weights: Sequence[int], on_probation: Sequence[bool]) -> list[int]:
    """The weights, with those on probation cut to one level so that they keep to `allowed_on_probation`.

    A member that claims less than the level keeps its weight, so a large claim takes nothing from a small one. None
    weighs more than the heaviest of the others.
    """
    left = allowed_on_probation(weights, on_probation)
    level = max((weight for weight, it in zip(weights, on_probation, strict=True) if not it), default=0)
    ascending = sorted(min(weight, level) for weight, it in zip(weights, on_probation, strict=True) if it)
    for place, weight in enumerate(ascending):
        sharing = len(ascending) - place
        if weight * sharing > left:
            level = left // sharing
            break
        left -= weight
    return [min(weight, level) if it else weight for weight, it in zip(weights, on_probation, strict=True)]


def keeps_to_limit(contributions: Iterable[manifest_pb2.Contribution]) -> bool:
    """Whether contributions on probation keep to their weight limit and to the limit of their `judged_tokens`."""
    made = list(contributions)
    weights = [item.weight for item in made]
    told = sum(item.weight for item in made if item.on_probation)
    most = max((item.weight for item in made if not item.on_probation), default=0)
    return told <= allowed_on_probation(weights, [item.on_probation for item in made]) and all(
        item.weight <= item.judged_tokens <= most if item.on_probation else not item.judged_tokens for item in made
    )
