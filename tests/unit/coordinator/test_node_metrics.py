"""Metrics of nodes: stored at the next tick, once a round, and only what can be a measurement."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from unit.coordinator.world import World

from atoll.coordinator.rounds import node_metrics, reports
from atoll.coordinator.runs import machine
from atoll.coordinator.state.rate_limits import METRICS_RATE
from atoll.coordinator.store.records import Event, NodeMetrics
from atoll.coordinator.store.retention import FULL_METRICS_ROUNDS
from atoll.core.errors import InvalidRequest
from atoll.core.metrics_bounds import EARLY_METRICS_ROUNDS
from atoll.v1 import membership_pb2 as mb


@pytest.fixture
def world() -> World:
    made = World()
    made.train("ann", "bob")
    return made


def stored(world: World) -> list[NodeMetrics]:
    return [record for record in world.records if isinstance(record, NodeMetrics)]


def test_the_metrics_of_all_nodes_are_stored_together_at_the_next_tick(world: World) -> None:
    told = mb.NodeMetrics(
        round=1,
        train_loss=4.5,
        learning_rate=1e-4,
        tokens=512,
        seconds=8.0,
        update_norm=0.5,
        compute_seconds=6.0,
        stall_seconds=0.25,
        exchange_seconds=1.5,
        bytes_sent=1000,
        bytes_received=2000,
    )
    world.say("ann", metrics=[told])
    world.say("bob", metrics=[mb.NodeMetrics(round=1)])
    assert stored(world) == []
    world.tick()
    ann, bob = (world.identities[name].peer_id for name in ("ann", "bob"))
    values = (4.5, 1e-4, 512, 8.0, 0.5, 6.0, 0.25, 1.5, 1000, 2000)
    nothing = (0.0, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0)
    rows = {row.peer_id: row for row in stored(world)}
    assert rows[ann] == NodeMetrics("reef", 1, ann, rows[ann].reported_ms, *values)
    assert rows[bob] == NodeMetrics("reef", 1, bob, rows[bob].reported_ms, *nothing)
    world.tick()
    assert len(stored(world)) == 2


def test_a_backlog_is_stored_in_parts_and_survives_a_stream_that_breaks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_metrics, "ROWS_A_TICK", 5)
    numbers = range(1, 13)
    world.say("ann", metrics=[mb.NodeMetrics(round=number) for number in numbers])
    world.say("bob", metrics=[mb.NodeMetrics(round=1)])
    world.tick()
    assert len(stored(world)) == 5
    world.hang_up("ann")
    world.connect("ann")
    world.say("ann", metrics=[mb.NodeMetrics(round=number) for number in numbers])  # again: not all were stored
    for _ in range(5):
        world.tick()
    ann = world.identities["ann"].peer_id
    assert {row.round for row in stored(world) if row.peer_id == ann} == set(numbers)


def test_a_backlog_that_is_sent_again_is_not_paid_for_twice(world: World) -> None:
    batch = [mb.NodeMetrics(round=1 + index % EARLY_METRICS_ROUNDS) for index in range(machine.MAX_REPORTS)]
    for _ in range(100):
        world.say("ann", metrics=batch)
    assert world.state.live[world.identities["ann"].peer_id].dropped_reports == 0


@pytest.mark.parametrize(
    "wrong",
    [
        *(
            {name: value}
            for name in ("train_loss", "learning_rate", "update_norm", "seconds", "stall_seconds")
            for value in (math.nan, math.inf, -math.inf, -1.0, 1e300)
        ),
        {"tokens": 10**15 + 1},
        {"seconds": 1e-300},
        {"bytes_sent": 2**64 - 1},
    ],
)
def test_a_value_that_is_no_measurement_is_rejected_by_name(world: World, wrong: dict[str, float]) -> None:
    world.say("ann", metrics=[mb.NodeMetrics(round=1, **wrong), mb.NodeMetrics(round=2, train_loss=3.0)])  # type: ignore[arg-type]
    assert world.kinds()[-1] == "metrics.rejected"
    (name,) = wrong
    assert name in [record.message for record in world.records if isinstance(record, Event)][-1]
    world.tick()
    assert [row.round for row in stored(world)] == [2]


def test_rounds_that_are_not_known_or_not_kept_in_full_are_ignored(world: World) -> None:
    events = world.kinds()
    world.put(replace(world.run, head_round=5000))
    oldest, newest = 5000 - FULL_METRICS_ROUNDS + 1, 5000 + EARLY_METRICS_ROUNDS
    for number in (0, 1, oldest - 1, oldest, newest, newest + 1, 2**64 - 1):
        world.say("ann", metrics=[mb.NodeMetrics(round=number)])
    world.tick()
    assert [row.round for row in stored(world)] == [oldest, newest]
    assert world.kinds() == events


def test_a_node_that_floods_costs_a_bounded_number_of_rows_and_one_event(world: World) -> None:
    batch = [mb.NodeMetrics(round=1 + index % EARLY_METRICS_ROUNDS) for index in range(machine.MAX_REPORTS)]
    sent = 0
    while sent < 20_000:
        world.say("ann", metrics=batch)
        sent += len(batch)
        world.tick()
    assert len(stored(world)) <= METRICS_RATE.burst
    world.wait(reports.DROPPED_SECONDS + 1)
    assert world.kinds().count("reports.dropped") == 1
    world.say("bob", metrics=[mb.NodeMetrics(round=1)])
    world.tick()
    assert stored(world)[-1].peer_id == world.identities["bob"].peer_id


def test_a_heartbeat_with_too_many_metrics_is_refused(world: World) -> None:
    with pytest.raises(InvalidRequest, match="at most 256"):
        world.say("ann", metrics=[mb.NodeMetrics(round=1)] * (machine.MAX_REPORTS + 1))


def test_a_seed_has_no_metrics(world: World) -> None:
    world.enrol("seed", world.token(roles=("seed",)))
    world.connect("seed")
    world.say("seed", metrics=[mb.NodeMetrics(round=1)])
    world.tick()
    assert stored(world) == []
