"""Deletions and forgetting that would lose something: what is refused until when, and bans of forgotten nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from unit.coordinator.routed import RoutedWorld
from unit.coordinator.test_ends import check_durable, delete, deny, forget, leave, lose, rotate, stop, without_cid
from unit.coordinator.test_fork_source import Reef
from unit.coordinator.test_forks import LIAR, LONG, ONE_SIDE, OTHER_SIDE, answer, events, grow, hold, proofs, report
from unit.coordinator.world import PROMPT, RUN, World

from atoll.coordinator.live import planner_answer
from atoll.coordinator.runs import admission, assignment, bans, forks, machine
from atoll.coordinator.services.views import proof_view
from atoll.coordinator.state import known_nodes
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Event
from atoll.core.errors import Banned, InvalidTransition, NotFound

SOON = PROMPT.lost_after_seconds + 3


# --- after a restart ---------------------------------------------------------------------------------


def test_after_a_restart_a_node_outside_the_plan_is_kept_until_it_had_the_time_to_reconnect() -> None:
    world = without_cid()
    world.connect("cid")
    world.restart()
    with pytest.raises(InvalidTransition, match="cid may have been connected until the coordinator started just now"):
        forget(world, "cid")
    world.wait(SOON)
    forget(world, "cid")


@pytest.mark.parametrize("how", ["left", "banned", "never connected"])
def test_after_a_restart_nobody_waits_for_a_node_that_cannot_be_there(how: str) -> None:
    world = without_cid()
    if how == "left":
        world.connect("cid")
        leave(world, "cid")
    elif how == "banned":
        world.take(bans.ban(world.state, world.now, "cid", ""))
    else:
        world.enrol("dan")
    world.restart()
    forget(world, "dan" if how == "never connected" else "cid")


def test_after_a_restart_a_run_is_kept_until_its_nodes_had_the_time_to_reconnect() -> None:
    world = World()
    world.create_run(start=False)
    world.enrol("ann")
    world.connect("ann")
    world.restart()
    with pytest.raises(InvalidTransition, match="come back: ann"):
        delete(world)
    world.wait(SOON)
    delete(world)


# --- after a restore ---------------------------------------------------------------------------------


def test_after_a_restore_no_node_of_a_run_is_forgotten_until_a_round_of_a_newer_plan() -> None:
    world = without_cid()
    world.put(replace(world.run, plan_floor=1000))
    with pytest.raises(InvalidTransition, match="run reef may be ahead of the coordinator"):
        forget(world, "cid")
    stop(world)
    forget(world, "cid")


def test_while_members_report_newer_rounds_no_node_is_forgotten() -> None:
    world = without_cid()
    for name in ("ann", "bob"):
        world.heads[name] = (5, b"h" * 32)
        world.say(name)
    with pytest.raises(InvalidTransition, match="run reef may be ahead of the coordinator"):
        forget(world, "cid")


def test_a_run_that_never_began_is_deleted_also_after_a_restore() -> None:
    world = World()
    world.create_run(start=False)
    world.enrol("ann")
    world.put(replace(world.run, plan_floor=1000))
    delete(world)


# --- strangers ---------------------------------------------------------------------------------------


def with_a_stranger(*, start: bool = True) -> World:
    world = World()
    world.create_run(min_nodes=3, start=start)
    world.enrol("ann")
    world.enrol("eve")
    world.take(admission.set_probation(world.state, world.now, "eve", on_probation=True))
    return world


def test_a_run_is_not_handed_to_strangers_with_its_last_node() -> None:
    world = with_a_stranger()
    eve = world.identities["eve"].peer_id
    assert known_nodes.known_nodes(world.state, [eve]) == []
    with pytest.raises(InvalidTransition, match="ann is the last node of run reef that is not on probation"):
        forget(world, "ann")
    world.enrol("bob")
    forget(world, "ann")
    with pytest.raises(InvalidTransition, match="bob is the last node"):
        forget(world, "bob")
    assert known_nodes.known_nodes(world.state, [eve]) == []
    forget(world, "eve")
    forget(world, "bob")


def test_the_last_node_goes_when_the_run_is_over_or_deleted() -> None:
    world = with_a_stranger()
    stop(world)
    forget(world, "ann")
    world = with_a_stranger(start=False)
    assert delete(world).nodes == 2


def test_a_run_is_not_handed_to_strangers_with_the_run_to_which_its_nodes_moved() -> None:
    world = with_a_stranger()
    world.create_run(name="kelp", start=False)
    world.take(assignment.assign(world.state, world.now, "ann", "kelp"))
    world.take(assignment.move(world.state, world.now, world.identities["ann"].peer_id))
    with pytest.raises(InvalidTransition, match="ann is the last node of run reef"):
        delete(world, "kelp")


# --- bans of forgotten nodes -------------------------------------------------------------------------


def test_a_forgotten_node_can_be_banned_and_unbanned() -> None:
    world = without_cid()
    cid = world.identities["cid"].peer_id
    forget(world, "cid")
    for _ in range(2):
        known: Any = world.take(bans.ban(world.state, world.now, cid, "lies"))
        assert (known.peer_id, known.name) == (cid, "cid")
    assert deny(world).peer_ids == {cid}
    assert events(world, "node.banned") == ["cid was banned: lies"]
    for refused in (lambda: machine.connect(world.state, world.now, cid), lambda: world.enrol("cid")):
        with pytest.raises(Banned):
            refused()
    world.take(bans.unban(world.state, world.now, cid))
    assert not deny(world).peer_ids
    world.enrol("cid")
    with pytest.raises(NotFound):
        bans.ban(world.state, world.now, "nobody", "")


def test_a_ban_of_a_node_of_a_deleted_run_leaves_no_row_of_that_run() -> None:
    world = World()
    world.create_run(start=False)
    world.enrol("ann")
    delete(world)
    world.take(bans.ban(world.state, world.now, world.identities["ann"].peer_id, ""))
    assert [row.run_id for row in world.records if isinstance(row, Event) and row.kind == "node.banned"] == [""]


@pytest.mark.parametrize("how", ["forget", "delete"])
def test_an_earlier_identity_of_a_forgotten_node_stays_refused(how: str) -> None:
    world = without_cid()
    old, new = rotate(world, "cid").peer_id, world.identities["cid"].peer_id
    if how == "forget":
        forget(world, "cid")
    else:
        stop(world)
        leave(world, "ann", "bob")
        delete(world)
    check_durable(world)
    denied = world.state.deny
    world.restart()
    world.state = replace(world.state, deny=denied)
    with pytest.raises(InvalidTransition, match="an identity that cid had earlier") as refused:
        bans.unban(world.state, world.now, old)
    assert new in refused.value.remedy
    world.take(bans.ban(world.state, world.now, old, ""))  # a new identity does not escape it
    assert deny(world).peer_ids == {old, new}
    world.take(bans.unban(world.state, world.now, new))
    assert deny(world).peer_ids == {old}


def test_a_forgotten_node_that_voted_twice_is_proved_and_banned() -> None:
    world = World()
    world.train(LIAR, *ONE_SIDE, *OTHER_SIDE, stop_tokens=10**12)
    common = grow(world, {}, 2)
    one, other = grow(world, common, 1, (LIAR, *ONE_SIDE)), grow(world, common, 1, (LIAR, *OTHER_SIDE))
    one = grow(world, one, 1, ONE_SIDE)
    report(world, one)
    lose(world, LIAR)
    liar = forget(world, LIAR).peer_id
    hold(world, one, ONE_SIDE)
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), min(LONG, forks.ASK_AGAIN_SECONDS))
    (row,) = proofs(world)
    assert row.culprit == liar
    assert liar in deny(world).peer_ids
    view = proof_view(world.state, row)
    assert (view.culprit_name, view.banned) == (LIAR, True)


# --- forks of runs -----------------------------------------------------------------------------------


def test_a_run_is_kept_while_a_fork_without_a_genesis_begins_with_it() -> None:
    world = Reef()
    world.hold("ann", world.info(2))
    world.fork()
    stop(world)
    leave(world, "ann", "bob")
    with pytest.raises(InvalidTransition, match="run 'kelp' begins with round 2 of run 'reef'"):
        delete(world)
    stop(world, "kelp")
    delete(world)


def test_a_run_keeps_no_round_for_a_fork_that_was_deleted() -> None:
    world = Reef()
    world.hold("ann", world.info(2))
    world.fork(start=False)
    assert world.state.memory[RUN].kept_rounds == (2,)
    delete(world, "kelp")
    assert world.state.memory[RUN].kept_rounds == ()


# --- many nodes, and a planner that was asked before --------------------------------------------------


def test_tables_are_not_copied_for_each_node_of_a_deleted_run(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.create_run(name="kelp", start=False)
    for number in range(60):
        world.enrol(f"node-{number}")
    world.create_run(start=False)
    peers = {node.peer_id: 1.0 for node in world.state.nodes.values()}
    draft = Draft(world.state, world.now)
    draft.remember(RUN, corrections=peers)
    world.take(draft.done(None))
    copies = 0

    def counted(item: Any, **changes: Any) -> Any:
        nonlocal copies
        copies += isinstance(item, State)
        return replace(item, **changes)

    monkeypatch.setattr("atoll.coordinator.state.draft.replace", counted)
    assert delete(world, "kelp").nodes == 60
    assert copies < 30
    assert world.state.memory[RUN].corrections == {}
    assert len(world.state.forgotten) == 60


def test_an_answer_about_a_node_that_was_forgotten_is_dropped() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    world.answers = False
    world.cards(cid=6, dan=6)
    world.wait(2)
    question = world.state.memory[RUN].question
    assert question is not None
    found = world.find(question)
    lose(world, "dan")
    forget(world, "dan")
    step = planner_answer.accept_answer(world.state, world.now, RUN, question, found, ordered=True)
    assert step.result is None
