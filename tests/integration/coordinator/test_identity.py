"""Two processes with the identity of one node: the one that has the heartbeat stream stays, if it lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Coordinator, Node, coordinator, error_of

from atoll.coordinator.state.draft import Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import membership_pb2 as mb

FIRST, SECOND = b"a" * 16, b"b" * 16


def copy_of(node: Node) -> Node:
    """A second process on a copy of its data directory."""
    copy = Node(node.home, node.identity, node.name)
    copy.key_pem, copy.enrolled = node.key_pem, node.enrolled
    return copy


@asynccontextmanager
async def node_with_copy(data_dir: Path) -> AsyncIterator[tuple[Coordinator, Node, Node, asyncio.Task[Node]]]:
    """A node, its copy, and the copy's first heartbeat, which waits for an answer; the node was challenged."""
    async with coordinator(data_dir) as home:
        await home.create_run()
        node = await (await home.node("ann")).connect(instance=FIRST)
        await node.acknowledged(1)
        copy = copy_of(node)
        await copy.connect(instance=SECOND)
        answered = asyncio.create_task(copy.acknowledged(1))
        await node.hear(lambda response: bool(response.challenge))
        assert not answered.done()
        yield home, node, copy, answered
        answered.cancel()
        await asyncio.gather(answered, return_exceptions=True)
        await copy.close()
        await node.close()


def challenge_of(node: Node) -> bytes:
    return next(response.challenge for response in node.heard if response.challenge)


async def events(home: Coordinator, kind: str) -> list[str]:
    listed = home.admin.Events(admin.EventsRequest(), timeout=SECONDS)
    return [event.message async for event in listed if event.kind == kind]


async def test_of_two_that_live_the_later_one_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async with node_with_copy(tmp_path / "c") as (home, node, _copy, answered):
        for _ in range(3):  # heartbeats alone do not show that it lives: they may have been under way
            await node.say()
        await node.acknowledged(4)
        assert not answered.done()
        await node.say(challenge_answer=b"guessed!")
        await node.acknowledged(5)
        assert not answered.done()
        await node.say(challenge_answer=challenge_of(node))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answered
        assert error_of(refused.value).reason == "IdentityInUse"
        assert "another directory" in error_of(refused.value).remedy
        await node.acknowledged(await node.say())
        (message,) = await events(home, "node.identity-in-use")
        assert "ann" in message
        again = copy_of(node)
        await again.connect(instance=SECOND)  # the answer that it gave once does not count for ever
        await node.hear(lambda response: response.challenge not in (b"", challenge_of(node)))
        await again.close()
        await node.acknowledged(await node.say())


async def test_the_copy_of_a_node_cannot_announce_that_it_leaves(tmp_path: Path) -> None:
    async with node_with_copy(tmp_path / "c") as (home, node, copy, _):
        await copy.stub.Leave(mb.LeaveRequest(reason="bedtime", instance=SECOND), timeout=SECONDS)
        assert await events(home, "node.left") == []
        await node.stub.Leave(mb.LeaveRequest(reason="bedtime", instance=FIRST), timeout=SECONDS)
        assert await events(home, "node.left") == ["ann left: bedtime"]


async def end_of_process(_: Coordinator, node: Node) -> None:
    """The kernel closes its connections."""
    await node.close()


async def silence(home: Coordinator, node: Node) -> None:
    """Its machine lost power, or its link, an hour ago: nothing tells the coordinator."""

    def an_hour_later(state: State, now: StepTime) -> Step[None]:
        peer_id = node.identity.peer_id
        silent = replace(state.live[peer_id], last_message_at=now.monotonic - 3600)
        return Step(replace(state, live={**state.live, peer_id: silent}), None)

    await home.controller.do(an_hour_later)


@pytest.mark.parametrize("ending", [end_of_process, silence])
async def test_a_node_that_starts_again_gets_the_place_of_its_dead_process(
    tmp_path: Path, ending: Callable[[Coordinator, Node], Awaitable[None]]
) -> None:
    async with node_with_copy(tmp_path / "c") as (home, node, copy, answered):
        await ending(home, node)
        async with asyncio.timeout(SECONDS):
            await answered
        assert await events(home, "node.identity-in-use") == []
        await copy.acknowledged(await copy.say())


async def test_a_process_that_dials_again_replaces_its_own_stream_at_once(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        node = await (await home.node("ann")).connect(instance=FIRST)
        await node.acknowledged(1)
        again = await copy_of(node).connect(instance=FIRST)
        await again.acknowledged(1)
        assert error_of(await node.ended()).reason == "InvalidTransition"
        await again.close()
        await node.close()


async def test_two_that_wait_for_one_dead_process_do_not_both_get_its_place(tmp_path: Path) -> None:
    async with node_with_copy(tmp_path / "c") as (home, node, copy, answered):
        third = copy_of(node)
        await third.connect(instance=b"c" * 16)
        waiting = asyncio.create_task(third.acknowledged(1))
        await node.close()
        async with asyncio.timeout(SECONDS):
            await asyncio.wait((answered, waiting), return_when=asyncio.FIRST_COMPLETED)
        winner, loser, lost = (copy, third, waiting) if answered.done() else (third, copy, answered)
        await winner.hear(lambda response: bool(response.challenge))
        await winner.say(challenge_answer=challenge_of(winner))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await lost
        assert error_of(refused.value).reason == "IdentityInUse"
        assert len(await events(home, "node.identity-in-use")) == 1
        await loser.close()
        await third.close()


async def test_a_process_hears_what_the_one_before_it_promised(tmp_path: Path) -> None:
    """So it knows when its record of promises is older."""
    newest = mb.Promise(round=7, plan_version=2, attempt=3)
    async with coordinator(tmp_path / "c") as home:
        await home.create_run()
        node = await (await home.node("ann")).connect(instance=FIRST)
        await node.acknowledged(await node.say(promised=mb.Promise(round=7, plan_version=2)))
        await node.acknowledged(await node.say(promised=newest))
        await node.acknowledged(await node.say())
        assert not any(response.HasField("promised") for response in node.heard)
        await node.close()
        after = await copy_of(node).connect(instance=SECOND, promised=mb.Promise(round=6, plan_version=2))
        await after.acknowledged(1)
        assert [response.promised for response in after.heard if response.HasField("promised")] == [newest]
        again = await copy_of(node).connect(instance=SECOND, promised=mb.Promise(round=8, plan_version=2))
        assert (await again.hear(lambda response: response.HasField("promised"))).promised == newest
        await again.close()
        await after.close()
