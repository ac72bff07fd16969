"""A node's new identity: what moves to it, what the old one loses, and what nobody gains by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.coordinator.world import RUN, World

from atoll.coordinator.runs import admission, bans, departure, identity_rotation, machine, recovery
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Step
from atoll.coordinator.state.rate_limits import CALLS_RATE, Allowance
from atoll.coordinator.state.run_memory import TrainingComparison, TrainingScore
from atoll.coordinator.state.snapshot import StepTime
from atoll.coordinator.store.records import Event, Node
from atoll.core.errors import AlreadyExists, Banned, Busy, IdentityReplaced, NotPermitted
from atoll.core.identity import Identity
from atoll.core.identity_rotation import Rotation
from atoll.v1 import membership_pb2 as mb


@pytest.fixture
def world() -> World:
    made = World()
    made.create_run()
    return made


def step(world: World, old: Identity, new: Identity) -> Step[Node]:
    rotation = Rotation(old.peer_id, new.public_key)
    return identity_rotation.rotate(world.state, world.now, old.peer_id, rotation)


def rotate(world: World, name: str) -> tuple[Identity, Identity]:
    """The old identity and the new one; the world's node has the new one from now on."""
    old, new = world.identities[name], Identity.generate()
    world.take(step(world, old, new))
    world.identities[name] = new
    return old, new


def wait_for_the_next(world: World) -> None:
    """Without the ticks of an hour."""
    hour = identity_rotation.PAUSE_SECONDS
    world.now = StepTime(world.now.unix_ms + 1000 * hour, world.now.monotonic + hour)


def row(world: World, name: str) -> Node:
    return lookup.node(world.state, name)


def test_membership_name_and_standing_move(world: World) -> None:
    world.enrol("ann")
    world.enrol("bob")
    world.take(admission.set_probation(world.state, world.now, "ann", on_probation=True))
    before = row(world, "ann")
    old, new = rotate(world, "ann")
    after = row(world, "ann")
    kept = ("name", "run_id", "roles", "enrolled_ms", "token_id", "on_probation", "losses", "there_seconds", "pin")
    assert {key: getattr(after, key) for key in kept} == {key: getattr(before, key) for key in kept}
    assert (after.peer_id, after.public_key, after.epoch) == (new.peer_id, new.public_key, before.epoch + 1)
    assert [node.name for node in world.state.members_of("reef")].count("ann") == 1
    assert lookup.node(world.state, old.peer_id).peer_id == new.peer_id
    assert lookup.node(world.state, old.peer_id[-8:]).peer_id == new.peer_id


def test_the_old_identity_is_denied_everywhere(world: World) -> None:
    world.join("ann")
    old, new = world.identities["ann"], Identity.generate()
    done = step(world, old, new)
    assert done.deny is not None
    assert old.peer_id in done.deny.peer_ids
    assert new.peer_id not in done.deny.peer_ids
    world.take(done)
    session = world.sessions[old.peer_id]
    for call in (
        lambda: machine.check_session(world.state, old.peer_id, session),
        lambda: machine.connect(world.state, world.now, old.peer_id),
        lambda: admission.renew(world.state, world.now, old.peer_id),
        lambda: world.enrol("ann"),  # with a new token
        lambda: step(world, old, Identity.generate()),
    ):
        with pytest.raises(IdentityReplaced, match=new.peer_id):
            call()
    world.identities["ann"] = new
    world.connect("ann")


def test_the_same_statement_changes_nothing_the_second_time(world: World) -> None:
    world.enrol("ann")
    old, new = rotate(world, "ann")
    world.wait(10)
    again = step(world, old, new)
    assert (again.result, again.records, again.deny) == (row(world, "ann"), (), None)
    assert again.state == world.state


def test_after_another_rotation_the_first_statement_is_refused(world: World) -> None:
    world.enrol("ann")
    old, second = rotate(world, "ann")
    wait_for_the_next(world)
    rotate(world, "ann")
    with pytest.raises(IdentityReplaced):
        step(world, old, second)
    assert lookup.node(world.state, old.peer_id).peer_id == world.identities["ann"].peer_id


def test_a_ban_is_not_escaped(world: World) -> None:
    world.enrol("ann")
    world.take(bans.ban(world.state, world.now, "ann", ""))
    with pytest.raises(Banned):
        step(world, world.identities["ann"], Identity.generate())


@pytest.mark.parametrize("restarted", [False, True])
def test_a_ban_of_the_old_identity_reaches_the_new_one_and_is_taken_back_there(world: World, restarted: bool) -> None:
    world.enrol("ann")
    old, new = rotate(world, "ann")
    if restarted:
        deny = world.state.deny
        world.restart()  # it forgets the list, which the operator's key signs
        world.state = replace(world.state, deny=deny)
    world.take(bans.ban(world.state, world.now, old.peer_id, "it cheated before"))
    assert {old.peer_id, new.peer_id} <= world.state.deny.peer_ids
    with pytest.raises(Banned):
        machine.connect(world.state, world.now, new.peer_id)
    world.take(bans.unban(world.state, world.now, old.peer_id))
    assert old.peer_id in world.state.deny.peer_ids
    assert new.peer_id not in world.state.deny.peer_ids
    machine.connect(world.state, world.now, new.peer_id)


def test_nobody_takes_an_identity_that_is_known(world: World) -> None:
    ann, bob = world.enrol("ann"), world.enrol("bob")
    with pytest.raises(AlreadyExists):
        step(world, ann, bob)
    with pytest.raises(NotPermitted):
        identity_rotation.rotate(world.state, world.now, bob.peer_id, Rotation(ann.peer_id, b"1" * 32))


