"""A peer that says more than is taken waits; nobody else does, and nobody waits for an engine that ended."""

import asyncio
from contextlib import asynccontextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import torch
from support.donors import ANN, BOB, CLEO, GENESIS, OFFSETS, plan_of
from support.memory_network import QUEUE_FRAMES, MemoryHub
from support.process_swarm import MODEL, SPEC

from atoll.core.clock import SystemClock
from atoll.core.frames import FrameKind
from atoll.core.run_spec import parse_run_spec
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCallbacks, RoundCounters
from atoll.node.rounds.engine import AveragingEngine
from atoll.node.rounds.event_queue import PLACES, EventQueue
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.member_streams import PROTOCOL, RoundLinks
from atoll.node.rounds.policy import policies
from atoll.node.rounds.run_member import RunMember
from atoll.node.state.anchor import AnchorState
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.vote_store import VoteStore
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import dataplane_pb2 as dp

SOON = 60.0
FLOOD = 10 * (PLACES + QUEUE_FRAMES)
WORD = dp.RoundMessage(report=dp.TokenReport(tokens=7))


def said(peer: str) -> rt.Received:
    return rt.Received(peer, WORD)


async def fill(inbox: EventQueue, peer: str) -> None:
    for _ in range(PLACES):
        await inbox.put_from(peer, said(peer))


async def passes(turns: int = 10) -> None:
    """Everybody who can go on does."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def test_a_peer_waits_for_a_place_and_others_and_we_do_not():
    inbox = EventQueue()
    await fill(inbox, "a")
    waiting = asyncio.create_task(inbox.put_from("a", rt.Lost("a")))
    await passes()
    assert not waiting.done()
    async with asyncio.timeout(SOON):
        await inbox.put_from("b", said("b"))
        inbox.put(rt.Leave())
        assert await inbox.get() == said("a")
        await waiting
        assert [await inbox.get() for _ in range(PLACES + 2)] == [
            *[said("a")] * (PLACES - 1),
            said("b"),
            rt.Leave(),
            rt.Lost("a"),
        ]


async def test_who_stops_waiting_takes_no_place():
    inbox = EventQueue()
    await fill(inbox, "a")
    waiting = [asyncio.create_task(inbox.put_from("a", said("a"))) for _ in range(3)]
    await passes()
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    async with asyncio.timeout(SOON):
        for _ in range(PLACES):
            await inbox.get()
        await fill(inbox, "a")


async def test_nobody_waits_for_an_inbox_that_is_closed():
    inbox = EventQueue()
    await fill(inbox, "a")
    waiting = [asyncio.create_task(inbox.put_from("a", said("a"))) for _ in range(3)]
    await passes()
    inbox.close()
    async with asyncio.timeout(SOON):
        await asyncio.gather(*waiting)
        for peer in 2 * PLACES * ["a", "b"]:
            await inbox.put_from(peer, said(peer))


def engine_of(network, directory) -> AveragingEngine:
    """One that trains nothing and opens no rounds."""
    spec = parse_run_spec(SPEC.format(model=MODEL, nodes=2, tokens=10**6, corpus="x", round_tokens=1000, codec="fp32"))
    status = SimpleNamespace(tokens=0, step_seconds=0.1)
    votes = VoteStore(directory)
    votes.begin()
    return AveragingEngine(
        RunMember(CLEO, spec, b"", network, SystemClock()),
        policies(spec, OFFSETS),
        cast("Trainer", SimpleNamespace(status=status)),
        InstalledState(
            GENESIS, AnchorState(torch.ones(OFFSETS[-1]), OFFSETS), ManifestStore(directory / "manifests", "r")
        ),
        plan_of(ANN, BOB, CLEO),
        votes=votes,
        exchanges=ExchangeServer(network, timedelta(seconds=SOON)),
        counters=RoundCounters(),
        callbacks=cast(
            "RoundCallbacks", SimpleNamespace(committed=None, evaluated=None, audited=None, plan_newer_than=None)
        ),
    )


@asynccontextmanager
async def flooded(directory):
    """An engine that does not run yet, its links, and how many words of a flood got away from its sender."""
    hub = MemoryHub()
    us, ann = hub.join(CLEO.peer_id), hub.join(ANN.peer_id)
    engine = engine_of(us, directory)
    links = RoundLinks(us, engine.receive, engine.lost)
    stream = await ann.open(CLEO.peer_id, PROTOCOL, timedelta(seconds=SOON))
    sent = 0

    async def flood() -> None:
        nonlocal sent
        for _ in range(FLOOD):
            await stream.send(FrameKind.MESSAGE, WORD.SerializeToString())
            sent += 1

    flooding = asyncio.create_task(flood())
    try:
        yield hub, engine, links, flooding, lambda: sent
    finally:
        flooding.cancel()
        await links.close()
        await hub.close()


async def test_a_flood_of_words_waits_at_its_sender_until_the_engine_takes_them(tmp_path):
    async with flooded(tmp_path) as (hub, engine, links, flooding, sent):
        await passes(20 * FLOOD)
        assert PLACES <= sent() <= PLACES + QUEUE_FRAMES + 1
        bob = await hub.join(BOB.peer_id).open(CLEO.peer_id, PROTOCOL, timedelta(seconds=SOON))
        async with asyncio.timeout(SOON):
            for _ in range(PLACES + QUEUE_FRAMES):
                await bob.send(FrameKind.MESSAGE, WORD.SerializeToString())
            running = asyncio.create_task(engine.run(links))
            await flooding
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_engine_that_ends_holds_nobody(tmp_path):
    async with flooded(tmp_path) as (_, engine, links, flooding, _sent):
        await passes(20 * FLOOD)
        running = asyncio.create_task(engine.run(links))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        async with asyncio.timeout(SOON):
            await flooding
