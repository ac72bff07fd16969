"""Slots for each peer: a bound for one, a bound for all, and no memory of peers that hold none."""

from __future__ import annotations

import pytest

from atoll.core.errors import PeerMisbehaved
from atoll.node.wire.peer_slots import PeerSlots


def test_one_peer_cannot_take_more_than_its_slots() -> None:
    slots = PeerSlots[str](2)
    assert [slots.try_take("alice") for _ in range(3)] == [True, True, False]
    assert slots.try_take("bob")
    slots.release("alice")
    assert slots.try_take("alice")
    assert len(slots) == 3


def test_all_peers_together_cannot_take_more_than_the_total() -> None:
    slots = PeerSlots[str](2, total=3)
    assert [slots.try_take(peer) for peer in ("a", "b", "c", "d")] == [True, True, True, False]
    slots.release("b")
    assert slots.try_take("d")


def test_a_refusal_names_the_limit_and_takes_no_slot() -> None:
    slots = PeerSlots[str](1)
    with slots.hold("alice", "questions"):
        with pytest.raises(PeerMisbehaved, match="at most 1 questions at once"), slots.hold("alice", "questions"):
            pass
        assert len(slots) == 1
    assert len(slots) == 0


def test_a_slot_is_released_when_its_holder_fails() -> None:
    slots = PeerSlots[str](1)

    def fail() -> None:
        with slots.hold("alice", "questions"):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert slots.try_take("alice")
