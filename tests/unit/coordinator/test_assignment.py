"""Moves of nodes between runs: who is told what, what goes along, and what ends an order."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.coordinator.world import World

from atoll.coordinator.runs import admission, assignment, bans, departure, lifecycle, machine
from atoll.coordinator.services.views import order_for
from atoll.coordinator.state import lookup
from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.store.records import Event, Node
from atoll.core.errors import Banned, IdentityInUse, InvalidRequest, InvalidTransition, NotFound, NotPermitted
from atoll.v1 import membership_pb2 as mb


@pytest.fixture
def world() -> World:
    """Two nodes that train in reef, and another run."""
    made = World()
    made.train("ann", "bob")
    made.create_run(name="kelp")
    return made


def assign(world: World, name: str, run_id: str) -> Node:
    node = world.take(assignment.assign(world.state, world.now, name, run_id))
    assert isinstance(node, Node)
    return node


def move(world: World, name: str) -> Node:
    node = world.take(assignment.move(world.state, world.now, world.identities[name].peer_id))
    assert isinstance(node, Node)
    return node


def order(world: World, name: str) -> mb.Order:
    return order_for(world.state, lookup.node(world.state, name))


def told(world: World, kind: str) -> list[tuple[str, str]]:
    return [(it.run_id, it.message) for it in world.records if isinstance(it, Event) and it.kind == kind]


def test_an_assigned_node_is_told_to_move_and_belongs_to_the_other_run_once_it_asks(world: World) -> None:
    assert order(world, "ann") == mb.ORDER_UNSPECIFIED
    assign(world, "ann", "kelp")
    assert order(world, "ann") == mb.ORDER_MOVE
    assert "ann" in {node.name for node in world.state.members_of("reef")}
    before = lookup.node(world.state, "ann")
    moved = move(world, "ann")
    assert (moved.run_id, moved.epoch, moved.assigned_run, moved.draining) == ("kelp", before.epoch + 1, "", False)
    assert {node.name for node in world.state.members_of("reef")} == {"bob"}
    assert order(world, "ann") == mb.ORDER_UNSPECIFIED
    assert told(world, "node.moved") == [("reef", "ann moved to run kelp"), ("kelp", "ann came from run reef")]


def test_the_old_run_goes_on_without_it_also_while_it_trains_elsewhere(world: World) -> None:
    assign(world, "ann", "kelp")
    move(world, "ann")
    world.connect("ann")
    world.wait(30)
    plan = world.state.memory["reef"].plan
    assert plan is not None
    assert plan.members == (world.identities["bob"].peer_id,)


def test_a_run_that_lost_its_deciding_nodes_to_another_one_says_so() -> None:
    world = World()
    names = ("ann", "bob", "cyd", "dan", "eve")
    world.train(*names)
    world.create_run(name="kelp")
    for name in names[:3]:
        assign(world, name, "kelp")
        move(world, name)
        world.connect(name, mb.NODE_STATE_TRAINING)
    world.wait(30)
    plan = world.state.memory["reef"].plan
    assert plan is not None
    assert not {world.identities[name].peer_id for name in names[:3]} & set(plan.standbys)
    assert "plan.undecidable" in world.kinds()


def test_genesis_does_not_wait_for_a_writer_that_moved() -> None:
    world = World()
    world.create_run(min_nodes=2)
    world.join("ann", "bob", "cyd")
    world.create_run(name="kelp")
    world.wait(0.4)
    first = world.name_of(world.state.memory["reef"].genesis_writer)
    assign(world, first, "kelp")
    move(world, first)
    world.connect(first)
    world.wait(60)
    assert world.name_of(world.state.memory["reef"].genesis_writer) != first


def test_its_old_stream_ends_and_what_it_said_is_forgotten(world: World) -> None:
    ann = world.identities["ann"]
    session = world.sessions[ann.peer_id]
    assign(world, "ann", "kelp")
    move(world, "ann")
    with pytest.raises(InvalidTransition):
        machine.check_session(world.state, ann.peer_id, session)
    live = world.state.live[ann.peer_id]
    assert (live.status, live.profile, live.corpus_digest) == (mb.NodeStatus(), mb.NodeProfile(), "")


def test_a_second_request_gets_the_same_answer(world: World) -> None:
    assign(world, "ann", "kelp")
    moved, events = move(world, "ann"), len(world.records)
    assert move(world, "ann") == moved
    assert len(world.records) == events


def test_without_an_order_nobody_moves(world: World) -> None:
    assert move(world, "ann").run_id == "reef"


def test_probation_and_pins(world: World) -> None:
    """Probation is about the person and goes along; a pin is about layers and stays."""
    world.take(admission.set_probation(world.state, world.now, "ann", on_probation=True))
    node = lookup.node(world.state, "ann")
    world.state = replace(world.state, nodes={**world.state.nodes, node.peer_id: replace(node, pin="0-1")})
    assign(world, "ann", "kelp")
    moved = move(world, "ann")
    assert (moved.on_probation, moved.pin) == (True, "")


def test_its_present_run_takes_the_order_back(world: World) -> None:
    assign(world, "ann", "kelp")
    assert (assign(world, "ann", "reef").assigned_run, order(world, "ann")) == ("", mb.ORDER_UNSPECIFIED)
    assert move(world, "ann").run_id == "reef"
    assert not lookup.node(world.state, "ann").draining


def test_a_drain_takes_the_place_of_a_move(world: World) -> None:
    assign(world, "ann", "kelp")
    world.take(departure.drain(world.state, world.now, "ann"))
    assert order(world, "ann") == mb.ORDER_DRAIN
    assert move(world, "ann").run_id == "reef"
    assert order(world, "ann") == mb.ORDER_DRAIN  # who asks without an order does not escape it


def test_an_assigned_node_that_left_moves_when_it_comes_back(world: World) -> None:
    assign(world, "ann", "kelp")
    world.take(departure.leave(world.state, world.now, world.identities["ann"].peer_id, "stopped by SIGTERM"))
    world.hang_up("ann")
    world.restart()
    world.connect("ann")
    assert order(world, "ann") == mb.ORDER_MOVE


def test_a_new_token_ends_an_order(world: World) -> None:
    token = world.state.tokens[lookup.node(world.state, "ann").token_id]
    other = replace(token, token_id="f" * 12)
    world.state = replace(world.state, tokens={**world.state.tokens, other.token_id: other})
    assign(world, "ann", "kelp")
    world.enrol("ann", other)
    assert order(world, "ann") == mb.ORDER_UNSPECIFIED


def test_a_name_that_is_taken_there_gets_a_number(world: World) -> None:
    token = world.state.tokens[lookup.node(world.state, "ann").token_id]
    other = replace(token, token_id="e" * 12, run_id="kelp")
    world.state = replace(world.state, tokens={**world.state.tokens, other.token_id: other})
    stranger = world.new_identity("ann")
    applicant = admission.Applicant(other.token_id, "5" * 48, stranger.peer_id, stranger.public_key, "ann")
    world.take(admission.enrol(world.state, world.now, applicant))
    assign(world, world.identities["ann"].peer_id, "kelp")
    assert move(world, "ann").name == "ann-2"


def test_bad_assignments_change_nothing(world: World) -> None:
    events = len(world.records)
    for name, run_id, error in (
        ("ann", "nowhere", NotFound),
        ("nobody", "kelp", NotFound),
        ("ann", "", InvalidRequest),
    ):
        with pytest.raises(error):
            assign(world, name, run_id)
    world.take(lifecycle.stop(world.state, world.now, "kelp"))
    with pytest.raises(InvalidTransition):
        assign(world, "ann", "kelp")
    world.take(bans.ban(world.state, world.now, "ann", "lies"))
    with pytest.raises(Banned):
        assign(world, "ann", "reef")
    assert {node.assigned_run for node in world.state.nodes.values()} == {""}
    assert not [it for it in world.records[events:] if isinstance(it, Event) and it.kind == "node.assigned"]


def test_an_owner_may_keep_a_node_in_its_run(world: World) -> None:
    world.say("ann", stays_in_run=True)
    with pytest.raises(NotPermitted):
        assign(world, "ann", "kelp")
    assert order(world, "ann") == mb.ORDER_UNSPECIFIED
    assert assign(world, "bob", "kelp").assigned_run == "kelp"


def test_an_order_to_a_node_that_was_away_ends_when_its_owner_wants_it_to_stay(world: World) -> None:
    world.hang_up("ann")
    assign(world, "ann", "kelp")
    world.connect("ann")
    assert order(world, "ann") == mb.ORDER_MOVE
    world.say("ann", stays_in_run=True)
    assert order(world, "ann") == mb.ORDER_UNSPECIFIED
    assert not lookup.node(world.state, "ann").draining
    assert told(world, "node.assigned")[-1] == ("reef", "ann stays in run reef: its owner set `stay_in_run`")


def test_a_node_that_drains_is_not_moved(world: World) -> None:
    world.take(departure.drain(world.state, world.now, "ann"))
    with pytest.raises(InvalidTransition):
        assign(world, "ann", "kelp")
    assert order(world, "ann") == mb.ORDER_DRAIN


def test_the_token_that_admitted_a_node_does_not_take_it_back(world: World) -> None:
    token = world.state.tokens[lookup.node(world.state, "ann").token_id]
    world.take(admission.set_probation(world.state, world.now, "ann", on_probation=True))
    assign(world, "ann", "kelp")
    move(world, "ann")
    world.enrol("ann", token)
    node = lookup.node(world.state, "ann")
    assert (node.run_id, node.on_probation) == ("kelp", True)


def test_strangers_do_not_inherit_a_run_whose_known_nodes_moved(world: World) -> None:
    world.take(admission.set_probation(world.state, world.now, "bob", on_probation=True))
    assign(world, "ann", "kelp")
    move(world, "ann")
    assert known_nodes(world.state, [world.identities["bob"].peer_id]) == []


def test_another_process_with_the_identity_moves_nothing(world: World) -> None:
    ann = world.identities["ann"].peer_id
    live = replace(world.state.live[ann], instance=b"the first")
    world.state = replace(world.state, live={**world.state.live, ann: live})
    assign(world, "ann", "kelp")
    with pytest.raises(IdentityInUse):
        assignment.move(world.state, world.now, ann, b"a copy")
    assert assignment.move(world.state, world.now, ann, b"the first").result.run_id == "kelp"


def test_the_time_that_it_was_there_goes_along(world: World) -> None:
    world.wait(5)
    assign(world, "ann", "kelp")
    assert move(world, "ann").there_seconds > 4


def test_a_run_that_ended_meanwhile_gets_nobody(world: World) -> None:
    assign(world, "ann", "kelp")
    world.take(lifecycle.stop(world.state, world.now, "kelp"))
    assert move(world, "ann").run_id == "reef"
    assert order(world, "ann") == mb.ORDER_UNSPECIFIED


def test_a_banned_node_does_not_move(world: World) -> None:
    assign(world, "ann", "kelp")
    world.take(bans.ban(world.state, world.now, "ann", "lies"))
    with pytest.raises(Banned):
        move(world, "ann")
