"""What a member that comes back may vote for, and what it keeps: nothing that it promised is taken back."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine_node import BLANK
from support.machine_plans import GENESIS, layers_after, make_plan
from support.machine_plans import POLICY as ONE

from atoll.core import protocol
from atoll.core.manifest import Head
from atoll.core.plan import Base, Plan
from atoll.core.quorum import Ballot, Promised, VoteRecord
from atoll.node.rounds.promises import HELD, Promises
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

PEERS = ["p0", "p1", "p2"]
PLAN = make_plan(PEERS)
BALLOTS = st.builds(Ballot, st.integers(1, 3), st.integers(0, 4))


NUMBERS = count()


def promises_of(record: VoteRecord | None, head: Head = GENESIS, plan: Plan = PLAN) -> Promises:
    """Those of p0, which draws a new mark at each head."""
    return Promises("p0", record, head, plan, lambda: b"%08d" % next(NUMBERS))


def head_after(before: Head, digest: bytes = b"a" * 32, mark: bytes | None = None) -> Head:
    """A next head of the same history; p0 took part if there is a mark of it."""
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=pb.RoundId(run_id="r", plan_version=1, number=before.round + 1),
        previous_hash=before.hash,
        contributions=[] if mark is None else [manifest_pb2.Contribution(peer_id="p0", mark=mark)],
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
    return promises_of(BLANK, head).pledge(ballot, None if payload is None else proposal(payload))


@given(st.lists(BALLOTS, min_size=1), BALLOTS)
def test_what_was_promised_last_forbids_it_and_all_before(made: list[Ballot], asked: Ballot) -> None:
    promises = promises_of(BLANK)
    assert not promises.forbids(asked)
    for ballot in made:
        record = promises.pledge(ballot)
    assert promises.forbids(asked) is (asked <= made[-1])
    again = promises_of(record)
    assert again.votes
    assert again.forbids(asked) is (asked <= made[-1])


def test_a_life_after_another_knows_the_vote_at_its_head_and_none_at_others() -> None:
    record = known(Ballot(1, 3), b"result")
    assert (record.number, record.head_hash) == (1, GENESIS.hash)
    again = promises_of(record)
    assert (again.votes, again.promised, again.in_doubt) == (True, Ballot(1, 3), b"result")
    assert again.voted is not None
    assert again.voted.ballot == Ballot(1, 3)
    later = promises_of(record, head_after(GENESIS))
    assert (later.votes, later.promised, later.in_doubt) == (True, None, b"")


def test_a_promise_after_a_vote_keeps_the_vote() -> None:
    promises = promises_of(BLANK)
    promises.pledge(Ballot(1, 0), proposal(b"result"))
    record = promises.pledge(Ballot(1, 2))
    again = promises_of(record)
    assert again.voted is not None
    assert (again.promised, again.voted.ballot, again.in_doubt) == (Ballot(1, 2), Ballot(1, 0), b"result")


def test_who_stands_at_an_older_head_than_its_record_or_at_another_one_does_not_vote() -> None:
    record = known(Ballot(1, 0), head=head_after(GENESIS))
    assert not promises_of(record).votes
    other = promises_of(record, head_after(GENESIS, b"b" * 32))
    assert (other.votes, other.promised) == (False, None)
    assert promises_of(record, head_after(GENESIS)).votes
    assert promises_of(record, head_after(head_after(GENESIS))).votes


def test_a_life_without_a_record_votes_after_a_round_of_its_own() -> None:
    promises = promises_of(None)
    assert not promises.votes
    promises.recall(head_after(GENESIS), PLAN)  # a round of others
    assert not promises.votes
    record = promises.pledge(Ballot(1, 0))
    assert not promises.votes, "at this head an earlier life may have voted"
    assert (record.complete, record.marks) == (False, (promises.mark,))
    mark, before = promises.mark, head_after(GENESIS)
    for others in (None, b"", b"of p1 ok"):
        promises.recall(head_after(before, mark=others), PLAN)
        assert not promises.votes
    promises.recall(head_after(before, mark=mark), PLAN)
    assert promises.votes


def test_what_an_earlier_life_answered_is_known_at_its_head_only() -> None:
    record = known(Ballot(1, 3))
    assert promises_of(record).answered == Ballot(1, 3)
    assert promises_of(record, head_after(GENESIS)).answered is None
    assert promises_of(None).answered is None


def test_a_record_of_this_head_that_does_not_know_its_mark_is_of_somebody_else() -> None:
    head = head_after(GENESIS, mark=b"of p0 ok")
    record = VoteRecord(2, head.hash, Ballot(1, 0), marks=(b"of p0 ok",))
    assert promises_of(record, head).votes
    assert not promises_of(replace(record, marks=(b"another.",)), head).votes


def test_a_record_of_a_life_that_has_forgotten_says_so() -> None:
    told = Promised(1, Ballot(1, 4))
    promises = Promises("p0", known(Ballot(1, 3)), GENESIS, PLAN, lambda: b"of p0 ok", told)
    assert promises.votes is False
    assert promises.pledge(Ballot(1, 5)).complete is False


@pytest.mark.parametrize(("version", "votes"), [(1, False), (2, False), (3, True)])
def test_a_life_without_a_record_votes_after_a_recovery_that_it_saw(version: int, votes: bool) -> None:
    """A recovery before this life began may have had votes of an earlier life after it."""
    promises = promises_of(None, plan=replace(PLAN, version=2))
    promises.recall(GENESIS, after_recovery(version))
    assert promises.votes is votes


@pytest.mark.parametrize(("since", "forgotten"), [(1, False), (2, False), (3, True)])
def test_only_a_recovery_after_a_promise_makes_it_void(since: int, forgotten: bool) -> None:
    record = known(Ballot(2, 4), b"result")
    promises = promises_of(record, GENESIS, after_recovery(since))
    assert promises.votes
    assert promises.promised == (None if forgotten else Ballot(2, 4))
    assert promises.in_doubt == (b"" if forgotten else b"result")


def test_a_recovery_lets_who_stands_at_an_older_head_vote_again() -> None:
    record = known(Ballot(1, 0), head=head_after(GENESIS))
    assert promises_of(record, GENESIS, after_recovery(2)).votes


def test_the_next_attempt_is_the_first_that_no_promise_forbids() -> None:
    promises = promises_of(BLANK)
    assert promises.next_attempt(PLAN) == 0
    promises.pledge(Ballot(1, 5))
    assert promises.next_attempt(PLAN) == 6
    assert promises.next_attempt(replace(PLAN, version=2)) == 0


def test_the_newest_results_are_held_and_the_one_that_was_voted_for() -> None:
    promises = promises_of(BLANK)
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
    promises = promises_of(BLANK)
    for payload in (b"a", b"b", b"c"):
        promises.keep(payload)
    assert list(promises.held) == [b"b", b"c"]
    assert HELD == 2
