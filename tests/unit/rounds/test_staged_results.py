"""A round's state is made while the opener's word is awaited, and made again where that word changes the average."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import TypeVar, cast

import pytest
import torch
from support.eventually import eventually
from support.exchange_swarm import ELEMENTS, PART, ROUND, start_message
from support.machine_plans import make_plan
from support.memory_network import MemoryHub
from support.process_swarm import MODEL, SPEC

from atoll.core.clock import SystemClock
from atoll.core.fragments import Fragment
from atoll.core.manifest import Head
from atoll.core.run_spec import parse_run_spec
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCounters
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.policy import policy_of
from atoll.node.rounds.run_member import RunMember
from atoll.node.rounds.staged_results import RoundResults
from atoll.node.state.anchor import AnchorState, OuterStepBuilder
from atoll.node.state.outer_step import layer_states, outer_step
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

T = TypeVar("T")
PEERS = ("a", "b", "c")
OFFSETS = (0, ELEMENTS // 2, ELEMENTS)
WHOLE = Fragment(0, 0, 2, 0, ELEMENTS)
PATIENCE = 30.0
START = start_message(dict.fromkeys(PEERS, 1), "fp32")


def settled(digests: Sequence[bytes]) -> dp.Settle:
    return dp.Settle(present=PEERS, digests=digests, nonces=[bytes(16)] * len(PEERS))


def genesis(state: AnchorState) -> Head:
    manifest = manifest_pb2.Manifest(layers=state.layer_states(0))
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))


class Trio:
    """Three members that averaged, up to the opener's word."""

    def __init__(self) -> None:
        self.hub, self.beside = MemoryHub(), BackgroundTasks()
        self.spec = parse_run_spec(
            SPEC.format(model=MODEL, nodes=3, tokens=10**6, corpus="x", round_tokens=1000, codec="fp32")
        )
        self.told = {peer: asyncio.Queue[rt.Event]() for peer in PEERS}
        self.states = {peer: AnchorState(torch.ones(ELEMENTS), OFFSETS) for peer in PEERS}
        self.counters = {peer: RoundCounters() for peer in PEERS}
        self.results = {peer: self._results(peer) for peer in PEERS}
        self.vectors = {
            p: torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(PEERS)
        }

    def _results(self, peer: str) -> RoundResults:
        policy = replace(policy_of(self.spec, OFFSETS), screen=None)
        machine = cast("RoundMachine", SimpleNamespace(held=(), policy=policy, plan=make_plan(list(PEERS))))
        network = self.hub.join(peer)
        exchanges = ExchangeServer(network, timedelta(seconds=PATIENCE))
        tell = self.told[peer].put_nowait
        member = cast("RunMember", SimpleNamespace(spec=self.spec, network=network, clock=SystemClock()))
        return RoundResults(member, machine, self.states[peer], exchanges, self.beside, tell, self.counters[peer])

    async def average(self) -> tuple[bytes, ...]:
        """Digests of the parts, which all have."""
        for peer, results in self.results.items():
            results.begin(START, PATIENCE, WHOLE, self.vectors[peer], genesis(self.states[peer]))
        exchange_done = [await self.next(peer, rt.ExchangeDone) for peer in PEERS]
        assert len({it.digests for it in exchange_done}) == 1
        return exchange_done[0].digests

    async def next(self, peer: str, kind: type[T]) -> T:
        async with asyncio.timeout(PATIENCE):
            event = await self.told[peer].get()
        assert isinstance(event, kind)
        return event

    def layers_of(self, average_E: torch.Tensor) -> tuple[manifest_pb2.LayerState, ...]:
        state, sync = self.states["a"], self.spec.sync
        made = outer_step(state.anchor_E, state.momentum_E, average_E, sync.outer_learning_rate, sync.outer_momentum)
        return layer_states(*made, OFFSETS, 1)

    async def close(self) -> None:
        await self.beside.stop()
        for results in self.results.values():
            results.close()
        await self.hub.close()


