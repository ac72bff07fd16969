"""Layers of a plan to come are fetched beside what a node holds, followed round by round, and handed over."""

import asyncio
from dataclasses import replace
from functools import wraps
from typing import cast

import pytest
import torch
from support.donors import (
    ANN,
    BOB,
    CLEO,
    DAN,
    GENESIS,
    OFFSETS,
    OPERATOR,
    DonorSwarm,
    commit,
    history,
    plan_of,
    state_of,
)
from support.virtual_time import in_virtual_time

from atoll.core.errors import DataDirUnusable, Unreachable
from atoll.core.membership import MembershipVerifier
from atoll.node.control.directives import Directives
from atoll.node.state import prefetch
from atoll.node.state.mapped_vectors import mapped_vector
from atoll.node.state.prefetch import CurrentLayers, LayerPrefetcher, missing_ranges

DONORS = (ANN, BOB, DAN)
STATE = state_of(3.0)
HEAD = commit(STATE, 1, list(DONORS), after=GENESIS)
PLAN = plan_of(*DONORS, seats=DONORS)
WITH_US = plan_of(*DONORS, CLEO, seats=DONORS)


def plan_with(layers, version):
    """The same, but for what we hold."""
    mine = {"first_layer": layers.start, "last_layer": layers.stop - 1}
    assignments = (replace(item, **mine) if item.peer_id == CLEO.peer_id else item for item in WITH_US.assignments)
    return replace(WITH_US, version=version, assignments=tuple(assignments))


class Node:
    """One that is told to fetch layers."""

    def __init__(self, folder, held=range(0)):
        self.donor_swarm = DonorSwarm(folder)
        self.folder = folder / "ours"
        self.folder.mkdir()
        self.directives = Directives(cast(MembershipVerifier, None), lambda *_: None, lambda _: None, folder / "plan")
        self.directives.plan = PLAN
        self.present = CurrentLayers(OFFSETS, held, HEAD if held else None)
        self.told = 0
        self.prefetcher = LayerPrefetcher(
            self.donor_swarm.network,
            self.directives,
            OPERATOR.public_key,
            self.folder,
            lambda: self.present,
            self.ready,
        )
        self.holdings = [self.donor_swarm.serve(member, history(HEAD), STATE) for member in DONORS]

    def ready(self):
        self.told += 1
        self.directives.wake()

    def wants(self, layers):
        self.directives.prepare = layers
        self.directives.wake()

    async def until(self, condition):
        async with asyncio.timeout(10):
            await self.directives.until(condition)


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


def prefetching(test):
    """Decorate a test to run in virtual time beside the prefetcher of its node."""

    @in_virtual_time
    @wraps(test)
    async def run(node, **more):
        running = asyncio.create_task(node.prefetcher.run())
        await test(node, **more)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    return run


def holds(held, state, layers) -> bool:
    own = slice(OFFSETS[layers.start], OFFSETS[layers.stop])
    return torch.equal(held.anchor_E, state.anchor_E[own]) and torch.equal(held.momentum_E, state.momentum_E[own])


@prefetching
async def test_a_spare_fetches_the_span_and_says_so_once(node):
    node.wants(range(1, 4))
    await node.until(lambda: node.prefetcher.span == range(1, 4))
    ((head, state),) = node.prefetcher.held
    assert head.hash == HEAD.hash
    assert holds(state, STATE, range(1, 4))
    assert node.told == 1


@prefetching
async def test_what_finds_no_room_is_not_fetched_and_said_for_as_long_as_it_is_wanted(node):
    node.wants(range(1, 4))
    await node.until(lambda: node.prefetcher.span == range(1, 4))
    node.prefetcher.refuse()
    assert node.prefetcher.refused == range(1, 4)
    assert node.prefetcher.span == range(0)
    node.wants(range(2))
    assert node.prefetcher.refused == range(0)
    await node.until(lambda: node.prefetcher.span == range(2))
    node.wants(range(1, 4))
    assert node.prefetcher.refused == range(1, 4)
    assert node.prefetcher.span == range(0)


@prefetching
async def test_a_member_fetches_only_what_it_lacks(node):
    node.present = CurrentLayers(OFFSETS, range(1, 2), HEAD)
    node.wants(range(4))
    await node.until(lambda: node.prefetcher.span == range(4))
    assert [state.layers for _, state in node.prefetcher.held] == [range(1), range(2, 4)]
    assert all(holds(state, STATE, state.layers) for _, state in node.prefetcher.held)
    assert sum(node.donor_swarm.bodies.values()) == 4  # an anchor and a momentum of two layers that have parameters