def test_rotations_have_a_pause_and_a_number_for_each_use_of_a_token(world: World) -> None:
    world.enrol("ann")
    rotate(world, "ann")
    with pytest.raises(Busy, match="ago"):
        rotate(world, "ann")
    for _ in range(identity_rotation.MAX_ROTATIONS - 1):
        wait_for_the_next(world)
        rotate(world, "ann")
    wait_for_the_next(world)
    rows = len(world.records)
    with pytest.raises(Busy, match="the limit"):
        rotate(world, "ann")
    assert len(world.records) == rows
    assert len(world.state.deny.peer_ids) == identity_rotation.MAX_ROTATIONS
    world.enrol("ann")
    rotate(world, "ann")
    world.enrol("ann")
    with pytest.raises(Busy, match="ago"):  # another token gives a number, not haste
        rotate(world, "ann")


def test_the_old_identity_cannot_say_that_the_node_left(world: World) -> None:
    world.join("ann")
    old, _ = rotate(world, "ann")
    world.take(departure.leave(world.state, world.now, old.peer_id, ""))
    assert "node.left" not in world.kinds()
    assert not row(world, "ann").left


def test_reports_have_the_allowances_that_they_had(world: World) -> None:
    world.join("ann")
    world.hang_up("ann")
    used = world.state.live[world.identities["ann"].peer_id]
    old, new = rotate(world, "ann")
    moved = world.state.live[new.peer_id]
    assert (moved.row_allowance, moved.refusal_allowance) == (used.row_allowance, used.refusal_allowance)
    assert not moved.connected
    events = [record for record in world.records if isinstance(record, Event)]
    told = next(event for event in events if event.kind == "node.identity-rotated")
    assert (told.subject, new.peer_id in told.message) == (old.peer_id, True)


def test_who_was_banned_after_a_backup_does_not_rotate_before_members_tell_a_restored_coordinator(world: World) -> None:
    ann, bob = world.enrol("ann"), world.enrol("bob")
    world.state = replace(world.state, deny_reserved=1000)  # as after a restore
    with pytest.raises(Busy, match="restored"):
        step(world, ann, Identity.generate())
    world.connect("bob")
    with pytest.raises(Busy, match="restored"):
        step(world, ann, Identity.generate())
    wait_for_the_next(world)
    rotate(world, "ann")  # bob had the time to show a newer list, and showed none
    assert world.state.deny.number > 1000
    with pytest.raises(AlreadyExists):
        step(world, bob, ann)


def test_a_new_identity_is_not_lost_because_a_thief_had_the_stream_of_the_old_one(world: World) -> None:
    world.join("ann")
    rotate(world, "ann")
    world.wait(40)
    assert "node.lost" not in world.kinds()
    assert row(world, "ann").losses == 0


def test_what_bounds_a_node_and_what_audits_found_move() -> None:
    world = World()
    world.train("ann", "bob")
    ann, bob = (world.identities[name].peer_id for name in ("ann", "bob"))
    found = TrainingComparison(audits=5, score=1.0, typical=4.0, doubted=True)
    raised = Allowance().charge(CALLS_RATE, world.now.monotonic, 1)
    memory = replace(
        world.state.memory[RUN],
        training_scores={ann: (TrainingScore(1, bob, 1.0),), bob: (TrainingScore(2, ann, 4.0),)},
        training_compared={ann: found},
        raise_allowances={ann: raised},
        corrections={ann: 2.0, bob: 1.0},
    )
    world.state = replace(world.state, memory={RUN: memory})
    joins = memory.plan_joins[ann]
    world.hang_up("ann")
    _, new = rotate(world, "ann")
    memory = world.state.memory[RUN]
    assert memory.training_scores == {
        new.peer_id: (TrainingScore(1, bob, 1.0),),
        bob: (TrainingScore(2, new.peer_id, 4.0),),  # one auditor does not become two
    }
    assert memory.training_compared == {new.peer_id: found}
    assert memory.raise_allowances == {new.peer_id: raised}
    assert memory.corrections == {new.peer_id: 2.0, bob: 1.0}
    assert memory.plan_joins[new.peer_id] == joins
    assert ann not in memory.plan_joins


def test_the_plan_goes_from_the_old_identity_to_the_new_one() -> None:
    world = World()
    world.train("ann", "bob")
    world.hang_up("ann")
    old, new = rotate(world, "ann")
    world.identities["old"] = old
    world.enrol("ann")  # while the plan has the old one
    assert row(world, "ann").name == "ann"
    world.connect("ann", mb.NODE_STATE_TRAINING)
    world.wait(3)
    assert {new.peer_id, world.identities["bob"].peer_id} <= set(world.plans[-1].members)
    assert old.peer_id not in world.plans[-1].members
    told = [record.message for record in world.records if isinstance(record, Event) and record.kind == "plan.issued"]
    assert any("ann has a new identity" in message for message in told), told
    assert "node.lost" not in world.kinds()


def test_the_only_node_of_a_run_goes_on_after_a_recovery() -> None:
    world = World()
    world.train("ann")
    world.hang_up("ann")
    rotate(world, "ann")
    world.connect("ann", mb.NODE_STATE_TRAINING)
    world.wait(5)
    assert "plan.undecidable" in world.kinds()
    world.heads["ann"] = (0, world.state.memory[RUN].committed[0].manifest_hash)
    world.say("ann")
    world.take(recovery.recover(world.state, world.now, ""))
    assert world.plans[-1].members == (world.identities["ann"].peer_id,)
