"""What members on probation may weigh: a quarter of a sum, however many they are and whatever they claim."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.probation import keeps_to_limit, limit_weights
from atoll.v1 import manifest_pb2


def keeps(weights: list[int], claims: list[int], on_probation: list[bool]) -> bool:
    """Whether a round may have these weights; sizes are judged by claims, up to what the others trained."""
    most = max((it for it, stranger in zip(weights, on_probation, strict=True) if not stranger), default=0)
    return keeps_to_limit(
        manifest_pb2.Contribution(
            weight=weight, on_probation=stranger, judged_tokens=min(claim, most) if stranger else 0
        )
        for weight, claim, stranger in zip(weights, claims, on_probation, strict=True)
    )


rounds = st.lists(st.tuples(st.integers(0, 10**9), st.booleans()), min_size=1, max_size=40)


@given(rounds)
def test_all_of_them_weigh_at_most_a_quarter_and_the_others_keep_their_weight(members: list[tuple[int, bool]]) -> None:
    weights, on_probation = [it for it, _ in members], [it for _, it in members]
    limited = limit_weights(weights, on_probation)
    assert keeps(limited, weights, on_probation)
    assert 4 * sum(new for new, it in zip(limited, on_probation, strict=True) if it) <= sum(limited)
    for new, claimed, it in zip(limited, weights, on_probation, strict=True):
        assert 0 <= new <= claimed
        assert it or new == claimed


@given(rounds)
def test_nobody_loses_more_than_is_needed(members: list[tuple[int, bool]]) -> None:
    on_probation = [it for _, it in members]
    most = max((it for it, stranger in members if not stranger), default=0)
    weights = [min(it, most) for it, _ in members]  # so much each of them may weigh
    if keeps(weights, weights, on_probation):
        assert limit_weights(weights, on_probation) == weights
        return
    limited = limit_weights(weights, on_probation)
    count, allowed = sum(on_probation), sum(it for it, held in members if not held) // 3
    assert sum(new for new, it in zip(limited, on_probation, strict=True) if it) > allowed - count  # rounded down
    level = max(new for new, it in zip(limited, on_probation, strict=True) if it)
    assert all(new in (claimed, level) for new, claimed in zip(limited, weights, strict=True))


def test_a_large_claim_takes_nothing_from_a_small_one() -> None:
    assert limit_weights([3000, 10, 10**12, 40], [False, True, True, True]) == [3000, 10, 950, 40]
    assert limit_weights([3000, *[10**12] * 500], [False, *[True] * 500]) == [3000, *[2] * 500]


def test_without_others_they_weigh_nothing() -> None:
    assert limit_weights([500, 500], [True, True]) == [0, 0]
    assert limit_weights([0, 500], [False, True]) == [0, 0]
    assert not keeps([0, 1], [0, 1], [False, True])


def test_no_size_is_judged_by_more_tokens_than_the_others_trained() -> None:
    for judged, fits in ((9, False), (10, True), (100, True), (101, False)):
        known = manifest_pb2.Contribution(weight=100)
        assert (
            keeps_to_limit([known, manifest_pb2.Contribution(weight=10, judged_tokens=judged, on_probation=True)])
            is fits
        )
    assert not keeps_to_limit([manifest_pb2.Contribution(weight=100, judged_tokens=100)])
