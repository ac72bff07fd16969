"""Which contribution is audited by whom, and what gains say. The draw is the same for all and fair to everyone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.round_id import RoundId
from atoll.core.training_audits import MAX_SAMPLES, audit_seed, draw, draw_samples, gains
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

NAMES = ("ann", "bob", "cid", "dan", "eve")


def manifest(number: int, names: tuple[str, ...] = NAMES, **fields: object) -> manifest_pb2.Manifest:
    """A round of these; `weight`, `samples` and `present` may differ from what they are."""
    given_fields = {"weight": 100, "samples": 10, "present": True, **fields}
    nonces = [bytes([number % 256, place]) * 8 for place in range(len(names))]
    return manifest_pb2.Manifest(
        round=pb.RoundId(run_id="reef", number=number),
        contributions=[manifest_pb2.Contribution(peer_id=name, **given_fields) for name in names],  # type: ignore[arg-type]
        audit_seed=audit_seed(RoundId("reef", 1, 0, number, 0), nonces),
    )


@given(st.integers(1, 10**6), st.integers(2, 5))
def test_somebody_else_audits_whoever_is_drawn(number: int, count: int) -> None:
    drawn = draw(manifest(number, NAMES[:count]))
    assert drawn is not None
    assert drawn.auditor != drawn.contributor != drawn.compared
    assert {*drawn} <= set(NAMES[:count])
    assert (drawn.compared == drawn.auditor) == (count == 2)


def test_all_are_audited_about_equally_often_and_by_all_others() -> None:
    pairs = Counter((it.contributor, it.auditor) for number in range(1, 4001) if (it := draw(manifest(number))))
    assert len(pairs) == 20
    assert min(pairs.values()) > 120 and max(pairs.values()) < 280  # noqa: PT018 - 200 each on average


def test_members_on_probation_are_audited_more_often_and_audit_nobody_while_there_are_others() -> None:
    audited, auditors = Counter[str](), Counter[tuple[str, str]]()
    for number in range(1, 2001):
        made = manifest(number, (*NAMES, "s1", "s2"))
        for item in made.contributions[len(NAMES) :]:
            item.on_probation = True
        drawn = draw(made)
        assert drawn is not None
        assert {drawn.auditor, drawn.compared} <= set(NAMES)
        audited[drawn.contributor] += 1
        auditors[drawn.contributor, drawn.auditor] += 1
    assert min(audited["s1"], audited["s2"]) > 550  # 1000 · (1/2 + 1/7) each
    assert min(audited[name] for name in NAMES) > 90
    assert len(auditors) == 2 * len(NAMES) + len(NAMES) * (len(NAMES) - 1)  # by all others in turn


def test_where_fragments_take_turns_one_round_in_as_many_is_audited_and_none_is_spared() -> None:
    rounds = 4000
    for fragments in (1, 2, 4):
        audited = Counter[int]()
        for number in range(1, rounds + 1):
            made = manifest(number)
            made.fragments = fragments
            audited[number % fragments] += draw(made) is not None
        expected = rounds / fragments**2  # of each fragment
        assert set(audited) == set(range(fragments))
        assert all(0.7 * expected < count <= 1.3 * expected for count in audited.values())


@pytest.mark.parametrize("fragments", [2, 4, 6])
def test_members_on_probation_are_audited_in_all_fragments_alike(fragments: int) -> None:
    audited = Counter[int]()
    for number in range(1, 8001):
        made = manifest(number, (*NAMES, "s1"))
        made.fragments, made.contributions[-1].on_probation = fragments, True
        drawn = draw(made)
        audited[number % fragments] += drawn is not None and drawn.contributor == "s1"
    expected = 8000 / fragments**2 * (1 / 2 + 1 / 12)
    assert all(0.7 * expected < audited[place] < 1.3 * expected for place in range(fragments))


def test_who_brought_nothing_or_has_gone_is_not_drawn() -> None:
    for fields in ({"weight": 0}, {"samples": 0}, {"present": False}):
        assert draw(manifest(3, **fields)) is None
    assert draw(manifest(3, NAMES[:1])) is None
    unseeded = manifest(3)
    unseeded.audit_seed = b""
    assert draw(unseeded) is None


@given(st.sets(st.integers(0, 10**9), max_size=200), st.binary(min_size=32, max_size=32))
def test_samples_are_drawn_from_those_that_there_are(samples: set[int], seed: bytes) -> None:
    drawn = draw_samples(seed, sorted(samples))
    assert len(drawn) == len(set(drawn)) == min(MAX_SAMPLES, len(samples))
    assert set(drawn) <= samples
    assert drawn == draw_samples(seed, sorted(samples, reverse=True))


def test_gains_on_samples_that_were_trained_score_high_and_equal_gains_score_none() -> None:
    rng = random.Random(3)
    scores = []
    for _ in range(400):
        own, other = ([rng.gauss(0.0, 0.05) for _ in range(32)] for _ in range(2))
        scores.append(gains(own, other).score)
        assert gains([it + 0.06 for it in own], other).score > 1
    assert abs(sum(scores)) / 400 < 0.2
    assert sum(abs(it) > 3 for it in scores) < 8
    assert gains([0.1] * 4, [0.1] * 4).score == 0.0
    for own, other in (([1e300, 0.0] * 2, [0.0, -1e300] * 2), ([float("nan")] * 4, [float("inf")] * 4)):
        assert abs(gains(own, other).score) <= 100
