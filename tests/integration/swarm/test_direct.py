"""Direct connections between hosts, and the fallback to libp2p."""

from __future__ import annotations

import socket
from dataclasses import replace
from datetime import timedelta

import pytest
from support.eventually import eventually
from support.loopback_hosts import DIRECT, SOON, Lab, echo

from atoll.core.errors import PeerMisbehaved, PortInUse, Unreachable
from atoll.core.frames import FrameKind
from atoll.core.membership import DenyList
from atoll.node.direct import dialler, tcp
from atoll.node.direct.stream import DirectStream
from atoll.node.swarm.host import SwarmHost
from atoll.node.swarm.stream_acceptor import MAX_STREAMS_PER_PROTOCOL
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.transport import Stream

BODY = bytes(range(256)) * 4096 * 4


async def two(lab: Lab) -> tuple[SwarmHost, SwarmHost]:
    seed = await lab.start("seed", relay_service=True)
    seed.handle("/echo/1", echo)
    await seed.ready()
    return seed, await lab.start("a", seeds=seed.multiaddrs())


async def works(stream: SocketStream) -> None:
    await stream.send(FrameKind.PART, b"header", BODY)
    frame = await stream.receive(SOON)
    assert (frame.kind, frame.header, bytes(frame.body)) == (FrameKind.PART, b"header", BODY)
    await stream.close()


async def test_bulk_goes_over_the_direct_connection(lab: Lab) -> None:
    seed, a = await two(lab)
    stream = await a.open(seed.peer_id, "/echo/1", SOON)
    assert isinstance(stream, DirectStream)
    (connection,) = a._direct._connections  # type: ignore[union-attr]
    for _ in range(3):
        await stream.send(FrameKind.PART, b"header", BODY)
        assert bytes((await stream.receive(SOON)).body) == BODY
    if tcp.PACING_SUPPORTED:
        figures = tcp.info(connection.sock)
        assert figures is not None
        assert figures.delivered_segments * figures.segment_bytes > 3 * len(BODY) * 0.9
    assert a.bytes_sent("/echo/1") == stream.bytes_sent == 3 * (16 + 6 + len(BODY))
    assert seed.traffic.received["/echo/1"] == stream.bytes_sent
    assert a.direct_peers() == {seed.peer_id}
    await stream.close()


async def test_other_protocols_than_bulk_stay_on_libp2p(lab: Lab) -> None:
    seed, a = await two(lab)
    seed.handle("/small/1", echo)
    await seed.ready()
    stream = await a.open(seed.peer_id, "/small/1", SOON)
    assert not isinstance(stream, DirectStream)
    assert not a.direct_peers()
    await stream.close()


@pytest.mark.parametrize("how", ["the other side has none", "we have none"])
async def test_without_a_direct_path_on_both_sides_bulk_uses_libp2p(lab: Lab, how: str) -> None:
    seed = await lab.start("seed", relay_service=True, direct=None if how == "the other side has none" else DIRECT)
    seed.handle("/echo/1", echo)
    await seed.ready()
    a = await lab.start("a", seeds=seed.multiaddrs(), direct=None if how == "we have none" else DIRECT)
    for _ in range(2):
        stream = await a.open(seed.peer_id, "/echo/1", SOON)
        assert not isinstance(stream, DirectStream)
        await works(stream)
    assert not a.direct_peers()


@pytest.mark.parametrize("how", ["refused", "swallowed"])
async def test_a_blocked_port_costs_one_short_wait(lab: Lab, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Behind NAT or a firewall that drops packets: streams use libp2p, and the next one does not wait."""
    monkeypatch.setattr(dialler, "CONNECT_WAIT", timedelta(seconds=1.5))
    monkeypatch.setattr(dialler, "DIAL_TIMEOUT", timedelta(hours=1))
    seed, a = await two(lab)
    assert seed._direct is not None
    filling: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        if how == "swallowed":
            for _ in range(4):  # until the kernel drops what comes
                filling.append(socket.socket())
                filling[-1].setblocking(False)
                filling[-1].connect_ex(deaf.getsockname())
        seed._direct._listener.port = deaf.getsockname()[1]
        if how == "refused":
            deaf.close()
        await works(
            await a.open(seed.peer_id, "/echo/1", timedelta(hours=1))
        )  # waits for half of it, had it no patience
        failures = a._direct._dialler._failures  # type: ignore[union-attr]
        if how == "swallowed":
            assert not failures  # it still dials
            deaf.close()  # so the kernel refuses the next packet
        await eventually(lambda: failures)
        issued = seed.traffic.sent["/atoll/direct/2"]
        await works(await a.open(seed.peer_id, "/echo/1", SOON))
        assert seed.traffic.sent["/atoll/direct/2"] == issued  # not asked again
    for sock in filling:
        sock.close()


async def test_both_paths_count_against_the_same_limits(lab: Lab) -> None:
    async def hold(stream: Stream) -> None:
        await stream.receive(timedelta(seconds=60))

    seed, a = await two(lab)
    seed.handle("/echo/1", hold)
    streams = [await a.open(seed.peer_id, "/echo/1", SOON) for _ in range(MAX_STREAMS_PER_PROTOCOL)]
    with pytest.raises(PeerMisbehaved, match="at most 6 streams of /echo/1"):
        await a.open(seed.peer_id, "/echo/1", SOON)
    for stream in streams:
        stream.abort()


async def test_a_ban_cuts_direct_connections_and_keeps_them_shut(lab: Lab) -> None:
    seed, a = await two(lab)
    stream = await a.open(seed.peer_id, "/echo/1", SOON)
    assert isinstance(stream, DirectStream)
    seed.gate.set_deny_list(DenyList(1, frozenset({a.peer_id})))
    with pytest.raises(Unreachable, match="ended the stream"):
        await stream.receive(SOON)
    await stream.close()
    assert not a.direct_peers()


async def test_after_a_lost_gate_table_a_direct_stream_says_hello_again(lab: Lab) -> None:
    seed, a = await two(lab)
    await works(await a.open(seed.peer_id, "/echo/1", SOON))
    seed.gate.evict(a.peer_id)
    await works(await a.open(seed.peer_id, "/echo/1", SOON))


async def test_the_port_that_was_named_is_taken_or_refused(lab: Lab) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            await lab.start("a", relay_service=True, direct=replace(DIRECT, ports=(port,)))
        fallen_back = await lab.start("b", relay_service=True, direct=replace(DIRECT, ports=(port, 0)))
        assert fallen_back.direct_port not in (None, port)
    named = await lab.start("c", relay_service=True, direct=replace(DIRECT, ports=(port, 0)))
    assert named.direct_port == port


async def test_dead_machines_are_noticed_by_the_kernel(lab: Lab) -> None:
    """Keepalive and the acknowledgement timeout are set on both sides: a pulled cable is only silence."""
    seed, a = await two(lab)
    stream = await a.open(seed.peer_id, "/echo/1", SOON)
    for host in (seed, a):
        (connection,) = host._direct._connections  # type: ignore[union-attr]
        sock = connection.writer.get_extra_info("socket")
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if tcp.PACING_SUPPORTED:
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == tcp.USER_TIMEOUT_MS
    await stream.close()
