"""Whom a node asks for text: few, those that have it, the fast ones, and in bounded memory."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.data.peer_choice import ASKED_PER_READ, MAX_ABSENCES, MAX_MEMBERS, MAX_SHARDS, PeerChoice

MEMBERS = tuple(f"m{number}" for number in range(50))


def order(choice: PeerChoice, what: object = 0, now: float = 0.0, seeds: tuple[str, ...] = ("s",)) -> list[str]:
    return choice.order("web/0", what, MEMBERS, seeds, "m0", now)


def test_a_seed_is_asked_first_until_a_member_is_known() -> None:
    choice = PeerChoice(random.Random(1))
    assert order(choice)[0] == "s"
    for _ in range(10):
        choice.gave("m7", "web/0", 0.01)
    assert order(choice)[0] == "m7"
    for _ in range(30):
        choice.gave("m7", "web/0", 5.0)  # it became slow
    assert order(choice)[0] == "s"


def test_who_lacks_a_range_is_asked_for_another_and_later_again() -> None:
    choice = PeerChoice(random.Random(1))
    assert "s" in order(choice, "x")
    choice.lacked("s", "web/0", "x", 0.0)
    assert "s" not in order(choice, "x", 10.0)
    assert "s" in order(choice, "y", 10.0)
    assert "s" in order(choice, "x", 30.0)


def test_who_fails_rests_longer_each_time_and_a_liar_much_longer() -> None:
    choice = PeerChoice(random.Random(1))
    assert "s" in order(choice)
    for failures, rest in ((1, 2.0), (2, 4.0), (3, 8.0)):
        choice.failed("s", 100.0 * failures)
        assert "s" not in order(choice, now=100.0 * failures + rest - 0.1)
        assert "s" in order(choice, now=100.0 * failures + rest + 0.1)
    choice.failed("s", 1000.0, lied=True)
    choice.failed("s", 1000.0)
    assert "s" not in order(choice, now=1100.0)
    assert "s" in order(choice, now=1130.0)


def test_everybody_is_asked_in_time() -> None:
    choice, asked = PeerChoice(random.Random(1)), set[str]()
    for _ in range(300):
        for peer in order(choice, "x", 0.0):
            asked.add(peer)
            choice.lacked(peer, "web/0", "x", 0.0)
    assert asked == {*MEMBERS, "s"} - {"m0"}
    assert order(choice, "x", 1.0) == []


@given(
    st.lists(
        st.tuples(st.sampled_from(["gave", "lacked", "failed", "lied"]), st.integers(0, 60), st.integers(0, 9)),
        max_size=200,
    )
)
def test_whatever_happened_few_are_asked_and_none_twice(events: list[tuple[str, int, int]]) -> None:
    choice = PeerChoice(random.Random(2))
    for now, (kind, member, what) in enumerate(events):
        peer, shard = f"m{member}", f"web/{what % 3}"
        match kind:
            case "gave":
                choice.gave(peer, shard, 0.1)
            case "lacked":
                choice.lacked(peer, shard, what, now)
            case _:
                choice.failed(peer, now, lied=kind == "lied")
        asked = choice.order(shard, what, MEMBERS, ("s", "t"), "m0", now)
        assert len(asked) == len(set(asked)) <= ASKED_PER_READ
        assert "m0" not in asked


def test_memory_is_bounded() -> None:
    choice = PeerChoice(random.Random(1))
    for number in range(12_000):
        choice.gave(f"p{number}", f"web/{number}", 0.1)
        choice.lacked(f"p{number}", "web/0", number, 0.0)
    assert len(choice._facts) <= MAX_MEMBERS
    assert len(choice._holders) <= MAX_SHARDS
    assert len(choice._absent_until) <= MAX_ABSENCES