@prefetching
async def test_what_is_held_already_needs_nothing(node):
    node.present = CurrentLayers(OFFSETS, range(4), HEAD)
    node.wants(range(1, 3))
    await node.until(lambda: node.prefetcher.span == range(1, 3))
    assert node.prefetcher.held == ()
    assert not node.donor_swarm.bodies


@prefetching
async def test_it_follows_the_rounds_until_the_plan_is_there(node):
    node.directives.plan = plan_with(range(3, 4), version=1)
    node.present = CurrentLayers(OFFSETS, range(3, 4), HEAD)
    node.wants(range(4))
    await node.until(lambda: node.prefetcher.span == range(4))
    later = state_of(5.0)
    head = commit(later, 2, list(DONORS), after=HEAD)
    for holding in node.holdings:
        holding.hold(head, later)
    node.present = CurrentLayers(OFFSETS, range(3, 4), head)
    node.directives.wake()
    async with asyncio.timeout(10):
        while node.prefetcher.held[0][0].hash != head.hash:
            await asyncio.sleep(0.01)
    assert holds(node.prefetcher.held[0][1], later, range(3))
    node.directives.plan = plan_of(*DONORS, CLEO, version=2)
    node.wants(range(0))
    await asyncio.sleep(0.05)
    ((taken, _),) = node.prefetcher.take()  # whoever loads the trainer
    assert taken.hash == head.hash
    assert node.prefetcher.held == ()


@prefetching
async def test_a_spare_looks_for_new_rounds_itself(node, monkeypatch):
    monkeypatch.setattr(prefetch, "POLL", prefetch.POLL / 20)
    node.wants(range(4))
    await node.until(lambda: node.prefetcher.span == range(4))
    later = state_of(5.0)
    head = commit(later, 2, list(DONORS), after=HEAD)
    for holding in node.holdings:
        holding.hold(head, later)
    async with asyncio.timeout(10):
        while node.prefetcher.held[0][0].hash != head.hash:
            await asyncio.sleep(0.01)


@prefetching
async def test_a_plan_that_is_given_up_leaves_nothing(node, monkeypatch):
    monkeypatch.setattr(prefetch, "_SET_ASIDE_TIME", prefetch._SET_ASIDE_TIME / 3000)
    node.wants(range(4))
    await node.until(lambda: node.prefetcher.span == range(4))
    node.wants(range(0))
    async with asyncio.timeout(10):
        while list(node.folder.iterdir()) or node.prefetcher.held or node.prefetcher.set_aside:
            await asyncio.sleep(0.01)
    assert not node.prefetcher.span


@prefetching
async def test_another_span_takes_the_place_of_the_first(node):
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    node.wants(range(2, 4))
    await node.until(lambda: node.prefetcher.span == range(2, 4))
    assert [state.layers for _, state in node.prefetcher.held] == [range(2, 4)]


@prefetching
async def test_what_a_plan_gave_us_waits_for_who_loads_it_though_something_else_is_wanted(node):
    """As when a stage takes over its neighbour's layers, and is to have others of the next one at once."""
    node.directives.plan = plan_with(range(1), version=1)
    node.present = CurrentLayers(OFFSETS, range(1), HEAD)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    node.directives.plan = plan_with(range(3), version=2)
    node.wants(range(4))
    await asyncio.sleep(0.05)
    ((_, state),) = node.prefetcher.take()
    assert state.layers == range(1, 2)
    await node.until(lambda: node.prefetcher.span == range(4))


@prefetching
async def test_what_nobody_takes_stays_until_a_plan_gives_it_to_others(node, monkeypatch):
    """Nobody else may have it."""
    monkeypatch.setattr(prefetch, "_LOAD_TIMEOUT", prefetch._LOAD_TIMEOUT / 6_000)
    node.directives.plan = plan_with(range(1), version=1)
    node.present = CurrentLayers(OFFSETS, range(1), HEAD)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    node.directives.plan = plan_with(range(4), version=2)
    node.wants(range(2, 4))
    await asyncio.sleep(0.3)  # three times as long as it waits at once
    assert [state.layers for _, state in node.prefetcher.held] == [range(1, 2)]
    node.directives.plan = plan_with(range(1), version=3)
    node.directives.wake()
    await node.until(lambda: node.prefetcher.span == range(2, 4))


@prefetching
async def test_while_a_trainer_loads_its_layers_are_not_fetched_beside_it(node):
    """Nothing here follows the rounds then."""
    node.directives.plan = plan_with(range(1), version=1)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    assert [state.layers for _, state in node.prefetcher.held] == [range(1, 2)]
    node.directives.plan = plan_with(range(1), version=2)
    node.wants(range(0))
    async with asyncio.timeout(10):
        while node.prefetcher.held:
            await asyncio.sleep(0.01)


