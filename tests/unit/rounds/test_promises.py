"""What a member that comes back may vote for, and what it keeps: nothing that it promised is taken back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine_node import BLANK
from support.machine_plans import GENESIS, layers_after, make_plan
from support.machine_plans import POLICY as ONE

from atoll.core import protocol
from atoll.core.manifest import Head
from atoll.core.plan import Base, Plan
from atoll.core.quorum import Ballot, VoteRecord
from atoll.node.rounds.promises import HELD, Promises
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

PEERS = ["p0", "p1", "p2"]
PLAN = make_plan(PEERS)
BALLOTS = st.builds(Ballot, st.integers(1, 3), st.integers(0, 4))


def head_after(before: Head, digest: bytes = b"a" * 32) -> Head:
    """A next head of the same history."""
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=pb.RoundId(run_id="r", plan_version=1, number=before.round + 1),
        previous_hash=before.hash,
        layers=layers_after(ONE, before, digest),
        epoch=1,
    )
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString(deterministic=True)))


def proposal(payload: bytes) -> bytes:
    return dp.Proposal(payload=payload).SerializeToString()


def after_recovery(version: int, head: Head = GENESIS) -> Plan:
    return make_plan(PEERS, version, Base(head.hash, tuple(PEERS), head.round, version))


def known(ballot: Ballot, payload: bytes | None = None, head: Head = GENESIS) -> VoteRecord:
    """The record that a life at `head` left."""
    return Promises(BLANK, head, PLAN).pledge(ballot, None if payload is None else proposal(payload))


@given(st.lists(BALLOTS, min_size=1), BALLOTS)
def test_what_was_promised_last_forbids_it_and_all_before(made: list[Ballot], asked: Ballot) -> None:
    promises = Promises(BLANK, GENESIS, PLAN)
    assert not promises.forbids(asked)
    for ballot in made:
        record = promises.pledge(ballot)
    assert promises.forbids(asked) is (asked <= made[-1])
    again = Promises(record, GENESIS, PLAN)
    assert again.votes
    assert again.forbids(asked) is (asked <= made[-1])


def test_a_life_after_another_knows_the_vote_at_its_head_and_none_at_others() -> None:
    record = known(Ballot(1, 3), b"result")
    assert (record.number, record.head_hash) == (1, GENESIS.hash)
    again = Promises(record, GENESIS, PLAN)
    assert (again.votes, again.promised, again.in_doubt) == (True, Ballot(1, 3), b"result")
    assert again.voted is not None
    assert again.voted.ballot == Ballot(1, 3)
    later = Promises(record, head_after(GENESIS), PLAN)
    assert (later.votes, later.promised, later.in_doubt) == (True, None, b"")


def test_a_promise_after_a_vote_keeps_the_vote() -> None:
    promises = Promises(BLANK, GENESIS, PLAN)
    promises.pledge(Ballot(1, 0), proposal(b"result"))
    record = promises.pledge(Ballot(1, 2))
    again = Promises(record, GENESIS, PLAN)
    assert again.voted is not None
    assert (again.promised, again.voted.ballot, again.in_doubt) == (Ballot(1, 2), Ballot(1, 0), b"result")


def test_who_stands_at_an_older_head_than_its_record_or_at_another_one_does_not_vote() -> None:
    record = known(Ballot(1, 0), head=head_after(GENESIS))
    assert not Promises(record, GENESIS, PLAN).votes
    other = Promises(record, head_after(GENESIS, b"b" * 32), PLAN)
    assert (other.votes, other.promised) == (False, None)
    assert Promises(record, head_after(GENESIS), PLAN).votes
    assert Promises(record, head_after(head_after(GENESIS)), PLAN).votes


def test_a_life_without_a_record_votes_after_a_round_of_its_own() -> None:
    promises = Promises(None, GENESIS, PLAN)
    assert not promises.votes
    promises.recall(head_after(GENESIS), PLAN)  # a round of others
    assert not promises.votes
    promises.took_part()
    assert not promises.votes, "at this head an earlier life may have voted"
    promises.recall(head_after(head_after(GENESIS)), PLAN)
    assert promises.votes


@pytest.mark.parametrize(("version", "votes"), [(1, False), (2, False), (3, True)])
def test_a_life_without_a_record_votes_after_a_recovery_that_it_saw(version: int, votes: bool) -> None:
    """A recovery before this life began may have had votes of an earlier life after it."""
    promises = Promises(None, GENESIS, replace(PLAN, version=2))
    promises.recall(GENESIS, after_recovery(version))
    assert promises.votes is votes


@pytest.mark.parametrize(("since", "forgotten"), [(1, False), (2, False), (3, True)])
def test_only_a_recovery_after_a_promise_makes_it_void(since: int, forgotten: bool) -> None:
    record = known(Ballot(2, 4), b"result")
    promises = Promises(record, GENESIS, after_recovery(since))
    assert promises.votes
    assert promises.promised == (None if forgotten else Ballot(2, 4))
    assert promises.in_doubt == (b"" if forgotten else b"result")


def test_a_recovery_lets_who_stands_at_an_older_head_vote_again() -> None:
    record = known(Ballot(1, 0), head=head_after(GENESIS))
    assert Promises(record, GENESIS, after_recovery(2)).votes


def test_the_next_attempt_is_the_first_that_no_promise_forbids() -> None:
    promises = Promises(BLANK, GENESIS, PLAN)
    assert promises.next_attempt(PLAN) == 0
    promises.pledge(Ballot(1, 5))
    assert promises.next_attempt(PLAN) == 6
    assert promises.next_attempt(replace(PLAN, version=2)) == 0


def test_the_newest_results_are_held_and_the_one_that_was_voted_for() -> None:
    promises = Promises(BLANK, GENESIS, PLAN)
    promises.pledge(Ballot(1, 0), proposal(b"voted"))
    for payload in (b"voted", b"old", b"new"):
        promises.keep(payload)
    assert list(promises.held) == [b"voted", b"old", b"new"]
    promises.keep(b"newest")
    assert list(promises.held) == [b"voted", b"new", b"newest"]
    promises.keep(b"new")  # computed once more: it counts as the newest
    assert list(promises.held) == [b"voted", b"newest", b"new"]
    promises.keep(b"last")
    assert list(promises.held) == [b"voted", b"new", b"last"]
    promises.recall(head_after(GENESIS), PLAN)
    assert list(promises.held) == []


def test_without_a_vote_two_results_are_held() -> None:
    promises = Promises(BLANK, GENESIS, PLAN)
    for payload in (b"a", b"b", b"c"):
        promises.keep(payload)
    assert list(promises.held) == [b"b", b"c"]
    assert HELD == 2
