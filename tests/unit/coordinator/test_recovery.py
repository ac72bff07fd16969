"""Going back to what is left: only when nobody can go on, and then for everybody."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.coordinator.world import RUN, World, hash_of, round_report

from atoll.coordinator.runs import recovery
from atoll.coordinator.services import views
from atoll.coordinator.store.records import Round, Vote
from atoll.core.errors import InvalidRequest, InvalidTransition
from atoll.core.identity import Identity
from atoll.core.quorum import COORDINATOR
from atoll.v1 import membership_pb2 as mb

ALL = ("ann", "bob", "cid", "dan", "eve")


@pytest.fixture
def world() -> World:
    """Five nodes, three rounds."""
    made = World()
    made.train(*ALL)
    for _ in range(3):
        go_on(made, *ALL)
    return made


def go_on(
    world: World, *names: str, plan: int = 1, signers: list[Identity] | None = None, fragments: int = 1
) -> mb.RoundReport:
    """One more round by these nodes, which hold it then; `signers` voted for it, if not they."""
    run, commits = world.run, world.state.memory[RUN].committed
    report = round_report(
        run.head_round + 1,
        commits[run.head_round].manifest_hash,
        [world.identities[name] for name in names],
        plan_version=plan,
        committed_before=run.committed_tokens,
        epoch=world.plans[-1].base.since_version,
        signers=signers,
        fragments=fragments,
    )
    for name in names:
        world.heads[name] = (report.round.number, hash_of(report))
    world.say(names[0], rounds=[report])
    for name in names[1:]:
        world.say(name)
    return report


def hash_at(world: World, number: int) -> bytes:
    return world.state.memory[RUN].committed[number].manifest_hash


def back_to(world: World, number: int, *names: str) -> None:
    digest = hash_at(world, number) if number else b""
    for name in names:
        world.heads[name] = (number, digest)
        world.say(name)


def recover(world: World) -> None:
    world.take(recovery.recover(world.state, world.now, RUN))


def test_after_a_recovery_the_remaining_nodes_decide(world: World) -> None:
    for name in ("cid", "dan", "eve"):
        world.hang_up(name)
    world.wait(30)
    recover(world)
    plan, (ann, bob) = world.plans[-1], (world.identities["ann"], world.identities["bob"])
    assert plan.base.manifest_hash == hash_at(world, 3)
    assert (plan.base.round, plan.base.since_version) == (3, plan.version)
    assert plan.base.seats == (*plan.members, COORDINATOR)
    assert set(plan.members) == {ann.peer_id, bob.peer_id}
    assert (world.run.head_round, world.run.committed_tokens) == (3, 7500)
    go_on(world, "ann", "bob", plan=plan.version)
    assert (world.run.head_round, world.run.committed_tokens) == (4, 8500)


def test_rounds_without_a_holder_become_void_for_good(world: World) -> None:
    third = next(row for row in world.records if isinstance(row, Round) and row.number == 3)
    for name in ("cid", "dan", "eve"):
        world.hang_up(name)
    back_to(world, 2, "ann")
    back_to(world, 1, "bob")
    recover(world)
    assert (world.run.head_round, world.run.committed_tokens) == (2, 5000)
    assert views.round_view(world.state, third).void
    version = world.plans[-1].version
    world.restart()
    assert (world.run.head_round, set(world.state.memory[RUN].committed)) == (2, {0, 1, 2})
    assert views.round_view(world.state, third).void
    for name in ("ann", "bob", "cid"):
        world.connect(name, mb.NODE_STATE_TRAINING)
    members = [world.identities[name] for name in ALL]
    again = round_report(3, hash_at(world, 2), members, committed_before=5000, tokens_each=400)
    world.say("cid", rounds=[again])  # of the old history, not heard of until now
    assert (world.run.head_round, world.kinds()[-1]) == (2, "round.rejected")
    go_on(world, "ann", "bob", plan=version)
    assert (world.run.head_round, world.run.committed_tokens) == (3, 6000)


def test_a_recovery_deletes_the_votes_of_void_rounds(world: World) -> None:
    vote = Vote(RUN, 4, 1, 0, 1, 0, b"old")
    memory = replace(world.state.memory[RUN], votes={4: vote})
    world.records.append(vote)
    world.state = replace(world.state, memory={RUN: memory})
    for name in ("cid", "dan", "eve"):
        world.hang_up(name)
    recover(world)
    world.restart()
    assert world.state.memory[RUN].votes == {}


def test_a_run_can_be_recovered_twice(world: World) -> None:
    for name in ("bob", "cid", "dan", "eve"):
        world.hang_up(name)
    world.heads["ann"] = (9, b"n" * 32)  # newer than all that was told
    world.say("ann")
    recover(world)
    assert (world.run.head_round, world.run.committed_tokens) == (9, 7500)
    world.hang_up("ann")
    world.connect("bob", mb.NODE_STATE_TRAINING)  # ann is gone before anybody had it
    recover(world)
    assert (world.run.head_round, world.plans[-1].base.manifest_hash) == (3, hash_at(world, 3))
    world.hang_up("bob")
    world.connect("ann", mb.NODE_STATE_TRAINING)
    with pytest.raises(InvalidTransition):  # round 9 is void now: nobody knows that it is, but us
        recover(world)


def test_a_base_known_only_by_its_hash_may_be_reported_later(world: World) -> None:
    everyone = [world.identities[name] for name in ALL]
    fourth = round_report(4, hash_at(world, 3), everyone, committed_before=7500)
    fifth = round_report(5, hash_of(fourth), everyone, committed_before=10_000, tokens_each=100)
    for name in ("bob", "cid", "dan", "eve"):
        world.hang_up(name)
    world.heads["ann"] = (5, hash_of(fifth))
    world.say("ann")
    recover(world)
    assert (world.run.head_round, world.run.committed_tokens) == (5, 7500)
    world.say("ann", rounds=[fifth, fourth])
    assert (world.run.head_round, world.run.committed_tokens) == (5, 10_500)
    assert "round.rejected" not in world.kinds()
    go_on(world, "ann", plan=world.plans[-1].version)
    assert (world.run.head_round, world.run.committed_tokens) == (6, 11_000)


@pytest.mark.parametrize("lost", [("dan", "eve"), ("eve",), ()])
def test_a_recovery_is_refused_while_the_electorate_can_decide(world: World, lost: tuple[str, ...]) -> None:
    for name in lost:
        world.hang_up(name)
    with pytest.raises(InvalidTransition, match="no recovery is needed"):
        recover(world)


def test_a_recovery_is_refused_while_half_are_connected_and_the_coordinator_votes() -> None:
    world = World()
    world.train("ann", "bob")
    go_on(world, "ann", "bob")
    world.hang_up("bob")
    with pytest.raises(InvalidTransition, match="no recovery is needed"):
        recover(world)


def test_a_majority_that_lost_the_newest_round_may_be_recovered(world: World) -> None:
    for name in ("dan", "eve"):
        world.hang_up(name)
    back_to(world, 2, "ann", "bob", "cid")
    recover(world)
    assert world.run.head_round == 2


def test_a_recovery_is_refused_without_a_state_or_outside_training(world: World) -> None:
    for name in ALL:
        world.hang_up(name)
    with pytest.raises(InvalidTransition, match="no connected node"):
        recover(world)
    world.state = replace(world.state, runs={RUN: replace(world.run, state="PAUSED")})
    with pytest.raises(InvalidTransition, match="paused"):
        recover(world)


@pytest.mark.parametrize("head", [(2, b"x" * 32), (2**60, b"x" * 32)])
def test_an_impossible_state_is_no_recovery_point(world: World, head: tuple[int, bytes]) -> None:
    for name in ("cid", "dan", "eve"):
        world.hang_up(name)
    back_to(world, 1, "ann")
    world.heads["bob"] = head
    world.say("bob")
    recover(world)
    assert world.run.head_round == 1


def test_a_hash_of_another_length_is_refused_and_not_kept(world: World) -> None:
    bob = world.identities["bob"].peer_id
    kept = world.state.live[bob].status
    for head_hash in (b"short", bytes(33), bytes(7 << 20)):
        with pytest.raises(InvalidRequest, match="must be 0 or 32"):
            world.tell("bob", mb.NodeStatus(state=mb.NODE_STATE_TRAINING, head_hash=head_hash))
    assert world.state.live[bob].status == kept


# --- by itself ---------------------------------------------------------------------------------------


def all_restarted(world: World) -> None:
    """A power cut took them all back to checkpoints of rounds 1 and 2, or to nothing."""
    for name in ALL:
        world.hang_up(name)
    for name, number in zip(ALL, (2, 1, 1, 2, 0), strict=True):
        world.heads[name] = (number, hash_at(world, number) if number else b"")
        world.connect(name)


def test_a_swarm_that_restarts_as_a_whole_recovers_by_itself(world: World) -> None:
    all_restarted(world)
    world.wait(world.policy.recover_seconds - 1)
    assert "run.recovered" not in world.kinds()
    world.wait(2)
    assert world.kinds().count("run.recovered") == 1
    assert (world.run.head_round, world.plans[-1].base.manifest_hash) == (2, hash_at(world, 2))
    assert world.plans[-1].base.seats == world.plans[-1].members


def test_no_recovery_starts_while_a_voter_is_disconnected(world: World) -> None:
    all_restarted(world)
    world.hang_up("eve")
    world.wait(60)
    assert "node.lost" in world.kinds()
    assert "run.recovered" not in world.kinds()
    world.connect("eve")
    world.wait(15)
    assert "run.recovered" in world.kinds()


def test_no_recovery_starts_while_a_node_holds_the_newest_round(world: World) -> None:
    all_restarted(world)
    world.heads["eve"] = (3, hash_at(world, 3))
    world.say("eve")
    world.wait(60)
    assert "run.recovered" not in world.kinds()


def test_the_recovery_timeout_restarts_after_an_interruption(world: World) -> None:
    all_restarted(world)
    world.wait(8)
    world.say("ann", mb.NODE_STATE_JOINING)
    world.wait(1)
    world.say("ann")
    world.wait(8)
    assert "run.recovered" not in world.kinds()


def test_no_recovery_starts_without_a_recovery_point(world: World) -> None:
    for name in ALL:
        world.heads[name] = (0, b"")
        world.say(name)
    world.wait(60)
    assert "run.recovered" not in world.kinds()