@prefetching
async def test_what_the_plan_gives_anyway_is_nothing_to_prepare(node):
    """As when the plan comes from a member, before the coordinator's word that this is not wanted any more."""
    node.directives.plan = plan_with(range(1), version=1)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    node.directives.plan = plan_with(range(2), version=2)
    node.directives.wake()
    await asyncio.sleep(0.05)
    assert [state.layers for _, state in node.prefetcher.take()] == [range(1, 2)]
    await asyncio.sleep(0.05)
    assert node.prefetcher.held == ()
    node.directives.plan = plan_with(range(2), version=3)
    node.wants(range(3))
    await node.until(lambda: node.prefetcher.span == range(3))
    assert [state.layers for _, state in node.prefetcher.held] == [range(2, 3)]


@prefetching
async def test_another_plan_that_is_prepared_in_between_makes_nobody_fetch_twice(node):
    node.directives.plan = plan_with(range(1), version=1)
    node.present = CurrentLayers(OFFSETS, range(1), HEAD)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    node.wants(range(3, 4))
    await node.until(lambda: node.prefetcher.span == range(3, 4))
    fetched = sum(node.donor_swarm.bodies.values())
    assert [state.layers for _, state in node.prefetcher.set_aside] == [range(1, 2)]
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    assert sum(node.donor_swarm.bodies.values()) == fetched


@prefetching
async def test_what_is_wanted_again_soon_is_not_fetched_again(node):
    """A pause, another plan that is prepared and given up, a coordinator that was started again."""
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    fetched = sum(node.donor_swarm.bodies.values())
    node.wants(range(0))
    async with asyncio.timeout(10):
        while node.prefetcher.held:
            await asyncio.sleep(0.01)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    assert sum(node.donor_swarm.bodies.values()) == fetched
    node.wants(range(3))
    await node.until(lambda: node.prefetcher.span == range(3))
    assert [state.layers for _, state in node.prefetcher.held] == [range(3)]
    assert sum(node.donor_swarm.bodies.values()) == fetched  # the third has no parameters


@prefetching
async def test_one_that_hears_of_a_round_before_its_holders_have_it_asks_again(node, monkeypatch):
    monkeypatch.setattr(prefetch, "POLL", prefetch.POLL / 20)
    node.present = CurrentLayers(OFFSETS, range(1), HEAD)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    later = state_of(5.0)
    head = commit(later, 2, list(DONORS), after=HEAD)
    node.present = CurrentLayers(OFFSETS, range(1), head)
    node.directives.wake()
    await asyncio.sleep(0.1)
    assert node.prefetcher.round == 1
    for holding in node.holdings:
        holding.hold(head, later)
    async with asyncio.timeout(10):
        while node.prefetcher.round < 2:
            await asyncio.sleep(0.01)


@prefetching
async def test_a_copy_that_is_wanted_no_more_is_dropped_though_plans_came_and_went(node):
    node.present = CurrentLayers(OFFSETS, range(1), HEAD)
    node.directives.plan = plan_with(range(1), version=1)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    node.directives.plan = plan_with(range(1), version=2)
    node.wants(range(0))
    async with asyncio.timeout(10):
        while node.prefetcher.held:
            await asyncio.sleep(0.01)


@prefetching
async def test_rounds_of_other_layers_copy_nothing(node):
    """A second copy is followed for as long as a run: only what was averaged is written anew."""
    node.present = CurrentLayers(OFFSETS, range(1), HEAD)
    node.wants(range(2))
    await node.until(lambda: node.prefetcher.span == range(2))
    ((_, before),) = node.prefetcher.held
    fetched = dict(node.donor_swarm.bodies)
    later = commit(STATE, 2, list(DONORS), after=HEAD, layers=HEAD.manifest.layers)
    for holding in node.holdings:
        holding.hold(later, STATE)
    node.present = CurrentLayers(OFFSETS, range(1), later)
    node.directives.wake()
    async with asyncio.timeout(10):
        while node.prefetcher.round < 2:
            await asyncio.sleep(0.01)
    ((head, state),) = node.prefetcher.held
    assert head.hash == later.hash
    assert state is before
    assert node.donor_swarm.bodies == fetched


@prefetching
async def test_layers_that_the_model_has_not_are_ignored(node):
    node.wants(range(2, 9))
    await asyncio.sleep(0.05)
    assert not node.prefetcher.span
    node.wants(range(2, 4))
    await node.until(lambda: node.prefetcher.span == range(2, 4))


