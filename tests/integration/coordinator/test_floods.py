"""Floods from one member, over real mutual TLS: what it sends without pause, and what it sends at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import pytest
from integration.coordinator.lab import SECONDS, Node, coordinator, error_of
from support.eventually import eventually

from atoll.coordinator import grpc_server
from atoll.coordinator.state.rate_limits import CALLS_RATE
from atoll.v1 import membership_pb2 as mb

FLOOD = 3 * int(CALLS_RATE.burst)


async def write_without_pause(node: Node) -> None:
    """As fast as gRPC takes them."""
    with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for _ in range(FLOOD):
            await node.say()


async def standing(node: Node) -> str:
    """Why a call is refused, if it is."""
    try:
        await node.stub.Standing(mb.StandingRequest(), timeout=SECONDS)
    except grpc.aio.AioRpcError as error:
        return error_of(error).reason
    return ""


async def test_heartbeats_without_pause_are_read_at_a_bounded_rate(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run(min_nodes=9)
        ann, eve = [await (await home.node(name)).connect() for name in ("ann", "eve")]
        loop = asyncio.get_running_loop()
        since = loop.time()
        flood = asyncio.create_task(write_without_pause(eve))
        await eve.acknowledged(int(CALLS_RATE.burst))  # an honest node sends no more at once
        heard: list[int] = []

        async def listen() -> None:
            while True:
                heard.append((await eve.call.read()).acknowledged_sequence)

        listening = asyncio.create_task(listen())  # a read that is interrupted ends the stream
        await asyncio.sleep(3)
        allowed = CALLS_RATE.burst + CALLS_RATE.per_second * (loop.time() - since + 1)
        assert max(heard, default=0) <= allowed
        await ann.acknowledged(await ann.say())  # nobody else waits
        async with asyncio.timeout(SECONDS):
            while await standing(eve) != "Busy":  # the first calls pass where a pause has paid for them
                pass
        for task in (flood, listening):
            task.cancel()
        await asyncio.gather(flood, listening, return_exceptions=True)
        for node in (ann, eve):
            await node.close()


async def test_more_streams_give_a_member_no_more(tmp_path: Path) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run(min_nodes=9)
        eve = await home.node("eve")
        async with eve.channel() as channel:

            async def call_without_pause() -> None:
                for _ in range(FLOOD):
                    await eve.stub_on(channel).Leave(mb.LeaveRequest(), timeout=SECONDS)

            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call_without_pause()
        assert error_of(failure.value).reason == "Busy"


async def test_a_members_connection_without_a_call_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = dict(grpc_server._MEMBER_OPTIONS)
    assert options["grpc.max_connection_idle_ms"] <= 60_000
    short = {**options, "grpc.max_connection_idle_ms": 1000}
    monkeypatch.setattr(grpc_server, "_MEMBER_OPTIONS", tuple(short.items()))
    async with coordinator(tmp_path / "c") as home:
        await home.create_run(min_nodes=9)
        ann, eve = await (await home.node("ann")).connect(), await home.node("eve")
        async with eve.channel() as channel:
            await eve.stub_on(channel).Leave(mb.LeaveRequest(), timeout=SECONDS)
            await eventually(lambda: channel.get_state() is grpc.ChannelConnectivity.IDLE)
        await ann.acknowledged(await ann.say())  # its stream is a call
        await ann.close()


FLOODS = {
    "rows": mb.HeartbeatRequest(evaluations=[mb.EvaluationReport()]),
    "addresses": mb.HeartbeatRequest(multiaddrs=[""]),
    "paths": mb.HeartbeatRequest(paths=[mb.PeerPath()]),
}


@pytest.mark.parametrize("what", FLOODS)
@pytest.mark.parametrize("copies", [100_000, 2_000_000, 3_000_000])
async def test_a_heartbeat_with_too_many_entries_ends_the_stream(tmp_path: Path, what: str, copies: int) -> None:
    async with coordinator(tmp_path / "c") as home:
        await home.create_run(min_nodes=9)
        eve = await home.node("eve")
        async with eve.channel() as channel:

            async def flood() -> AsyncIterator[bytes]:
                yield FLOODS[what].SerializeToString() * copies

            call = channel.stream_stream("/atoll.v1.MembershipService/Heartbeat")(flood(), timeout=SECONDS)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await call.read()
            if copies > 2_000_000:  # 6 MB: gRPC takes no such message
                assert failure.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            else:
                assert error_of(failure.value).reason == "PeerMisbehaved"
        await (await eve.connect()).acknowledged(1)  # it may come back
        await eve.close()
