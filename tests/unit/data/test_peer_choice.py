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
    choice.lacked("s", "x", 0.1, 0.0)
    assert "s" not in order(choice, "x", 10.0)
    assert "s" in order(choice, "y", 10.0)
    assert "s" in order(choice, "x", 30.0)


def test_who_fails_rests_longer_each_time_and_a_liar_much_longer() -> None:
    choice = PeerChoice(random.Random(1))
    assert "s" in order(choice)
    for failures, rest in ((1, 2.0), (2, 4.0), (3, 8.0)):
        choice.failed("s", 100.0 * failures, 100.0 * failures)
        choice.failed("s", 100.0 * failures - 1, 100.0 * failures)  # a read that the same fault cut off
        assert order(choice, now=100.0 * failures + rest - 0.1)
        assert "s" not in order(choice, now=100.0 * failures + rest - 0.1)
        assert "s" in order(choice, now=100.0 * failures + rest + 0.1)
    choice.failed("s", 1000.0, 1000.0, lied=True)
    choice.failed("s", 1000.0, 1000.0)
    assert "s" not in order(choice, now=1100.0)
    assert "s" in order(choice, now=1130.0)


def test_a_slow_seed_keeps_its_place_among_many_who_may_have_nothing() -> None:
    choice = PeerChoice(random.Random(1))
    for _ in range(30):
        choice.gave("s", "web/9", 8.0)
    for what in range(300):
        asked = order(choice, what)
        assert "s" in asked
        for peer in asked:
            if peer != "s":
                choice.lacked(peer, what, 0.1, 0.0)


def test_who_is_busy_rests_a_moment_and_has_not_failed() -> None:
    choice = PeerChoice(random.Random(1))
    for now in range(0, 50, 10):
        choice.busy("s", now)
        assert "s" not in order(choice, now=now + 0.4)
        assert "s" in order(choice, now=now + 1.6)


def test_if_all_rest_the_one_that_rests_least_is_asked_but_no_liar() -> None:
    choice = PeerChoice(random.Random(1))
    choice.failed("s", 0.0, 0.0)
    choice.failed("t", 0.0, 0.5)
    choice.failed("u", 0.0, 0.0, lied=True)
    asked = choice.order("web/0", 0, (), ("s", "t", "u"), "m0", 1.0)
    assert asked == ["s"]
    choice.lacked("s", 0, 0.1, 1.0)
    choice.lacked("t", 0, 0.1, 1.0)
    assert choice.order("web/0", 0, (), ("s", "t", "u"), "m0", 1.1) == []


def test_who_takes_long_to_say_that_it_lacks_a_range_rests() -> None:
    choice = PeerChoice(random.Random(1))
    choice.lacked("s", "x", 19.0, 20.0)
    assert "s" not in order(choice, "y", 21.0)
    assert "s" in order(choice, "y", 23.0)


def test_everybody_is_asked_in_time() -> None:
    choice, asked = PeerChoice(random.Random(1)), set[str]()
    for _ in range(300):
        for peer in order(choice, "x", 0.0):
            asked.add(peer)
            choice.lacked(peer, "x", 0.1, 0.0)
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
                choice.lacked(peer, what, 0.1, now)
            case _:
                choice.failed(peer, now, now, lied=kind == "lied")
        asked = choice.order(shard, what, MEMBERS, ("s", "t"), "m0", now)
        assert len(asked) == len(set(asked)) <= ASKED_PER_READ
        assert "m0" not in asked


def test_memory_is_bounded() -> None:
    choice = PeerChoice(random.Random(1))
    for number in range(12_000):
        choice.gave(f"p{number}", f"web/{number}", 0.1)
        choice.lacked(f"p{number}", number, 0.1, 0.0)
    assert len(choice._facts) <= MAX_MEMBERS
    assert len(choice._holders) <= MAX_SHARDS
    assert len(choice._absent_until) <= MAX_ABSENCES
