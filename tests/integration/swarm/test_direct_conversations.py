"""Streams on direct connections: one after another on a clean connection, else on a new one."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from support.direct_pair import SOON, TALK, direct_pair, shout

from atoll.core.errors import (
    AtollError,
    Banned,
    DeadlineExceeded,
    FrameInvalid,
    PeerMisbehaved,
    PortInUse,
    RoundAbandoned,
    Unreachable,
)
from atoll.core.frames import PREFIX, FrameKind, pack_prefix
from atoll.core.membership import DenyList
from atoll.node.direct import dialler, listener, tcp
from atoll.node.direct.dialler import CheckedOffer
from atoll.node.direct.stream import DirectStream
from atoll.node.swarm.stream_acceptor import MAX_STREAMS_PER_PROTOCOL, StreamAcceptor
from atoll.node.wire import streams
from atoll.node.wire.streams import SocketStream
from atoll.node.wire.transport import Stream

BODY = bytes(range(256)) * 4096


async def echoes(stream: DirectStream, body: bytes = b"x") -> bool:
    await stream.send(FrameKind.PART, b"h", body)
    frame = await stream.receive(SOON)
    return (frame.kind, frame.header, bytes(frame.body)) == (FrameKind.PART, b"h", body)


async def test_one_connection_serves_one_stream_after_another(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        for _ in range(20):
            stream = await pair.a.talk(pair.b)
            assert await echoes(stream, BODY)
            await stream.close()
            await pair.settled()
        assert pair.a.offers_requested == 1
        assert pair.a.path.peers() == {pair.b.peer_id}
        expected = 20 * (PREFIX.size + 1 + len(BODY) + PREFIX.size)  # a part and an end each
        assert pair.a.traffic.sent[TALK] == expected
        assert pair.b.traffic.received[TALK] == expected


async def test_concurrent_streams_have_their_own_connections_up_to_a_bound(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        most = dialler.MAX_CONNECTIONS_PER_PEER
        streams = await asyncio.gather(*(pair.a.talk(pair.b) for _ in range(most)))
        assert all(await asyncio.gather(*(echoes(stream, BODY) for stream in streams)))
        assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None  # by libp2p then
        for stream in streams:
            await stream.close()
        await pair.settled()
        assert await echoes(await pair.a.talk(pair.b))
        assert pair.a.offers_requested == most


async def test_the_serving_side_may_end_first(tmp_path: Path) -> None:
    async def once(stream: Stream) -> None:
        await stream.send(FrameKind.MESSAGE, b"that is all")

    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, once)
        for _ in range(3):
            stream = await pair.a.talk(pair.b)
            assert (await stream.receive(SOON)).header == b"that is all"
            with pytest.raises(Unreachable, match="ended the stream"):
                await stream.receive(SOON)
            with pytest.raises(Unreachable):
                await stream.send(FrameKind.MESSAGE, b"too late")
            await stream.close()
            await pair.settled()
        assert pair.a.offers_requested == 1


async def test_a_refusal_is_raised_by_its_class_and_costs_no_connection(tmp_path: Path) -> None:
    async def refuse(stream: Stream) -> None:
        await stream.receive(SOON)
        raise RoundAbandoned("not this one")

    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, refuse)
        for _ in range(3):
            stream = await pair.a.talk(pair.b)
            await stream.send(FrameKind.MESSAGE, b"please")
            with pytest.raises(RoundAbandoned, match="not this one"):
                await stream.receive(SOON)
            await pair.settled()
        assert pair.a.offers_requested == 1


class Doorkeeper:
    """Accepts streams only while `awake`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.awake = asyncio.Event()
        self.awake.set()
        admit_and_serve = StreamAcceptor.admit_and_serve

        async def late(asked: StreamAcceptor, stream: SocketStream) -> None:
            await self.awake.wait()
            await admit_and_serve(asked, stream)

        monkeypatch.setattr(StreamAcceptor, "admit_and_serve", late)


async def test_on_a_proved_connection_a_stream_sends_before_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Doorkeeper(monkeypatch)
    async with direct_pair(tmp_path, optimistic={TALK}) as pair:
        pair.b.acceptor.handle(TALK, shout)
        for _ in range(3):
            stream = await pair.a.talk(pair.b)
            await stream.send(FrameKind.PART, b"h", BODY)
            keeper.awake.set()
            assert bytes((await stream.receive(SOON)).body) == BODY
            assert await echoes(stream)
            await stream.close()
            await pair.settled()
            keeper.awake.clear()
        assert pair.a.offers_requested == 1
        with monkeypatch.context() as later:
            later.setattr(dialler, "OPTIMISTIC_WITHIN", timedelta(0))  # it was long ago
            opening = asyncio.create_task(pair.a.talk(pair.b))
            assert not (await asyncio.wait({opening}, timeout=0.3))[0]
            keeper.awake.set()
            assert await echoes(await opening)


