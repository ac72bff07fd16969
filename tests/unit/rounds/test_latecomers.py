"""A member that is about a round behind takes part again, and whoever is late holds up nobody for long."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine_node import Node
from support.machine_plans import POLICY, make_plan
from support.machine_world import World

from atoll.core import protocol
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.latecomers import Latecomers
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

SHORT = replace(  # rounds of about a second
    POLICY, due_tokens=lambda committed, members: 40, round_max=timedelta(seconds=10)
)
PEERS = ["p0", "p1", "p2", "p3"]
SLOW = "p3"
SECONDS = 120.0
TICK = 0.01


class ShortRounds(World):
    """A fetch takes `fetch` seconds and ends at the head that was the newest when it began, as the engine's does."""

    def __init__(self, seed: int, fetch: float = 0.5) -> None:
        super().__init__(len(PEERS), seed, policy=SHORT)
        self.exchange_seconds = lambda start: 0.3
        self.fetch_seconds = lambda: fetch
        self._fetched: dict[str, Head] = {}

    def _begin_catch_up(self, node: Node, reason: str) -> None:
        if not node.catching_up:
            self._fetched[node.peer] = World.newest_reachable(self, node.peer, node.machine.plan)
        super()._begin_catch_up(node, reason)

    def newest_reachable(self, peer: str, plan: Plan | None = None) -> Head:
        return self._fetched.get(peer) or super().newest_reachable(peer, plan)

    def share_of(self, peer: str, since: int) -> float:
        """Of the rounds after `since`, those in which it had a part."""
        rounds = range(since + 1, self.rounds() + 1)
        return sum(peer in self.committed[number].present for number in rounds) / len(rounds)

    def make_late(self, peer: str) -> int:
        """It misses some rounds; returns the last one."""
        self.freeze(peer)
        self.run(5)
        self.thaw(peer)
        return self.rounds()


def slow_link(world: World, peer: str, seconds: float) -> None:
    """What it says and hears takes so much longer."""
    copies = world.network.copies

    def later(sender: str, to: str, message: dp.RoundMessage) -> Iterator[tuple[float, dp.RoundMessage]]:
        for delay, copy in copies(sender, to, message):
            yield delay + seconds * (peer in (sender, to)), copy

    world.network.copies = later


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("fetch", "link"), [(1.2, 0.0), (2.0, 0.0), (3.0, 0.0), (1.2, 0.3), (1.2, 0.6)])
def test_whoever_fetches_a_state_for_as_long_as_a_round_is_soon_there_again(seed, fetch, link):
    world = ShortRounds(seed, fetch)
    slow_link(world, SLOW, link)
    world.run(20)
    since = world.make_late(SLOW)
    world.run(SECONDS)
    assert world.rounds() - since > 20
    assert world.share_of(SLOW, since) > 0.8


def rounds_in(world: World, seconds: float = SECONDS) -> int:
    """How many it commits."""
    before = world.rounds()
    world.run(seconds)
    return world.rounds() - before


class AlwaysLate(ShortRounds):
    """`SLOW` says after every round that it stands at the one before; it has a part in `honest` ones all the same."""

    def __init__(self, seed: int, honest: Callable[[int], bool]) -> None:
        super().__init__(seed)
        self.honest = honest
        self.network.drop = lambda sender, to, message: sender == SLOW and self._is_silent(message)

    def _is_silent(self, message: dp.RoundMessage) -> bool:
        kind = message.WhichOneof("body")
        return kind in ("ready", "report") and not self.honest(getattr(message, kind).round.number)

    def _perform(self, node: Node, action: rt.Action) -> None:
        super()._perform(node, action)
        if isinstance(action, rt.Install) and node.peer != SLOW:
            round_id = RoundId("r", 1, 0, action.head.round, 0)
            report = dp.RoundMessage(report=dp.TokenReport(round=round_id.to_proto(), tokens=10))
            self._later(0.2, node, self._take, rt.Received(SLOW, report))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "honest", [lambda number: False, lambda number: number % 2 == 0], ids=["in no round", "in every other one"]
)
def test_whoever_says_that_it_is_late_holds_up_the_others_for_a_tenth_of_the_time_at_most(seed, honest, monkeypatch):
    world = AlwaysLate(seed, honest)
    world.run(SECONDS)  # in which what may be spent at once is spent
    rounds = rounds_in(world)
    monkeypatch.setattr(Latecomers, "are_awaited", lambda *_: False)
    assert rounds > 0.8 * rounds_in(AlwaysLate(seed, honest))


@pytest.mark.parametrize("seed", range(3))
def test_whoever_says_so_in_vain_is_not_waited_for_in_the_place_of_others(seed):
    world = AlwaysLate(seed, lambda number: False)
    world.run(SECONDS)
    world.fetch_seconds = lambda: 1.5
    since = world.make_late(other := PEERS[2])
    world.run(SECONDS)
    assert world.share_of(other, since) > 0.7


@pytest.mark.parametrize("seed", range(3))
def test_whoever_freezes_on_its_way_does_not_hold_up_the_others(seed, monkeypatch):
    def frozen() -> World:
        world = ShortRounds(seed, fetch=1.2)
        world.run(20)
        world.make_late(SLOW)
        assert world.run(20, until=lambda: world.nodes[SLOW].catching_up)
        world.run(0.5)
        world.freeze(SLOW)
        return world

    rounds = rounds_in(frozen())
    monkeypatch.setattr(Latecomers, "are_awaited", lambda *_: False)
    assert rounds > 0.93 * rounds_in(frozen())


@pytest.mark.parametrize("seed", range(3))
def test_where_nobody_is_late_nobody_is_waited_for(seed, monkeypatch):
    waits: list[bool] = []
    are_awaited = Latecomers.are_awaited
    monkeypatch.setattr(
        Latecomers, "are_awaited", lambda *arguments: waits.append(are_awaited(*arguments)) or waits[-1]
    )
    world = ShortRounds(seed)
    assert world.run(SECONDS, until=lambda: world.rounds() >= 50)
    assert waits
    assert not any(waits)


def head_of(number: int, present: Sequence[str]) -> Head:
    manifest = manifest_pb2.Manifest(protocol=protocol.ours(), round=pb.RoundId(run_id="r", number=number))
    for peer in present:
        manifest.contributions.add(peer_id=peer, present=True)
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["see", "behind", "move", "attempt", "tick"]),
            st.sampled_from(PEERS[1:]),
            st.floats(0.01, 2.0),
            st.sets(st.sampled_from(PEERS)),
        ),
        min_size=10,
        max_size=80,
    ),
    st.floats(0.0, 1.0),
)
def test_all_waits_together_take_at_most_a_tenth_of_the_time(events, exchange):
    most, now, waited, plan = 1.0, 100.0, 0.0, make_plan(PEERS)
    late, head = Latecomers(most, now), head_of(0, PEERS)
    late.move(head, now)
    for what, peer, seconds, present in events:
        for _ in range(math.ceil(seconds / TICK)):
            waited += TICK * late.are_awaited(frozenset(), now)
            now += TICK
        match what:
            case "see":
                late.see(peer, head.round, head, now)
            case "behind":
                late.see(peer, max(0, head.round - 1), head, now)
                late.begin(head, plan, exchange, now, peer)
            case "move":
                head = head_of(head.round + 1, present)
                late.move(head, now)
                late.begin(head, plan, exchange, now)
            case "attempt":
                late.end(head, now)
    assert waited <= most + 0.1 * (now - 100.0) + TICK * len(events)  # what begins at one tick ends at another
