"""What an opener hears: each answer is checked before it counts, and counts once; whom it still waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from support.machine_votes import FakeVoteSigner
from support.second_round import (
    BACK,
    FRONT,
    HEAD,
    PEERS,
    PLAN,
    POLICY_CUT,
    READY,
    RESULT,
    SECOND,
    START,
    WHOLE,
    made,
    plan_of,
)

from atoll.core.manifest import manifest_hash
from atoll.core.quorum import COORDINATOR, Ballot, Electorate, LastVote
from atoll.core.round_id import RoundId
from atoll.node.rounds.decide import parts_total
from atoll.node.rounds.member_answers import MemberAnswers, Stage
from atoll.node.rounds.settlement import NONCE_BYTES
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

NUMBER = RoundId.from_proto(START.round)  # attempt 1 at round 2, of layer 2: FRONT is its witness
LATER = replace(NUMBER, attempt=3)
SEATS = frozenset({WHOLE, FRONT, SECOND})


def answers(round_id: RoundId = LATER, seats: frozenset[str] = SEATS) -> MemberAnswers:
    return MemberAnswers(round_id, PLAN, Electorate(seats), frozenset(PEERS), HEAD, POLICY_CUT, FakeVoteSigner(WHOLE))


def started(**parts: dp.Parts) -> MemberAnswers:
    """Attempt 1, whose exchange began."""
    heard = answers(NUMBER)
    for peer in PEERS:
        ready = dp.Ready(voter=True)
        ready.MergeFrom(READY[peer])
        assert heard.take_ready(peer, ready)
    heard.start = START
    for peer, report in parts.items():
        heard.take_parts(peer, report)
    return heard


def vote(
    peer: str = SECOND, attempt: int = 1, payload: bytes = RESULT, words: tuple[str, ...] = (WHOLE, BACK)
) -> dp.Ready:
    """Ready of `peer`, which voted for that in that attempt."""
    ballot = replace(NUMBER, attempt=attempt)
    proposal = dp.Proposal(payload=payload, attestations=[FakeVoteSigner(word).attest(payload) for word in words])
    signature = FakeVoteSigner(peer).vote(payload, ballot.ballot)
    accepted = dp.Accepted(ballot=ballot.to_proto(), signature=signature, proposal=proposal)
    return dp.Ready(tokens=10, voter=True, accepted=accepted)


# --- Ready ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", [1, 2])
def test_a_vote_that_is_proven_binds(attempt: int) -> None:
    heard = answers()
    assert heard.take_ready(SECOND, vote(attempt=attempt)) is True
    voted = heard.promised[SECOND]
    assert voted == LastVote(
        Ballot(5, attempt), vote(attempt=attempt).accepted.proposal.SerializeToString(deterministic=True)
    )
    assert heard.declined == {}
    assert heard.take_ready(WHOLE, dp.Ready(voter=True)) is True
    assert heard.promised == {SECOND: voted, WHOLE: None}


def _other_signer(ready: dp.Ready) -> None:
    ready.accepted.signature.CopyFrom(FakeVoteSigner(WHOLE).vote(RESULT, Ballot(5, 1)))


def _other_ballot(ready: dp.Ready) -> None:
    ready.accepted.signature.CopyFrom(FakeVoteSigner(SECOND).vote(RESULT, Ballot(5, 2)))


UNPROVEN: list[tuple[str, dp.Ready, Callable[[dp.Ready], object]]] = [
    ("not opened yet", vote(attempt=3), lambda ready: None),
    ("not opened yet", vote(attempt=4), lambda ready: None),
    ("before the result was made", vote(attempt=0), lambda ready: None),
    ("does not parse", vote(), lambda ready: setattr(ready.accepted.proposal, "payload", b"\xff")),
    ("another round", vote(payload=HEAD.committed.payload), lambda ready: None),
    ("too few", vote(words=(WHOLE,)), lambda ready: None),
    ("this peer's", vote(), _other_signer),
    ("this peer's", vote(), _other_ballot),
]


@pytest.mark.parametrize(("why", "ready", "change"), UNPROVEN, ids=range(len(UNPROVEN)))
def test_a_vote_that_is_not_proven_declines(why: str, ready: dp.Ready, change: Callable[[dp.Ready], object]) -> None:
    heard, said = answers(), dp.Ready()
    said.CopyFrom(ready)
    change(said)
    assert heard.take_ready(SECOND, said) is False
    assert why in heard.declined[SECOND]
    assert heard.ready == {}
    assert heard.promised == {}


def test_who_has_no_seat_proves_nothing_and_binds_nobody() -> None:
    heard = answers()
    assert heard.take_ready(BACK, vote(BACK, attempt=9)) is True
    assert heard.promised == {}


def test_the_first_answer_counts() -> None:
    heard = answers()
    assert heard.take_ready(WHOLE, dp.Ready(tokens=1, voter=True)) is True
    assert heard.take_ready(WHOLE, vote(WHOLE, attempt=9)) is True
    assert heard.ready == {WHOLE: dp.Ready(tokens=1, voter=True)}
    assert heard.declined == {}


def test_who_contradicted_several_reducers_takes_no_part() -> None:
    heard = replace(answers(), liars=frozenset({SECOND}))
    assert heard.take_ready(SECOND, dp.Ready(tokens=1, voter=True)) is False
    assert heard.declined == {SECOND: "its word contradicted several reducers"}
    assert heard.take_ready(WHOLE, dp.Ready(tokens=1, voter=True)) is True
    assert list(heard.ready) == list(heard.promised) == [WHOLE]


@pytest.mark.parametrize("mark", [b"m" * 7, b"m" * 9])
def test_a_mark_that_nobody_draws_declines(mark: bytes) -> None:
    heard = answers()
    assert heard.take_ready(WHOLE, dp.Ready(voter=True, mark=mark)) is False
    assert heard.declined == {WHOLE: f"its mark has {len(mark)} bytes"}
    assert heard.ready == {}
    assert heard.marks == {}


def test_a_seat_that_told_another_mark_before_promises_nothing_and_does_not_vote() -> None:
    heard = replace(answers(NUMBER), marks={WHOLE: b"the same", SECOND: b"the last"})
    told = {WHOLE: b"the same", SECOND: b"the next", FRONT: b"firstone", BACK: b""}
    for peer, mark in told.items():
        assert heard.take_ready(peer, dp.Ready(voter=True, mark=mark)) is True
    assert heard.forgetful == {SECOND}
    assert heard.promised == {WHOLE: None, FRONT: None}
    assert heard.marks == {WHOLE: b"the same", SECOND: b"the last", FRONT: b"firstone"}
    heard.proposal = dp.Proposal(payload=RESULT)
    for peer in (WHOLE, SECOND):
        heard.take_vote(peer, ballot_of(peer))
    assert heard.votes == {WHOLE: ballot_of(WHOLE).signature}
    assert heard.declined == {}
    assert heard.awaited(Stage.VOTES) == {FRONT}


def test_only_seats_that_vote_promise_and_the_coordinator_when_it_said_so() -> None:
    heard = answers(seats=SEATS | {COORDINATOR})
    heard.take_ready(WHOLE, dp.Ready(voter=True))
    heard.take_ready(FRONT, dp.Ready(voter=False))
    heard.take_ready(BACK, dp.Ready(voter=True))
    assert heard.promised == {WHOLE: None}
    heard.coordinator = (None,)
    assert heard.promised == {WHOLE: None, COORDINATOR: None}
    last = LastVote(Ballot(5, 1), b"")
    heard.coordinator = (last,)
    assert heard.promised[COORDINATOR] is last


def test_the_state_of_an_earlier_result_is_held_if_somebody_says_so() -> None:
    heard = answers()
    assert heard.holds(b"x") is False
    heard.take_ready(WHOLE, dp.Ready())
    heard.take_ready(BACK, dp.Ready(holds=[manifest_hash(b"y"), manifest_hash(b"x")]))
    assert heard.holds(b"x") is True
    assert heard.holds(b"z") is False


# --- Parts ---------------------------------------------------------------------------------------------------

TOTAL = parts_total(START)
NONCE = b"n" * NONCE_BYTES
WHOLE_PARTS = dp.Parts(digests=[b"d" * 32] * TOTAL, nonce=NONCE)
ORDER = [item.peer_id for item in START.contributions]


def parts_of(nonce: bytes = NONCE, total: int = TOTAL, **fields: Any) -> dp.Parts:
    return dp.Parts(digests=[b"d" * 32] * total, nonce=nonce, **fields)


def verdict_of(peer: str, contributor: str = SECOND, missing: int = 0) -> manifest_pb2.Verdict:
    scaled = 0 if missing else 1
    return manifest_pb2.Verdict(
        reducer=ORDER.index(peer),
        contributor=ORDER.index(contributor),
        parts_scaled=scaled,
        parts_missing=missing,
    )


def test_holders_report_all_parts_and_witnesses_none() -> None:
    full = parts_of(verdicts=[verdict_of(WHOLE)])
    heard = started(p0=full, p1=dp.Parts())
    assert heard.parts == {WHOLE: full, FRONT: dp.Parts()}
    assert heard.declined == {}


@pytest.mark.parametrize(
    ("peer", "report", "why"),
    [
        (WHOLE, parts_of(total=TOTAL - 1), "p0 reports"),
        (FRONT, WHOLE_PARTS, "the vector has 0"),
        (WHOLE, parts_of(verdicts=[verdict_of(SECOND)]), "sender's"),
        (WHOLE, parts_of(verdicts=[verdict_of(WHOLE, WHOLE, missing=1)]), "its own contribution"),
        (FRONT, dp.Parts(verdicts=[verdict_of(FRONT, missing=1)]), "must count 1 to 0"),
        (WHOLE, parts_of(b""), "p0 reports a nonce of 0 bytes"),
        (WHOLE, parts_of(NONCE[1:]), "p0 reports a nonce of 15 bytes"),
        (WHOLE, parts_of(NONCE + b"n"), "p0 reports a nonce of 17 bytes"),
        (FRONT, dp.Parts(nonce=NONCE), "p1 reports a nonce of 16 bytes"),
    ],
)
def test_a_report_that_cannot_be_declines(peer: str, report: dp.Parts, why: str) -> None:
    heard = started(**{peer: report})
    assert heard.parts == {}
    assert why in heard.declined[peer]


# --- results ---------------------------------------------------------------------------------------------------


def word(peer: str, payload: bytes = RESULT) -> dp.Digest:
    return dp.Digest(payload=payload, attestation=FakeVoteSigner(peer).attest(payload))


def settled() -> MemberAnswers:
    """Everybody reported, and Settle names all."""
    holders = {peer: WHOLE_PARTS for peer in PEERS if peer != FRONT}
    heard = started(**holders, p1=dp.Parts())
    heard.settled = dp.Settle(present=ORDER)
    return heard


def test_each_holder_has_one_word() -> None:
    heard = settled()
    heard.take_result(WHOLE, word(WHOLE))
    heard.take_result(BACK, word(BACK))
    assert {payload: list(said) for payload, said in heard.attestations.items()} == {RESULT: [WHOLE, BACK]}
    assert heard.attestations[RESULT][BACK] == word(BACK).attestation
    other = _with_digests(b"e" * 32)
    heard.take_result(WHOLE, word(WHOLE, other))
    heard.take_result(SECOND, word(SECOND, other))
    assert {payload: list(said) for payload, said in heard.attestations.items()} == {
        RESULT: [WHOLE, BACK],
        other: [SECOND],
    }
    assert heard.declined == {}


def _with_digests(digest: bytes) -> bytes:
    manifest = manifest_pb2.Manifest.FromString(RESULT)
    manifest.layers[2].anchor_digest = digest
    return manifest.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("peer", "digest", "why"),
    [
        (FRONT, word(FRONT), "holds nothing"),
        (WHOLE, word(BACK), "somebody else"),
        (WHOLE, dp.Digest(payload=RESULT), "nobody's word"),
        (WHOLE, word(WHOLE, b"\xff"), "does not parse"),
        (WHOLE, word(WHOLE, made(HEAD, present=[WHOLE, FRONT, SECOND])[1]), "another result"),
        (WHOLE, word(WHOLE, made(HEAD, attempt=2)[1]), "another result"),
    ],
)
def test_a_word_that_cannot_be_declines(peer: str, digest: dp.Digest, why: str) -> None:
    heard = settled()
    heard.take_result(peer, digest)
    assert heard.attestations == {}
    assert why in heard.declined[peer]


def test_who_says_what_was_checked_before_is_checked_all_the_same() -> None:
    heard = settled()
    heard.take_result(WHOLE, word(WHOLE))
    heard.take_result(FRONT, word(FRONT))
    assert list(heard.attestations[RESULT]) == [WHOLE]
    assert FRONT in heard.declined


# --- votes ---------------------------------------------------------------------------------------------------


def proposed() -> MemberAnswers:
    heard = settled()
    heard.proposal = dp.Proposal(payload=RESULT)
    return heard


def ballot_of(peer: str, attempt: int = 1) -> dp.Vote:
    return dp.Vote(signature=FakeVoteSigner(peer).vote(RESULT, Ballot(5, attempt)))


def test_seats_vote_once_for_this_attempt() -> None:
    heard = proposed()
    for peer in (WHOLE, BACK):
        heard.take_vote(peer, ballot_of(peer))
    assert heard.votes == {WHOLE: ballot_of(WHOLE).signature}  # BACK has no seat
    heard.take_vote(WHOLE, dp.Vote(signature=pb.Signed(signature=b"no")))
    assert heard.votes == {WHOLE: ballot_of(WHOLE).signature}
    assert heard.declined == {}
    for wrong in (ballot_of(FRONT, attempt=2), ballot_of(SECOND)):
        heard.take_vote(FRONT, wrong)
        assert "this peer's" in heard.declined.pop(FRONT)
    assert list(heard.votes) == [WHOLE]


# --- whom the opener waits for -----------------------------------------------------------------------------------


def test_whoever_has_not_answered_and_not_declined_is_awaited() -> None:
    heard = answers()
    assert heard.members == ()
    assert heard.awaited(Stage.READY) == set(PEERS)
    heard.take_ready(WHOLE, dp.Ready(voter=True))
    heard.declined[BACK] = "gone"
    assert heard.members == (WHOLE,)
    assert heard.awaited(Stage.READY) == {FRONT, SECOND}

    heard = started(p0=WHOLE_PARTS)
    heard.declined[BACK] = "gone"
    assert heard.members == tuple(ORDER)
    assert heard.awaited(Stage.PARTS) == {FRONT, SECOND}

    heard = settled()
    assert heard.awaited(Stage.RESULTS) == {WHOLE, BACK, SECOND}
    heard.take_result(WHOLE, word(WHOLE))
    heard.declined[BACK] = "gone"
    assert heard.awaited(Stage.RESULTS) == {SECOND}
    del heard.parts[SECOND]
    assert heard.awaited(Stage.RESULTS) == frozenset()

    heard = proposed()
    heard.coordinator = (None,)
    assert heard.awaited(Stage.VOTES) == {WHOLE, FRONT, SECOND}
    heard.take_vote(WHOLE, ballot_of(WHOLE))
    heard.declined[FRONT] = "gone"
    assert heard.awaited(Stage.VOTES) == {SECOND}


def test_those_who_hold_the_layers_are_the_plans_and_standbys_are_named() -> None:
    assert answers().holding == {WHOLE, BACK, SECOND}
    assert answers().standbys == frozenset()
    plan = plan_of(6, [[(WHOLE, 0, 2)], [(FRONT, 0, 1), (BACK, 2, 2)]])
    assert replace(answers(), plan=plan).standbys == {SECOND}


def test_a_commit_takes_promises_and_perhaps_the_coordinator() -> None:
    heard = answers(seats=frozenset({WHOLE, FRONT, COORDINATOR}))
    assert not heard.may_commit([WHOLE, FRONT])  # they did not promise
    heard.take_ready(WHOLE, dp.Ready(voter=True))
    heard.take_ready(FRONT, dp.Ready(voter=True))
    assert heard.may_commit([WHOLE])
    assert not heard.may_commit([])
    assert not heard.may_commit([BACK])
    alone = answers()
    alone.take_ready(WHOLE, dp.Ready(voter=True))
    assert not alone.may_commit([WHOLE, FRONT, SECOND])


# --- why it failed -------------------------------------------------------------------------------------------------


def test_an_operator_reads_how_many_seats_were_there() -> None:
    heard = answers()
    for peer in (WHOLE, BACK):
        heard.take_ready(peer, dp.Ready(voter=True))
    assert heard.shortfall(Stage.READY) == "no majority: 1 of 3 seats answered in time"
    heard = started(p0=WHOLE_PARTS, p1=dp.Parts(), p2=WHOLE_PARTS)
    assert heard.shortfall(Stage.PARTS) == "no majority: 2 of 3 seats finished the exchange in time"
    heard = proposed()
    heard.take_vote(WHOLE, ballot_of(WHOLE))
    assert heard.shortfall(Stage.VOTES) == "no majority: 1 of 3 seats voted in time"
    heard.votes[COORDINATOR] = pb.Signed()
    assert heard.shortfall(Stage.VOTES) == "no majority: 1 of 3 seats voted in time"


def test_an_operator_reads_who_computed_another_result() -> None:
    heard = settled()
    assert heard.shortfall(Stage.RESULTS) == "0 of 3 members that finished hold the result"
    heard.take_result(WHOLE, word(WHOLE))
    heard.take_result(BACK, word(BACK))
    assert heard.shortfall(Stage.RESULTS) == "2 of 3 members that finished hold the result"
    heard.take_result(SECOND, word(SECOND, _with_digests(b"e" * 32)))
    assert heard.shortfall(Stage.RESULTS) == "replicas differ: p3 computed another result"
    odd = settled()
    odd.take_result(SECOND, word(SECOND, _with_digests(b"e" * 32)))
    odd.take_result(BACK, word(BACK, _with_digests(b"e" * 32)))
    odd.take_result(WHOLE, word(WHOLE))
    assert odd.shortfall(Stage.RESULTS) == "replicas differ: p0 computed another result"
    odd.attestations[b"third"] = dict.fromkeys((SECOND, BACK), pb.Signed())
    del odd.attestations[RESULT]
    assert odd.shortfall(Stage.RESULTS) == "replicas differ: p2, p3 computed another result"