async def test_a_dialler_that_is_refused_after_it_began_to_send_hears_why_and_keeps_the_connection(
    tmp_path: Path,
) -> None:
    async with direct_pair(tmp_path, optimistic={TALK}) as pair:
        pair.b.acceptor.handle(TALK, shout)
        slots, key = pair.b.acceptor._active_streams, (pair.a.peer_id, TALK)
        for body in (b"", BODY):
            stream = await pair.a.talk(pair.b)
            assert await echoes(stream)
            await stream.close()
            await pair.settled()
            for _ in range(MAX_STREAMS_PER_PROTOCOL):
                slots.take(key, "streams")
            refused = await pair.a.talk(pair.b)
            with suppress(Unreachable):  # it may hear so early
                await refused.send(FrameKind.PART, b"", body)
            with pytest.raises(PeerMisbehaved, match="at most"):
                await refused.receive(SOON)
            await refused.close()
            for _ in range(MAX_STREAMS_PER_PROTOCOL):
                slots.release(key)
            await pair.settled()
        assert await echoes(await pair.a.talk(pair.b))


async def test_after_an_unanswered_stream_the_next_one_uses_libp2p(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Doorkeeper(monkeypatch)
    async with direct_pair(tmp_path, optimistic={TALK}) as pair:
        pair.b.acceptor.handle(TALK, shout)
        warm = await asyncio.gather(*(pair.a.talk(pair.b) for _ in range(3)))
        for stream in warm:
            assert await echoes(stream)
            await stream.close()
        await pair.settled()
        keeper.awake.clear()
        silent = await pair.a.talk(pair.b)
        with pytest.raises(DeadlineExceeded):
            await silent.receive(timedelta(seconds=0.2))
        await silent.close()
        assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None
        assert not any(one.is_open for made in pair.a.path._dialler._connections_by_peer.values() for one in made)
        keeper.awake.set()


async def test_a_late_accept_does_not_count_as_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exchanges wait in slices, so that a machine that slept does not drop all its peers."""
    keeper = Doorkeeper(monkeypatch)
    async with direct_pair(tmp_path, optimistic={TALK}) as pair:
        pair.b.acceptor.handle(TALK, shout)
        first = await pair.a.talk(pair.b)
        assert await echoes(first)
        await first.close()
        await pair.settled()
        keeper.awake.clear()
        stream = await pair.a.talk(pair.b)
        with pytest.raises(DeadlineExceeded):
            await stream.receive(timedelta(seconds=0.2))
        keeper.awake.set()
        assert await echoes(stream)
        await stream.close()
        await pair.settled()
        assert await echoes(await pair.a.talk(pair.b))
        assert pair.a.offers_requested == 1


async def test_a_stream_that_ends_before_it_is_accepted_costs_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Doorkeeper(monkeypatch)
    async with direct_pair(tmp_path, optimistic={TALK}) as pair:
        pair.b.acceptor.handle(TALK, shout)
        for _ in range(3):
            keeper.awake.set()
            stream = await pair.a.talk(pair.b)
            assert await echoes(stream)
            await stream.close()
            await pair.settled()
            keeper.awake.clear()
            early = await pair.a.talk(pair.b)
            await early.close()
            keeper.awake.set()
            await pair.settled()
        assert pair.a.offers_requested == 1


@pytest.mark.parametrize("how", ["abort", "half a frame read", "unread frames", "reader waiting", "sender interrupted"])
async def test_an_unclean_end_costs_the_connection(tmp_path: Path, how: str) -> None:
    ended = asyncio.Event()

    async def serve(stream: Stream) -> None:
        try:
            await shout(stream)
        finally:
            ended.set()

    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, serve)
        stream = await pair.a.talk(pair.b)
        waiting: asyncio.Task[object] | None = None
        if how == "half a frame read":
            await stream.send(FrameKind.PART, b"", bytes(4 << 20))
            pair.a.traffic.down.set_rate(1e6)
            pair.a.traffic.down.slot_start(10**8, small=False)  # the limit lets the prefix pass and nothing after it
            while stream._prefix is None:
                with pytest.raises(DeadlineExceeded):
                    await stream.receive(timedelta(seconds=1))
            pair.a.traffic.down.set_rate(0)
        elif how == "unread frames":
            await stream.send(FrameKind.MESSAGE, b"an answer comes and nobody reads it")
        elif how == "reader waiting":
            waiting = asyncio.create_task(stream.receive(SOON))
            await asyncio.sleep(0)
        elif how == "sender interrupted":
            waiting = asyncio.create_task(_send_forever(stream))
            async with asyncio.timeout(SOON.total_seconds()):
                while not stream._sending.locked():
                    await asyncio.sleep(0)
        if how == "abort":
            stream.abort()
        else:
            await stream.close()
        if waiting is not None:
            with pytest.raises(Unreachable):
                await waiting
        await asyncio.wait_for(ended.wait(), SOON.total_seconds())
        await pair.settled()
        assert await echoes(await pair.a.talk(pair.b), BODY)
        assert pair.a.offers_requested == 2


async def _send_forever(stream: DirectStream) -> None:
    while True:
        await stream.send(FrameKind.PART, b"", bytes(8 << 20))


async def test_a_frame_after_the_end_closes_the_connection(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        stream = await pair.a.talk(pair.b)
        stream._writer.write(pack_prefix(FrameKind.END, b"") + pack_prefix(FrameKind.PART, b"x") + b"x")
        await stream._writer.drain()
        with pytest.raises(Unreachable):
            await stream.receive(SOON)
        await stream.close()
        async with asyncio.timeout(SOON.total_seconds()):
            while pair.b.gate.open_streams(pair.a.peer_id):
                await asyncio.sleep(0.005)


async def test_a_flipped_bit_ends_the_connection(tmp_path: Path) -> None:
    """Frame checksums leave out bodies here, because TLS protects them."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flips: bool) -> None:
        came = 0
        with suppress(OSError):
            while data := bytearray(await reader.read(1 << 16)):
                if flips and came < len(BODY) // 2 <= came + len(data):
                    data[-1] ^= 1
                came += len(data)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()

    async with direct_pair(tmp_path) as pair, asyncio.TaskGroup() as relays:
        damages = False
        offer = await pair.a.request_offer(pair.b.peer_id)

        async def lead_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection("127.0.0.1", offer.port)
            relays.create_task(relay(reader, there[1], damages))
            relays.create_task(relay(there[0], writer, False))

        between = await asyncio.start_server(lead_on, "127.0.0.1")

        async def way_past(peer_id: str, timeout: timedelta) -> CheckedOffer:
            return replace(await pair.a.request_offer(peer_id, timeout), port=between.sockets[0].getsockname()[1])

        pair.a.path._dialler._request_offer = way_past
        pair.b.acceptor.handle(TALK, shout)
        assert await echoes(await pair.a.talk(pair.b), BODY)
        damages = True
        stream = await pair.a.talk(pair.b)
        with suppress(Unreachable):  # of the send: the connection may be gone before it has all
            await stream.send(FrameKind.PART, b"h", BODY)
        with pytest.raises(Unreachable):
            await stream.receive(SOON)
        assert pair.a.offers_requested == 1 + 2  # each stream has its own connection, and this one a damaging relay
        await stream.close()
        await pair.a.close()  # so that the relays end
        between.close()


async def test_a_header_that_is_damaged_before_tls_is_found(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        faults: list[AtollError] = []

        async def listen(stream: Stream) -> None:
            assert bytes((await stream.receive(SOON)).body) == b"body"
            try:
                await stream.receive(SOON)
            except AtollError as error:
                faults.append(error)
                raise

        pair.b.acceptor.handle(TALK, listen)
        stream = await pair.a.talk(pair.b)
        stream._writer.write(pack_prefix(FrameKind.PART, b"head", b"body", checksum_body=False) + b"headbody")
        stream._writer.write(pack_prefix(FrameKind.PART, b"head", b"body", checksum_body=False) + b"heaDbody")
        with suppress(Unreachable, FrameInvalid):
            await stream.receive(SOON)
        assert [type(error) for error in faults] == [FrameInvalid]
        await stream.close()


async def test_a_ban_closes_streams_in_progress_and_idle_connections(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        first, second = await pair.a.talk(pair.b), await pair.a.talk(pair.b)
        assert all([await echoes(stream) for stream in (first, second)])
        await first.close()
        assert pair.b.gate.open_streams(pair.a.peer_id) >= 2
        pair.b.gate.set_deny_list(DenyList(1, frozenset({pair.a.peer_id})))
        with pytest.raises(Unreachable, match="ended the stream"):
            await second.receive(SOON)
        await second.close()
        async with asyncio.timeout(SOON.total_seconds()):
            while pair.a.path.peers() or pair.b.gate.open_streams(pair.a.peer_id):
                await asyncio.sleep(0.005)
        assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None


async def test_an_eviction_by_the_dialler_cuts_too(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        stream = await pair.a.talk(pair.b)
        pair.a.gate.set_deny_list(DenyList(1, frozenset({pair.b.peer_id})))
        with pytest.raises(Banned):
            await stream.receive(SOON)
        await stream.close()
        assert not pair.a.gate.open_streams(pair.b.peer_id)


async def test_the_limits_of_the_acceptor_hold(tmp_path: Path) -> None:
    """Frames above a protocol's cap, unserved protocols, too many streams."""

    async def never(stream: Stream) -> None:
        await stream.receive(SOON)
        raise AssertionError("no frame is small enough")

    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle("/atoll/state/1", never)
        stream = await pair.a.talk(pair.b, "/atoll/state/1")
        await stream.send(FrameKind.MESSAGE, bytes(1 << 17))
        with pytest.raises(FrameInvalid, match="the limit is 65536"):
            await stream.receive(SOON)
        with pytest.raises(Unreachable, match="not served"):
            await pair.a.path.open(pair.b.peer_id, TALK, SOON)
        assert pair.b.acceptor.refused["Unreachable"] >= 1
        pair.b.acceptor.handle(TALK, shout)
        for _ in range(6):
            pair.b.acceptor._active_streams.take((pair.a.peer_id, TALK), "streams")
        with pytest.raises(PeerMisbehaved, match="at most 6 streams"):
            await pair.a.path.open(pair.b.peer_id, TALK, SOON)
        assert pair.b.acceptor.crashes == 0


async def test_connections_beyond_the_limit_of_a_peer_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MAX_CONNECTIONS_PER_PEER", 2)
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        first, second = await pair.a.talk(pair.b), await pair.a.talk(pair.b)
        assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None
        assert all([await echoes(stream) for stream in (first, second)])
        await first.close()
        await second.close()


async def test_idle_connections_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialler, "IDLE_TIMEOUT", timedelta(seconds=1))
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        stream = await pair.a.talk(pair.b)
        await stream.close()
        async with asyncio.timeout(SOON.total_seconds()):
            while pair.a.path.peers() or pair.b.gate.open_streams(pair.a.peer_id):
                await asyncio.sleep(0.005)
        assert await echoes(await pair.a.talk(pair.b))


async def test_an_idle_connection_that_the_peer_lost_is_replaced(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        stream = await pair.a.talk(pair.b)
        await stream.close()
        await pair.settled()
        for connection in tuple(pair.b.path._connections):  # what the kernel does for a process that was killed
            connection.abort()
        assert await echoes(await pair.a.talk(pair.b))
        assert pair.a.offers_requested == 2


async def test_a_refusal_costs_no_connection(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        for _ in range(5):
            with pytest.raises(Unreachable, match="not served"):
                await pair.a.path.open(pair.b.peer_id, "/atoll/state/1", SOON)
            await pair.settled()
        assert pair.a.offers_requested == 1


async def test_after_a_stream_broke_libp2p_is_used_for_a_while(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        kept, broken = await pair.a.talk(pair.b), await pair.a.talk(pair.b)
        await kept.close()
        for connection in tuple(pair.b.path._connections):
            connection.abort()
        with pytest.raises(Unreachable):
            await broken.receive(SOON)
        await broken.close()
        assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None
        count, _ = pair.a.path._dialler._failures[pair.b.peer_id]
        pair.a.path._dialler._failures[pair.b.peer_id] = (count, 0.0)  # that while is over
        stream = await pair.a.talk(pair.b)
        assert pair.b.peer_id in pair.a.path._dialler._failures  # being let in is not enough
        assert await echoes(stream)
        await stream.close()
        await pair.settled()
        assert not pair.a.path._dialler._failures


async def test_a_slow_peer_is_not_taken_for_a_silent_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that filled while the link was fast drain slowly; the peer takes data all the time."""
    monkeypatch.setattr(streams, "STALL_TIMEOUT", timedelta(seconds=0.5))
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        stream = await pair.a.talk(pair.b)
        for _ in range(8):
            assert await echoes(stream, BODY)
        (connection,) = pair.a.path._dialler._connections_by_peer[pair.b.peer_id]
        tcp.set_pacing_rate(connection.sock, 150_000.0)
        assert await echoes(stream, BODY[:600_000])
        await stream.close()


async def test_a_closed_path_dials_no_peer(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        await (await pair.a.talk(pair.b)).close()
        await pair.a.path.close()
        assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None
        assert pair.a.offers_requested == 1


async def test_a_port_that_is_taken_is_not_remembered() -> None:
    made = listener.Listener(*([None] * 6))  # type: ignore[arg-type]
    with pytest.raises(PortInUse):
        made.listen(("127.0.0.1", "192.0.2.1"), 0)  # the second is not ours
    assert made.port == 0
