"""How much of the time nodes are there, as the coordinator sees it, and what the planner makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.routed import RoutedWorld
from unit.coordinator.world import ELIGIBLE_STATES, World

from atoll.coordinator.planner.problem import Wishes, read_layers
from atoll.coordinator.planner.problem_from_nodes import problem_from_nodes
from atoll.coordinator.state import availability
from atoll.coordinator.state.snapshot import LiveNode, StepTime
from atoll.coordinator.store.records import Node

DAY, HOUR = 86400.0, 3600.0


def after(*spells: tuple[float, float], lost: bool = True) -> Node:
    """A node that was there, then away, for so many seconds each time, and came back."""
    node, now = Node("peer", "ann", "reef", ("node",), b"", 1, 0), 0.0
    for there, away in spells:
        node = availability.count_connected(
            node, LiveNode(session=1, last_message_at=now, connected_at=now), now + there
        )
        node = (
            availability.count_loss(node, LiveNode(session=0, last_message_at=now, connected_at=1.0)) if lost else node
        )
        node = availability.count_absence(node, LiveNode(session=0, last_message_at=now + there), now + there + away)
        now += there + away
    return node


def seen(node: Node) -> float:
    return availability.availability(node, None, 0.0)


def test_a_new_node_counts_as_always_available_and_a_short_break_changes_little() -> None:
    assert seen(after()) == 1.0
    assert seen(after((HOUR, 10.0))) > 0.999


@pytest.mark.parametrize(("there", "away"), [(8 * HOUR, 16 * HOUR), (HOUR, 0.25 * HOUR), (20 * DAY, 0.5 * DAY)])
def test_after_weeks_it_is_the_share_of_the_time(there: float, away: float) -> None:
    spells = int(40 * DAY / (there + away)) + 1
    found = after(*[(there, away)] * spells)
    assert seen(found) == pytest.approx(there / (there + away), abs=0.07)
    told = availability.failures_per_hour(found, None, 0.0) * there / HOUR
    assert told == pytest.approx(1.0, rel=0.3)


def test_an_absence_counts_as_a_day_at_most_and_a_goodbye_is_no_failure() -> None:
    assert seen(after((DAY, 300 * DAY))) == pytest.approx(seen(after((DAY, DAY))))
    assert availability.failures_per_hour(after((DAY, HOUR), lost=False), None, 0.0) == 0.0


def test_a_node_that_has_become_better_is_believed() -> None:
    bad = [(HOUR, HOUR)] * 200
    assert seen(after(*bad)) < 0.6
    assert seen(after(*bad, *[(DAY, 60.0)] * 30)) > 0.93


@given(st.lists(st.tuples(st.floats(0, 1e9), st.floats(0, 1e9)), max_size=30), st.floats(0, 1e12))
def test_availability_is_a_share_and_losses_are_a_rate(spells: list[tuple[float, float]], now: float) -> None:
    node, live = after(*spells), LiveNode(session=1, last_message_at=now, connected_at=0.0)
    assert 0 < availability.availability(node, live, now) <= 1
    assert 0 <= availability.failures_per_hour(node, live, now) < 3600


def test_the_coordinator_keeps_it_over_a_restart_and_does_not_count_its_own_absence() -> None:
    world = World()
    world.train("ann", "bob")
    ann = world.identities["ann"].peer_id
    world.wait(100)
    world.hang_up("ann")
    world.wait(50)
    world.connect("ann")
    world.wait(40)
    world.connect("ann")  # the older stream was not closed
    kept = world.state.nodes[ann]
    assert kept.there_seconds == pytest.approx(140, abs=5)
    assert kept.away_seconds == pytest.approx(50, abs=1)
    assert kept.losses == pytest.approx(1, abs=0.01)
    world.now = StepTime(world.now.unix_ms + 10**6, world.now.monotonic + 1000)
    world.restart()
    assert world.state.nodes[ann] == kept
    world.connect("ann")
    world.wait(world.policy.lost_after_seconds + 5)  # bob did not come back
    assert world.state.live[world.identities["bob"].peer_id].counted_as_lost
    assert world.state.nodes[world.identities["bob"].peer_id].losses == 0.0
    assert world.state.nodes[ann].away_seconds == pytest.approx(kept.away_seconds, abs=1)


def test_the_planner_hears_of_it() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    world.hang_up("bob")
    world.wait(HOUR)
    world.connect("bob")
    world.say("bob", ELIGIBLE_STATES)
    world.wait(world.policy.replan_seconds + 5)
    question = world.asked[-1]
    wishes, layers = Wishes(), read_layers(question.layers, 64)
    assert (
        min(
            it.availability for it in problem_from_nodes(question.nodes, layers, question.spec, wishes).problem.machines
        )
        < 1
    )
    told = {node.name: node for node in question.nodes}
    assert told["bob"].availability == pytest.approx(DAY / (DAY + HOUR), rel=0.01)
    assert told["bob"].failures_per_hour > 0
    assert told["ann"].availability == 1.0
    assert told["ann"].failures_per_hour == 0.0
