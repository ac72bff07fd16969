"""Each rule of the coordinator's seat by itself: what a refusal says, and which requests and proposals are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.coordinator.test_coordinator_seat import ask, attempt, attested, both, proposal
from unit.coordinator.world import RUN, World

from atoll.coordinator.rounds import coordinator_seat
from atoll.coordinator.rounds.coordinator_seat import VoteReply, cast_vote, promise
from atoll.coordinator.rounds.round_checks import MAX_ATTEMPT, MAX_ROUNDS_AHEAD
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.store.records import Event, Vote
from atoll.core.errors import InvalidRequest
from atoll.core.identity import Identity
from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2


@pytest.fixture
def world() -> World:
    made = World()
    made.train("ann", "bob")
    return made


@pytest.fixture
def large() -> World:
    """Of four members: they and the coordinator have seats."""
    made = World()
    made.train("ann", "bob", "cid", "dan")
    return made


def remember(world: World, **changes: Any) -> None:
    memory: RunMemory = replace(world.state.memory[RUN], **changes)
    world.state = replace(world.state, memory={RUN: memory})


# --- refusals ----------------------------------------------------------------------------------------------


def test_a_refusal_repeats_what_was_promised_and_voted() -> None:
    known = cast_vote(None, RUN, 7, Ballot(3, 5), b"one").vote
    assert known == Vote(RUN, 7, 3, 5, 3, 5, b"one")
    text = "attempt 5 under plan 3 was promised already"
    for ballot in (Ballot(3, 5), Ballot(3, 4), Ballot(2, 9)):
        assert promise(known, RUN, 7, ballot) == VoteReply(False, known, text)
    for ballot in (Ballot(3, 4), Ballot(2, 9)):
        assert cast_vote(known, RUN, 7, ballot, b"one") == VoteReply(False, known, text)
    other = VoteReply(False, known, "the coordinator voted for another result in this attempt")
    assert cast_vote(known, RUN, 7, Ballot(3, 5), b"two") == other
    assert cast_vote(known, RUN, 7, Ballot(3, 6), b"two") == VoteReply(True, Vote(RUN, 7, 3, 6, 3, 6, b"two"))


def test_a_run_that_stopped_says_so_and_repeats_the_vote(world: World) -> None:
    mine = attempt(world)
    given = ask(world, mine)
    world.state = replace(world.state, runs={RUN: replace(world.run, state="STOPPED")})
    assert ask(world, mine) == VoteReply(False, given.vote, "the run is stopped")


def test_a_vote_is_in_the_event_log(world: World) -> None:
    mine = attempt(world)
    ask(world, mine, proposal(world, mine))
    event = next(record for record in world.records if isinstance(record, Event) and record.kind == "round.voted")
    assert (event.run_id, event.subject) == (RUN, "1")
    assert event.message == f"the coordinator's seat voted in round {mine} for ann"


def test_a_restored_coordinator_says_why_it_abstains(world: World) -> None:
    world.put(replace(world.run, plan_floor=1000))
    assert ask(world, attempt(world)).reason.startswith("the coordinator was restored from a backup")


@pytest.mark.parametrize("near", [1, 8, 16])
def test_far_rounds_are_those_beyond_the_sixteen_that_may_be_unreported(world: World, near: int) -> None:
    assert ask(world, attempt(world, number=near)).granted
    for number in range(17, 25):
        assert ask(world, attempt(world, number=number)).granted
    assert not ask(world, attempt(world, number=25)).granted


def test_when_far_rounds_are_full_the_next_sixteen_are_still_answered(world: World) -> None:
    for number in range(100, 100 + coordinator_seat.MAX_FAR_ROUNDS):
        assert ask(world, attempt(world, number=number)).granted
    assert ask(world, attempt(world, number=16)).granted
    assert "report the rounds between" in ask(world, attempt(world, number=17)).reason


# --- who asks ----------------------------------------------------------------------------------------------


def test_a_run_without_a_plan_has_no_openers(world: World) -> None:
    mine = attempt(world)
    remember(world, plan=None)
    with pytest.raises(InvalidRequest, match="member of the run's plan"):
        ask(world, mine)


def test_who_is_only_in_the_attempts_plan_or_only_in_the_newest_is_refused(world: World) -> None:
    mine, memory = attempt(world), world.state.memory[RUN]
    assert memory.plan is not None
    with pytest.raises(InvalidRequest, match="attempt's plan"):
        ask(world, replace(mine, plan_version=9))
    others = tuple(it for it in memory.plan.assignments if it.peer_id != world.identities["ann"].peer_id)
    remember(world, plan=replace(memory.plan, version=2, assignments=others))
    with pytest.raises(InvalidRequest, match="member of the run's plan"):
        ask(world, mine)


def test_fragments_take_turns_as_the_attempts_plan_is_cut(world: World) -> None:
    remember(world, cut_counts={1: 1})
    second = attempt(world, number=2)
    with pytest.raises(InvalidRequest, match="fragment of round 2 is 0; must be 1"):
        ask(world, second)
    assert ask(world, replace(second, fragment=1)).granted


def test_rounds_and_attempts_have_a_last_one(world: World) -> None:
    assert ask(world, attempt(world, number=MAX_ROUNDS_AHEAD)).granted
    with pytest.raises(InvalidRequest, match="too far from round 0"):
        ask(world, attempt(world, number=MAX_ROUNDS_AHEAD + 1))
    last = attempt(world).attempt + MAX_ATTEMPT  # an even number: the same opener's
    for count, why in ((MAX_ATTEMPT, "too far above"), (MAX_ATTEMPT + 1, "must be at most"), (last + 2, "at most")):
        by = "ann" if count % 2 == attempt(world).attempt else "bob"
        with pytest.raises(InvalidRequest, match=why):
            ask(world, replace(attempt(world), attempt=count), by=by)


# --- what is proposed ----------------------------------------------------------------------------------------


def manifest_of(world: World, round_id: RoundId, names: list[str], weights: list[int]) -> manifest_pb2.Manifest:
    members = [
        manifest_pb2.Contribution(peer_id=world.identities[name].peer_id, weight=weight, present=True)
        for name, weight in zip(names, weights, strict=True)
    ]
    before = world.state.memory[RUN].committed[0].manifest_hash
    return manifest_pb2.Manifest(round=round_id.to_proto(), previous_hash=before, epoch=1, contributions=members)


def signers(world: World, *names: str) -> list[Identity]:
    return [world.identities[name] for name in names]


def test_a_result_of_another_fragment_is_refused(world: World) -> None:
    mine = attempt(world)
    with pytest.raises(InvalidRequest, match="its fragment"):
        ask(world, mine, proposal(world, replace(mine, fragment=1)))


def test_a_result_under_an_older_plan_may_be_of_another_fragment(world: World) -> None:
    mine, older = attempt(world), replace(attempt(world), plan_version=0, fragment=1)
    manifest = manifest_of(world, older, ["ann", "bob"], [1, 1])
    remember(world, bases=tuple(replace(base, since_version=0) for base in world.state.memory[RUN].bases))
    manifest.epoch = 0
    assert ask(world, mine, attested(manifest, both(world))).granted


def test_the_largest_proposal_is_read(world: World) -> None:
    mine = attempt(world)
    with pytest.raises(InvalidRequest, match="does not have a manifest"):
        ask(world, mine, b"\0" * coordinator_seat.MAX_PAYLOAD_BYTES)
    with pytest.raises(InvalidRequest, match="must be at most"):
        ask(world, mine, b"\0" * (coordinator_seat.MAX_PAYLOAD_BYTES + 1))


def test_a_result_of_too_few_seats_is_refused(large: World) -> None:
    mine = attempt(large)
    with pytest.raises(InvalidRequest, match="without a majority of the seats"):
        ask(large, mine, attested(manifest_of(large, mine, ["ann"], [1]), signers(large, "ann")))
    two = manifest_of(large, mine, ["ann", "bob"], [1, 1])
    assert ask(large, mine, attested(two, signers(large, "ann"))).granted


@pytest.mark.parametrize(
    ("weights", "by", "granted"),
    [
        ([1, 1, 1, 0], ["ann"], False),
        ([1, 1, 1, 0], ["ann", "bob"], True),
        ([1, 1, 0, 0], ["ann"], True),
        ([1, 1, 0, 0], ["dan"], True),
        ([0, 0, 0, 0], ["dan"], True),
        ([0, 0, 0, 0], [], False),
    ],
)
def test_half_of_those_that_brought_something_attest(
    large: World, weights: list[int], by: list[str], granted: bool
) -> None:
    mine = attempt(large)
    text = attested(manifest_of(large, mine, ["ann", "bob", "cid", "dan"], weights), signers(large, *by))
    if granted:
        assert ask(large, mine, text).granted
        return
    with pytest.raises(InvalidRequest, match="too few members attest"):
        ask(large, mine, text)


def test_no_more_attest_than_took_part(world: World) -> None:
    mine = attempt(world)
    parsed = dp.Proposal.FromString(attested(manifest_of(world, mine, ["ann", "bob"], [1, 1]), both(world)))
    parsed.attestations.add().CopyFrom(parsed.attestations[0])
    with pytest.raises(InvalidRequest, match="more attestations"):
        ask(world, mine, parsed.SerializeToString())