@prefetching
async def test_when_nobody_can_be_reached_it_tries_again(node, monkeypatch):
    monkeypatch.setattr(prefetch, "_RETRY", prefetch.POLL / 100)
    states = [(holding, holding.state) for holding in node.holdings]
    for holding, _ in states:
        holding.state = None
    node.wants(range(4))
    await asyncio.sleep(0.1)
    assert not node.prefetcher.span
    for holding, state in states:
        holding.state = state
    await node.until(lambda: node.prefetcher.span == range(4))


@pytest.mark.parametrize(
    ("span", "held", "gaps"),
    [
        (range(2, 5), range(0), (range(2, 5),)),
        (range(2, 5), range(2), (range(2, 5),)),
        (range(2, 5), range(3), (range(3, 5),)),
        (range(2, 5), range(3, 4), (range(2, 3), range(4, 5))),
        (range(2, 5), range(9), ()),
    ],
)
def test_what_is_lacking(span, held, gaps):
    assert missing_ranges(span, held) == gaps


def test_no_room_on_the_disk_is_told_before_anything_is_written(tmp_path):
    with pytest.raises(DataDirUnusable):
        mapped_vector(tmp_path, 1 << 50)
    assert list(tmp_path.iterdir()) == []


@in_virtual_time
async def test_what_stands_still_here_is_used_before_anybody_is_asked(node):
    prefetcher = LayerPrefetcher(
        node.donor_swarm.network,
        node.directives,
        OPERATOR.public_key,
        node.folder,
        lambda: node.present,
        node.ready,
        local_states=lambda: ((HEAD, STATE),),
    )
    running = asyncio.create_task(prefetcher.run())
    node.wants(range(4))
    await node.until(lambda: prefetcher.span == range(4))
    assert not node.donor_swarm.bodies
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@prefetching
async def test_an_error_while_it_follows_leaves_what_is_here(node, monkeypatch):
    monkeypatch.setattr(prefetch, "POLL", prefetch.POLL / 50)
    monkeypatch.setattr(prefetch, "_RETRY", prefetch.POLL / 50)
    node.wants(range(4))
    await node.until(lambda: node.prefetcher.span == range(4))
    catch_up = prefetch.catch_up
    failed = asyncio.Event()

    async def fail(*_args, **_more):
        failed.set()
        raise Unreachable("no head was found")

    monkeypatch.setattr(prefetch, "catch_up", fail)
    await asyncio.wait_for(failed.wait(), 10)
    assert node.prefetcher.span == range(4)
    assert holds(node.prefetcher.held[0][1], STATE, range(4))
    bodies = sum(node.donor_swarm.bodies.values())
    again = asyncio.Event()

    async def succeed(*args, **more):
        again.set()
        return await catch_up(*args, **more)

    monkeypatch.setattr(prefetch, "catch_up", succeed)
    await asyncio.wait_for(again.wait(), 10)
    assert node.prefetcher.span == range(4)
    assert sum(node.donor_swarm.bodies.values()) == bodies  # nothing is fetched again


@prefetching
async def test_a_plan_that_comes_during_a_fetch_leaves_nothing_behind(node):
    for holding in node.holdings:
        holding.moving = True
    node.wants(range(4))
    await asyncio.sleep(0.05)
    node.directives.plan = replace(PLAN, version=2)
    node.wants(range(0))
    assert node.prefetcher.take() == ()
    for holding in node.holdings:
        holding.moving = False
    await asyncio.sleep(0.5)
    assert node.prefetcher.held == ()
    assert not node.prefetcher.span
    assert list(node.folder.iterdir()) == []


@prefetching
async def test_what_has_no_room_is_not_fetched(node):
    node.wants(range(4))
    node.prefetcher.refuse()
    await asyncio.sleep(0.05)
    assert not node.prefetcher.span
    assert not node.donor_swarm.bodies


@prefetching
async def test_what_turns_out_to_have_no_room_is_dropped_and_not_called_prepared(node, monkeypatch):
    """A trainer with these layers is loaded meanwhile, and cannot hold them."""
    monkeypatch.setattr(prefetch, "POLL", prefetch.POLL / 100)
    node.wants(range(4))
    await node.until(lambda: node.prefetcher.span == range(4))
    node.prefetcher.refuse()
    node.directives.wake()
    assert not node.prefetcher.span
    async with asyncio.timeout(10):
        while node.prefetcher.held:
            await asyncio.sleep(0.01)
