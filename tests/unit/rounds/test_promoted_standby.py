"""Who stood by in an exchange that failed takes a place: it brought nothing, so what it trains then is its to bring."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import machine_world
from support.machine_plans import GENESIS
from support.machine_world import TOKENS_PER_TICK, World

from atoll.core.manifest import Head
from atoll.core.plan import Assignment, Base, Plan
from atoll.core.quorum import COORDINATOR
from atoll.node.rounds import types as rt

Spans = dict[str, tuple[int, int]]


def plan(version: int, spans: Spans, routes: list[list[str]], base: Base) -> Plan:
    """Who is on no route stands by: no tokens, no reducing."""
    placed = {peer for route in routes for peer in route}
    drivers = {route[0] for route in routes}
    rows = tuple(
        Assignment(
            peer,
            *spans[peer],
            ((64 * number, 64 * number + 64),) if peer in drivers else (),
            10_000 if peer in placed else 0,
            1 if peer in placed else 0,
        )
        for number, peer in enumerate(sorted(spans))
    )
    return Plan("r", version, rows, tuple(map(tuple, routes)), base)


class Swarm(World):
    """Who stands by trains nothing; a driver that is new gets samples, and its trainer keeps its snapshot then."""

    snapped: set[str]

    def _tick(self, peer: str, incarnation: int) -> None:
        node = self.nodes[peer]
        before, idle = node.trained, peer not in node.machine.plan.stages
        if idle:
            node.trained -= TOKENS_PER_TICK
        super()._tick(peer, incarnation)
        if idle and node.trained < before:
            node.trained = before

    def _perform(self, node: machine_world.Node, action: rt.Action) -> None:
        super()._perform(node, action)
        if isinstance(action, rt.Release) and action.thaw:
            self.snapped.discard(node.peer)

    def _freeze_snapshot(self, node: machine_world.Node, *rest: object) -> None:
        self.snapped.add(node.peer)
        super()._freeze_snapshot(node, *rest)  # type: ignore[arg-type]

    def _install(self, node: machine_world.Node, head: Head, counted: rt.Counted) -> None:
        assert counted is rt.Counted.NOTHING or node.peer in self.snapped, "a result is applied without a snapshot"
        self.snapped.discard(node.peer)
        super()._install(node, head, counted)


@pytest.fixture
def swarm(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int, Plan], Swarm]:
    """So many peers, p0, p1, …, under that plan."""

    def made(count: int, seed: int, first: Plan) -> Swarm:
        monkeypatch.setattr(machine_world, "make_plan", lambda *_, **__: first)
        Swarm.snapped = set()
        return Swarm(count, seed=seed)

    return made


def dies_as_opener(world: Swarm, opener: str, standby: str) -> None:
    """Kill it while who stands by exchanges in the attempt that it opened."""

    def exchanging() -> bool:
        following = world.nodes[standby].machine._attendance.following
        return following is not None and following.phase is rt.Phase.EXCHANGING and following.opener == opener

    for _ in range(6000):
        world.run(0.02)
        if exchanging():
            break
    assert exchanging()
    world.kill(opener)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [1.2, 4.0])
def test_rounds_of_a_stage_go_on(swarm: Callable[[int, int, Plan], Swarm], seed: int, seconds: float) -> None:
    first, stage, standby = "p0", "p1", "p2"
    base = Base(GENESIS.hash, (stage, first, standby))
    spans: Spans = {first: (0, 1), stage: (2, 2), standby: (2, 2)}
    world = swarm(3, seed, plan(1, spans, [[first, stage]], base))
    world.run(10 + seed)
    dies_as_opener(world, stage, standby)
    head = world.nodes[standby].machine.head.round
    later = plan(2, {first: (0, 1), standby: (2, 2)}, [[first, standby]], base)
    world.at(seconds, lambda: world.issue(later, [first, standby]))
    world.run(120)
    assert world.nodes[standby].machine.head.round > head + 2
    counted = [
        head for head in world.ledger.installed[standby] if head.round > world.nodes[standby].machine.head.round - 2
    ]
    assert any(item.peer_id == standby and item.weight for head in counted for item in head.manifest.contributions)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [1.2, 4.0])
def test_a_driver_s_standby_drives(swarm: Callable[[int, int, Plan], Swarm], seed: int, seconds: float) -> None:
    whole, driver, last, standby = "p0", "p1", "p2", "p3"
    base = Base(GENESIS.hash, (driver, whole, last, standby, COORDINATOR))
    spans: Spans = {whole: (0, 2), driver: (0, 1), last: (2, 2), standby: (0, 1)}
    world = swarm(4, seed, plan(1, spans, [[whole], [driver, last]], base))
    world.run(8 + seed)
    dies_as_opener(world, driver, standby)
    head = world.nodes[standby].machine.head.round
    del spans[driver]
    later = plan(2, spans, [[whole], [standby, last]], base)
    world.at(seconds, lambda: world.issue(later, [whole, last, standby]))
    world.run(60)
    assert world.nodes[standby].machine.head.round > head + 2


@pytest.mark.parametrize("seed", range(3))
def test_who_drives_again_at_the_same_head_brings_what_it_showed_before(
    swarm: Callable[[int, int, Plan], Swarm], seed: int
) -> None:
    whole, driver, last = "p0", "p1", "p2"
    base = Base(GENESIS.hash, (last, whole, driver))
    spans: Spans = {whole: (0, 2), driver: (0, 1), last: (2, 2)}
    world = swarm(3, seed, plan(1, spans, [[whole], [driver, last]], base))
    world.run(8 + seed)
    dies_as_opener(world, last, driver)
    world.freeze(whole)  # so that the head stands still
    head = world.nodes[driver].machine.head.round
    without, again = plan(2, spans, [[whole]], base), plan(3, spans, [[whole], [driver, last]], base)
    world.at(4.0, lambda: world.issue(without))
    world.at(9.0, lambda: world.issue(again))
    world.at(10.0, lambda: (world.thaw(whole), world.restart(last)))
    world.run(60)
    assert world.nodes[driver].machine.head.round > head + 2