@pytest.fixture
def finishes(monkeypatch: pytest.MonkeyPatch) -> list[OuterStepBuilder]:
    """Every staging whose digests were begun."""
    begun: list[OuterStepBuilder] = []
    finish: Callable[..., object] = OuterStepBuilder.finish

    def noted(staging: OuterStepBuilder, *arguments: object) -> object:
        begun.append(staging)
        return finish(staging, *arguments)

    monkeypatch.setattr(OuterStepBuilder, "finish", noted)
    return begun


async def test_the_state_is_made_once_and_before_the_word_that_settles_it(finishes: list[OuterStepBuilder]) -> None:
    trio = Trio()
    digests = await trio.average()
    await eventually(lambda: len(finishes) == len(PEERS))
    for peer in PEERS:
        trio.results[peer].complete(ROUND, settled(digests), PATIENCE)
    staged = [await trio.next(peer, rt.Staged) for peer in PEERS]
    mean_E = sum(trio.vectors[peer] * (1 / 3) for peer in PEERS)
    assert all(it.layers == trio.layers_of(mean_E) for it in staged)
    assert len(finishes) == len(PEERS)
    await trio.close()


async def test_what_was_settled_otherwise_is_the_state(finishes: list[OuterStepBuilder]) -> None:
    trio = Trio()
    digests = await trio.average()
    await eventually(lambda: len(finishes) == len(PEERS))
    mended = [b"", *digests[1:]]
    for peer in PEERS:
        trio.results[peer].complete(ROUND, settled(mended), PATIENCE)
    staged = [await trio.next(peer, rt.Staged) for peer in PEERS]
    mean_E = sum(trio.vectors[peer] * (1 / 3) for peer in PEERS)
    mean_E[:PART] = 0.0
    assert all(it.layers == trio.layers_of(mean_E) for it in staged)
    assert len(finishes) == 2 * len(PEERS)
    await trio.close()


async def test_a_word_that_comes_while_the_state_is_made_waits_for_that_or_makes_another(
    finishes: list[OuterStepBuilder], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, noted = threading.Event(), OuterStepBuilder.finish

    def held_up(staging: OuterStepBuilder, *arguments: object) -> object:
        assert go.wait(PATIENCE)
        return noted(staging, *arguments)

    monkeypatch.setattr(OuterStepBuilder, "finish", held_up)
    trio = Trio()
    digests = await trio.average()
    trio.results["a"].complete(ROUND, settled(digests), PATIENCE)
    trio.results["b"].complete(ROUND, settled([b"", *digests[1:]]), PATIENCE)
    await asyncio.sleep(0.05)
    assert trio.told["a"].empty()
    assert trio.told["b"].empty()
    go.set()
    mean_E = sum(trio.vectors[peer] * (1 / 3) for peer in PEERS)
    assert (await trio.next("a", rt.Staged)).layers == trio.layers_of(mean_E)
    mean_E[:PART] = 0.0
    assert (await trio.next("b", rt.Staged)).layers == trio.layers_of(mean_E)
    await eventually(lambda: len(finishes) == len(PEERS) + 1)
    await trio.close()


async def test_a_state_that_could_not_be_made_before_the_word_is_made_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    finish, failed = OuterStepBuilder.finish, []

    def fails_once_each(staging: OuterStepBuilder, *arguments: object) -> object:
        if staging not in failed:
            failed.append(staging)
            raise MemoryError
        return finish(staging, *arguments)

    monkeypatch.setattr(OuterStepBuilder, "finish", fails_once_each)
    trio = Trio()
    digests = await trio.average()
    await eventually(lambda: len(failed) == len(PEERS))
    trio.results["a"].complete(ROUND, settled(digests), PATIENCE)
    mean_E = sum(trio.vectors[peer] * (1 / 3) for peer in PEERS)
    assert (await trio.next("a", rt.Staged)).layers == trio.layers_of(mean_E)
    await trio.close()


async def test_the_time_of_an_exchange_and_the_norm_of_what_was_sent_are_measured() -> None:
    trio = Trio()
    await trio.average()
    for peer in PEERS:
        norm = trio.vectors[peer].norm().item()
        await eventually(lambda peer=peer, norm=norm: trio.counters[peer].update_norm == pytest.approx(norm))  # type: ignore[misc]
        assert trio.counters[peer].exchange_seconds > 0
    await trio.close()
