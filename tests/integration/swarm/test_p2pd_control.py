"""The client of p2pd's control socket, against a p2pd that answers nothing but registrations."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2 as p2pd
from support.eventually import eventually

from atoll.node.swarm.p2pd_control import P2pdControl

PEER = PeerID(b"\x00" * 34)


async def test_calls_that_wait_and_later_ones_fail_when_p2pd_ends_also_beside_handlers(
    short_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """hivemind keeps the finished future of each registered handler among the pending calls."""
    called, ending = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_pbmsg_safe(reader, p2pd.Request())
        await write_pbmsg(writer, p2pd.Response(type=p2pd.Response.OK))
        while not called.is_set():
            message = p2pd.PersistentConnectionRequest()
            await read_pbmsg_safe(reader, message)
            if message.HasField("addUnaryHandler"):
                await write_pbmsg(writer, p2pd.PersistentConnectionResponse(callId=message.callId))
            elif message.HasField("callUnary"):
                called.set()
        await ending.wait()
        writer.close()

    async def echo(data: bytes, _peer: PeerID) -> bytes:
        return data

    async with await asyncio.start_unix_server(serve, short_dir / "control"):
        client = await P2pdControl.attach(short_dir / "control", short_dir / "streams")
        await client.add_unary_handler("echo", echo)
        waiting = asyncio.create_task(client.control.call_unary_handler(PEER, "other", b""))
        await called.wait()
        ending.set()
        await eventually(waiting.done)
        with pytest.raises(P2PDaemonError, match="ended its connection"):
            await waiting
        with pytest.raises(P2PDaemonError, match="ended its connection"):
            await client.control.call_unary_handler(PEER, "other", b"")
        client.close()
        await client.control.drain_tasks()
    assert "Exception in callback" not in caplog.text
