"""The coordinator's seat keeps its word, whatever is asked, in any order, with restarts between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.memory_store import MemoryStore
from unit.coordinator.world import RUN, World, hash_of, round_report

from atoll.coordinator.rounds import coordinator_seat
from atoll.coordinator.state.run_memory import seats_after
from atoll.coordinator.store.records import Delete, Vote
from atoll.core.errors import AtollError, Banned, InvalidRequest
from atoll.core.identity import Identity
from atoll.core.manifest import manifest_hash, sign_attestation
from atoll.core.quorum import COORDINATOR, Ballot, Electorate, LastVote, must_propose
from atoll.core.round_id import RoundId
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

BALLOTS = st.builds(Ballot, st.integers(1, 3), st.integers(0, 4))
ASKED = st.tuples(BALLOTS, st.sampled_from([b"", b"one", b"two", b"three"]))


@given(st.lists(ASKED, max_size=40))
def test_no_vote_below_a_promise_and_no_two_in_one_attempt(asked: list[tuple[Ballot, bytes]]) -> None:
    store = MemoryStore()
    promised, voted = Ballot(0, 0), {}  # what was told, kept beside the machine
    for ballot, proposal in asked:
        known = next(iter(store.load().votes), None)  # a restart before every call
        answer = (
            coordinator_seat.cast_vote(known, RUN, 5, ballot, proposal)
            if proposal
            else coordinator_seat.promise(known, RUN, 5, ballot)
        )
        if not answer.granted:
            assert ballot < promised or (not proposal and ballot == promised) or voted[ballot] != proposal
            assert answer.reason
            continue
        assert ballot > promised or (proposal and ballot == promised)
        promised = ballot
        assert voted.setdefault(ballot, proposal) == proposal if proposal else True
        assert answer.vote is not None
        store.apply([answer.vote])
        newest = max(voted, default=None)
        told = (Ballot(answer.vote.voted_plan, answer.vote.voted_attempt), answer.vote.proposal)
        assert told == ((newest, voted[newest]) if newest else (Ballot(0, 0), b""))


SEATS = ("a", "b", "c", "d", COORDINATOR)
STEPS = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.sampled_from(SEATS)), min_size=10, max_size=60)


@settings(max_examples=400)
@given(STEPS)
def test_with_the_coordinator_no_two_results_are_ever_committed(steps: list[tuple[int, bool, str]]) -> None:
    """Four openers at once; every step one of them gets a promise or a vote from somebody, in any order."""
    electorate = Electorate(frozenset(SEATS))
    kept: dict[str, Vote] = {}
    promises: dict[int, dict[str, LastVote | None]] = {number: {} for number in range(4)}
    chosen: dict[int, bytes] = {}
    voters: dict[int, set[str]] = {number: set() for number in range(4)}
    for number, voting, name in steps:
        ballot = Ballot(1, number)
        if not voting and number not in chosen:
            answer = coordinator_seat.promise(kept.get(name), RUN, 1, ballot)
            if answer.granted and answer.vote is not None:
                kept[name] = answer.vote
                promises[number][name] = last(answer.vote)
        elif voting and (number in chosen or electorate.decides(promises[number])):
            earlier = must_propose(electorate, promises[number])
            chosen.setdefault(number, earlier.proposal if earlier else result(number))
            answer = coordinator_seat.cast_vote(kept.get(name), RUN, 1, ballot, chosen[number])
            if answer.granted and answer.vote is not None:
                kept[name] = answer.vote
                voters[number].add(name)
    committed = {chosen[number] for number, by in voters.items() if electorate.decides(by)}
    event(f"{sum(electorate.decides(by) for by in voters.values())} attempts committed")
    assert len(committed) <= 1


def result(number: int) -> bytes:
    return dp.Proposal(payload=b"result %d" % number).SerializeToString()


def last(vote: Vote) -> LastVote | None:
    return LastVote(Ballot(vote.voted_plan, vote.voted_attempt), vote.proposal) if vote.proposal else None


# --- in a run ----------------------------------------------------------------------------------------


@pytest.fixture
def world() -> World:
    made = World()
    made.train("ann", "bob")
    return made


def attempt(world: World, *, number: int = 1, plan: int = 1, by: str = "ann") -> RoundId:
    """The first attempt that this node opens."""
    memory, peer = world.state.memory[RUN], world.identities[by].peer_id
    members = memory.token_caps[plan]
    openers = [seat for seat in seats_after(memory, number - 1) or members if seat in members]
    tries = (RoundId(RUN, plan, 0, number, count) for count in range(9))
    return next(item for item in tries if item.opener(openers) == peer)


def proposal(world: World, round_id: RoundId, *, previous: bytes | None = None) -> bytes:
    before = world.state.memory[RUN].committed.get(round_id.number - 1)
    previous = previous or (before.manifest_hash if before else b"x" * 32)
    members = [manifest_pb2.Contribution(peer_id=node.peer_id, weight=100, present=True) for node in both(world)]
    manifest = manifest_pb2.Manifest(round=round_id.to_proto(), previous_hash=previous, epoch=1, contributions=members)
    return attested(manifest, both(world)[:1])


def attested(manifest: manifest_pb2.Manifest, by: list[Identity]) -> bytes:
    payload = manifest.SerializeToString(deterministic=True)
    words = [sign_attestation(identity, payload) for identity in by]
    return dp.Proposal(payload=payload, attestations=words).SerializeToString(deterministic=True)


def ask(world: World, round_id: RoundId, text: bytes = b"", *, by: str = "ann") -> coordinator_seat.VoteReply:
    peer = world.identities[by].peer_id
    answer = world.take(coordinator_seat.answer_vote_request(world.state, world.now, peer, round_id, text))
    assert isinstance(answer, coordinator_seat.VoteReply)
    return answer


def both(world: World) -> list[Identity]:
    return [world.identities["ann"], world.identities["bob"]]


def first_round(world: World, plan: int = 1) -> mb.RoundReport:
    return round_report(1, hash_at_genesis(world), both(world), plan_version=plan)


def hash_at_genesis(world: World) -> bytes:
    return world.state.memory[RUN].committed[0].manifest_hash


def test_a_vote_is_remembered_over_a_restart(world: World) -> None:
    mine, theirs = sorted([attempt(world), attempt(world, by="bob")], key=lambda item: item.ballot)
    openers = {attempt(world): "ann", attempt(world, by="bob"): "bob"}
    text = proposal(world, mine)
    assert ask(world, mine, by=openers[mine]).granted
    assert ask(world, mine, text, by=openers[mine]).granted
    world.restart()
    later = ask(world, theirs, by=openers[theirs])
    assert later.granted
    assert later.vote is not None
    assert (later.vote.proposal, later.vote.voted_attempt) == (text, mine.attempt)
    world.restart()
    assert not ask(world, mine, text, by=openers[mine]).granted
    assert ask(world, theirs, text, by=openers[theirs]).granted
    assert world.kinds().count("round.voted") == 2


def test_asking_again_gets_the_same_answer_and_no_second_event(world: World) -> None:
    mine = attempt(world)
    text = proposal(world, mine)
    assert ask(world, mine, text) == ask(world, mine, text)
    assert world.kinds().count("round.voted") == 1
    manifest = manifest_pb2.Manifest.FromString(dp.Proposal.FromString(text).payload)
    manifest.committed_tokens = 1
    refused = ask(world, mine, attested(manifest, both(world)))
    assert not refused.granted
    assert "another result" in refused.reason


def test_a_round_known_to_be_committed_is_answered_and_its_vote_forgotten(world: World) -> None:
    mine = attempt(world)
    ask(world, mine)
    world.say("bob", rounds=[first_round(world)])
    assert Delete(Vote, (RUN, 1)) in world.records
    assert world.state.memory[RUN].votes == {}
    answer = ask(world, mine)
    assert (answer.granted, answer.vote) == (False, None)
    assert "committed" in answer.reason


@pytest.mark.parametrize(("state", "granted"), [("PAUSED", True), ("STOPPED", False)])
def test_the_runs_state_matters(world: World, state: str, granted: bool) -> None:
    world.state = replace(world.state, runs={RUN: replace(world.run, state=state)})
    assert ask(world, attempt(world)).granted is granted


def test_vote_requests_of_the_wrong_sender_are_refused(world: World) -> None:
    mine = attempt(world)
    for wrong in (
        replace(mine, attempt=mine.attempt + 1),  # the other one's
        replace(mine, plan_version=2),
        replace(mine, run_id="other"),
        replace(mine, fragment=1),
        replace(mine, number=0),
        replace(mine, number=2**60),
    ):
        with pytest.raises(InvalidRequest):
            ask(world, wrong)
    world.join("cid")  # not in a plan yet
    with pytest.raises(InvalidRequest):
        ask(world, mine, by="cid")
    world.take(coordinator_seat.answer_vote_request(world.state, world.now, world.identities["ann"].peer_id, mine, b""))
    world.state = replace(
        world.state,
        nodes={key: replace(node, banned=node.name == "ann") for key, node in world.state.nodes.items()},
    )
    with pytest.raises(Banned):
        ask(world, mine)


def test_a_promise_is_given_once_so_that_no_attempt_is_opened_twice(world: World) -> None:
    """An opener that restarted without a record of its attempt must not propose another result in it."""
    mine = attempt(world)
    assert ask(world, mine).granted
    world.restart()
    assert not ask(world, mine).granted
    assert ask(world, mine, proposal(world, mine)).granted


@pytest.mark.parametrize(
    "spoil",
    [
        "number",
        "attempt",
        "previous",
        "rubbish",
        "no-manifest",
        "size",
        "nobody",
        "stranger",
        "alone",
        "epoch",
        "forged",
    ],
)
def test_invalid_proposals_get_no_vote(world: World, spoil: str) -> None:
    mine = attempt(world)
    good = manifest_pb2.Manifest.FromString(dp.Proposal.FromString(proposal(world, mine)).payload)
    alone, old = manifest_pb2.Manifest(), manifest_pb2.Manifest()
    for other in (alone, old):
        other.CopyFrom(good)
    del alone.contributions[:]
    old.epoch = 0
    forged = dp.Proposal.FromString(proposal(world, mine))
    forged.attestations[0].signature = bytes(64)
    text = {
        "nobody": attested(good, []),
        "stranger": attested(good, [Identity.generate()]),
        "alone": attested(alone, both(world)[:1]),
        "epoch": attested(old, both(world)),
        "forged": forged.SerializeToString(),
        "number": proposal(world, replace(mine, number=2)),
        "attempt": proposal(world, replace(mine, attempt=mine.attempt + 1)),
        "previous": proposal(world, mine, previous=b"y" * 32),
        "rubbish": b"\xff" * 40,
        "no-manifest": dp.Proposal(payload=b"\xff" * 40).SerializeToString(),
        "size": b"\0" * (coordinator_seat.MAX_PAYLOAD_BYTES + 1),
    }[spoil]
    with pytest.raises(InvalidRequest):
        ask(world, mine, text)
    assert world.state.memory[RUN].votes == {}


def test_votes_are_kept_for_a_bounded_number_of_rounds(world: World) -> None:
    far = [1000 + number for number in range(coordinator_seat.MAX_FAR_ROUNDS)]
    for number in far:
        assert ask(world, attempt(world, number=number)).granted
    assert not ask(world, attempt(world, number=2000)).granted
    again = attempt(world, number=far[0])
    assert ask(world, replace(again, attempt=again.attempt + len(both(world)))).granted
    for number in range(1, coordinator_seat.MAX_UNREPORTED_ROUNDS + 1):  # the next rounds are not crowded out
        assert ask(world, attempt(world, number=number)).granted


def test_attempts_cannot_be_used_up(world: World) -> None:
    with pytest.raises(InvalidRequest, match="must be at most"):
        ask(world, replace(attempt(world), attempt=2**32 - 1))
    assert ask(world, attempt(world)).granted


def test_where_the_coordinator_has_no_seat_it_promises_nothing() -> None:
    world = World()
    world.train("ann", "bob", "cid")
    with pytest.raises(InvalidRequest, match="no seat"):
        ask(world, attempt(world))
    assert world.state.memory[RUN].votes == {}


def test_a_member_without_a_seat_opens_nothing() -> None:
    world = World()
    everyone = world.train("ann", "bob", "cid", "dan")
    first = round_report(1, hash_at_genesis(world), everyone, seats=both(world))
    world.say("ann", rounds=[first])
    for count in range(4):
        with pytest.raises(InvalidRequest, match="not the opener"):
            ask(world, RoundId(RUN, 1, 0, 2, count), by="cid")
    opener = attempt(world, number=2)
    assert opener.attempt == 0  # ann has the first seat
    assert ask(world, opener).granted


# --- after a restore -----------------------------------------------------------------------------------


def test_a_restored_coordinator_abstains_until_a_round_of_a_plan_since_has_committed(world: World) -> None:
    world.say("ann", rounds=[first_round(world)])
    world.put(replace(world.run, plan_floor=1000))
    told = hash_of(first_round(world))
    late = round_report(2, told, both(world), committed_before=1000)  # made before the restore, told after it
    world.say("ann", rounds=[late])
    assert world.run.head_round == 2
    refused = ask(world, attempt(world, number=3))
    assert not refused.granted
    assert "restored" in refused.reason
    world.wait(8)  # a plan above all that may have been issued comes by itself
    assert world.plans[-1].version == 1001
    third = round_report(3, hash_of(late), both(world), plan_version=1001, committed_before=2000)
    world.say("ann", rounds=[third])
    assert ask(world, attempt(world, number=4, plan=1001)).granted
    assert manifest_hash(third.manifest.payload) == world.state.memory[RUN].committed[3].manifest_hash


def test_errors_are_ours(world: World) -> None:
    with pytest.raises(AtollError):
        world.take(
            coordinator_seat.answer_vote_request(
                world.state, world.now, Identity.generate().peer_id, attempt(world), b""
            )
        )
