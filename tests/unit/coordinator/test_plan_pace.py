"""Predicted and measured pace of a plan: stored with it, and correct after a restart."""

from __future__ import annotations

import math

import pytest
from unit.coordinator.routed import LAYERS, RoutedWorld
from unit.coordinator.world import RUN

from atoll.coordinator.live.plan_pace import PERSIST_INTERVAL_SECONDS, SAMPLE_SECONDS
from atoll.coordinator.runs import bans, departure
from atoll.coordinator.store.records import PlanFigures


def kept(world: RoutedWorld, version: int) -> PlanFigures:
    """A plan's figures in the store."""
    rows = [record for record in world.records if isinstance(record, PlanFigures) and record.version == version]
    return rows[-1]


def at(world: RoutedWorld, **paces: float) -> None:
    world.paces |= paces
    for name in paces:
        world.say(name)


def test_a_route_is_predicted_when_it_is_planned_and_measured_by_its_driver() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    driver, other = world.routes()[0]
    assert kept(world, 1).predicted_tokens_per_second > 0
    at(world, **{driver: 1000.0, other: 1000.0})
    world.wait(2 * PERSIST_INTERVAL_SECONDS)
    assert kept(world, 1).measured_tokens_per_second == pytest.approx(1000.0)
    assert PERSIST_INTERVAL_SECONDS <= kept(world, 1).measured_seconds <= 2 * PERSIST_INTERVAL_SECONDS


def test_replicas_add_up_and_are_predicted_once_all_reported_their_profiles() -> None:
    world = RoutedWorld()
    world.begin(ann=12, bob=12)
    world.wait(1)
    one_of_them = 1 / (LAYERS * 3e-6)
    assert kept(world, 1).predicted_tokens_per_second == pytest.approx(2 * one_of_them, rel=0.01)
    at(world, ann=300.0, bob=100.0)
    world.wait(2 * PERSIST_INTERVAL_SECONDS)
    assert kept(world, 1).measured_tokens_per_second == pytest.approx(400.0)
    assert len(world.asked) == 1


def test_the_mean_is_over_time_and_only_over_time_under_that_plan() -> None:
    world = RoutedWorld()
    world.begin(ann=12, bob=12)
    at(world, ann=100.0, bob=100.0)
    world.wait(10 * SAMPLE_SECONDS)
    at(world, ann=300.0)
    world.wait(10 * SAMPLE_SECONDS)
    world.take(departure.leave(world.state, world.now, world.identities["bob"].peer_id, ""))
    world.hang_up("bob")
    world.wait(2)
    assert world.plan.version == 2
    assert kept(world, 1).measured_tokens_per_second == pytest.approx(300.0, rel=0.06)
    world.wait(2 * PERSIST_INTERVAL_SECONDS)  # ann still says that it follows plan 1
    assert kept(world, 2).measured_seconds == 0
    at(world, ann=350.0)
    world.wait(2 * PERSIST_INTERVAL_SECONDS)
    assert kept(world, 2).measured_tokens_per_second == pytest.approx(350.0)


def test_a_driver_that_is_silent_is_not_slow_training() -> None:
    world = RoutedWorld()
    world.begin(ann=12, bob=12)
    at(world, ann=100.0, bob=100.0)
    world.wait(10 * SAMPLE_SECONDS)
    world.hang_up("bob")
    world.wait(3 * SAMPLE_SECONDS)
    figures = world.state.memory[RUN].figures
    assert figures is not None
    assert figures.measured_tokens_per_second == pytest.approx(200.0)


def test_figures_outlive_a_restart() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    at(world, **dict.fromkeys(world.routes()[0], 50.0))
    world.wait(2 * PERSIST_INTERVAL_SECONDS)
    before = kept(world, 1)
    world.restart()
    assert world.state.memory[RUN].figures == before


def test_an_infinite_speed_report_neither_stops_planning_nor_outlives_its_node() -> None:
    world = RoutedWorld()
    world.begin(ann=12, bob=12)
    at(world, ann=100.0, bob=1.7e308)
    world.wait(3 * PERSIST_INTERVAL_SECONDS)
    assert math.isfinite(kept(world, 1).measured_tokens_per_second)
    world.take(bans.ban(world.state, world.now, "bob", ""))
    world.wait(5)
    assert world.plan.members == (world.identities["ann"].peer_id,)
    at(world, ann=100.0)
    world.wait(2 * PERSIST_INTERVAL_SECONDS)
    assert kept(world, world.plan.version).measured_tokens_per_second == pytest.approx(100.0)
