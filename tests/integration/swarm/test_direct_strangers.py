"""A direct listener gives nothing to a peer without a ticket; a dialler gives no ticket to a wrong certificate."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from support.direct_pair import SOON, TALK, Pair, direct_pair, shout
from support.eventually import eventually
from support.mutation import Mutator, on_wire

from atoll.core.clock import SystemClock
from atoll.core.frames import PREFIX, Frame, FrameKind
from atoll.node.direct import listener, tls
from atoll.node.direct.dialler import CheckedOffer
from atoll.node.direct.tickets import proof
from atoll.node.wire.transport import Stream
from atoll.v1 import dataplane_pb2 as dp

QUIET_SECONDS = 0.05
END, PART = Frame(FrameKind.END, b""), Frame(FrameKind.PART, b"h", b"body")
BEGIN = Frame(FrameKind.MESSAGE, dp.DirectBegin(protocol=TALK).SerializeToString())
CHILD = """
import socket, ssl, sys, time
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
connection = context.wrap_socket(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
connection.sendall(bytes.fromhex(sys.argv[2]))
connection.recv(16)
print("in", flush=True)
time.sleep(600)
"""


def ticket_frame(pair: Pair, ticket: bytes) -> bytes:
    """Build the frame that `a` shows to `b`."""
    return on_wire(Frame(FrameKind.MESSAGE, proof(ticket, pair.a.peer_id, pair.b.peer_id)))


@asynccontextmanager
async def dialled(pair: Pair) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Open a TLS connection to `b` from an unauthenticated peer."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", pair.b.path.port, ssl=tls.dialling_context(), server_hostname=""
    )
    try:
        yield reader, writer
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def answer_to(pair: Pair, data: bytes) -> bytes:
    """Write `data` to `b` and return all bytes that `b` sends until it closes the connection."""
    async with dialled(pair) as (reader, writer):
        writer.write(data)
        said = b""
        with suppress(ConnectionError):
            async with asyncio.timeout(SOON.total_seconds()):
                while more := await reader.read(1 << 16):
                    said += more
        return said


async def honest_life_goes_on(pair: Pair) -> None:
    stream = await pair.a.talk(pair.b)
    await stream.send(FrameKind.MESSAGE, b"hello")
    assert (await stream.receive(SOON)).header == b"hello"
    await stream.close()


async def test_only_a_fresh_unused_ticket_is_accepted(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        good = (await pair.a.request_offer(pair.b.peer_id)).ticket
        async with dialled(pair) as (reader, writer):  # the raw bytes of an honest dialler
            writer.write(ticket_frame(pair, good) + on_wire(BEGIN))
            assert await asyncio.wait_for(reader.readexactly(PREFIX.size), SOON.total_seconds())
        expired = (await pair.a.request_offer(pair.b.peer_id)).ticket
        for digest, (owner, _) in tuple(pair.b.path._tickets._valid.items()):
            pair.b.path._tickets._valid[digest] = (owner, pair.b.clock.monotonic() - 1)
        for ticket in (good, expired, bytes(32), os.urandom(32), (await pair.b.request_offer(pair.a.peer_id)).ticket):
            assert await answer_to(pair, ticket_frame(pair, ticket) + on_wire(BEGIN)) == b""
        assert pair.b.path.strangers_refused == 5
        await honest_life_goes_on(pair)


async def test_a_ticket_of_a_peer_that_was_banned_meanwhile_is_refused(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        ticket = (await pair.a.request_offer(pair.b.peer_id)).ticket
        pair.b.gate.evict(pair.a.peer_id)
        assert await answer_to(pair, ticket_frame(pair, ticket) + on_wire(BEGIN)) == b""


async def test_a_member_that_forwards_an_offer_gains_no_connection(tmp_path: Path) -> None:
    """Mallory answers `a` with the offer of `b`: the certificate is right, and yet `b` refuses."""
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        honest = pair.a.request_offer

        async def passed_on(peer_id: str, timeout: timedelta) -> CheckedOffer:
            return replace(await honest(peer_id), ticket=pair.b.path._tickets.issue("mallory"))

        pair.a.path._dialler._request_offer = passed_on
        assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None
        assert pair.b.path.strangers_refused == 1
        assert not pair.b.gate._streams


async def test_names_that_a_member_makes_up_are_not_kept(tmp_path: Path) -> None:
    async with direct_pair(tmp_path) as pair:
        for number in range(20):
            good = (await pair.a.request_offer(pair.b.peer_id)).ticket
            begin = Frame(FrameKind.MESSAGE, dp.DirectBegin(protocol=f"/junk/{number}").SerializeToString())
            assert await answer_to(pair, ticket_frame(pair, good) + on_wire(begin)) == b""
        names = {*pair.b.traffic.sent, *pair.b.traffic.received}
        assert not any("junk" in name for name in names)


async def test_a_listener_with_another_certificate_gets_no_ticket(tmp_path: Path) -> None:
    """A man in the middle, or another machine at that private address: TLS completes, and no byte is sent."""
    heard: list[bytes] = []

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            heard.append(await reader.read())
        writer.transport.abort()

    context, _ = tls.listening_context(tmp_path, SystemClock().unix())
    server = await asyncio.start_server(listen, "127.0.0.1", 0, ssl=context)
    port = server.sockets[0].getsockname()[1]
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        honest = pair.a.request_offer

        async def diverted(peer_id: str, timeout: timedelta) -> CheckedOffer:
            return replace(await honest(peer_id), port=port)

        pair.a.path._dialler._request_offer = diverted
        assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None
        pair.a.path._dialler._request_offer = honest
        pair.a.path._dialler._failures.clear()
        await honest_life_goes_on(pair)
    server.close()
    await server.wait_closed()
    assert b"".join(heard) == b""


@pytest.mark.parametrize("how", ["no TLS", "silent", "half a ticket"])
async def test_an_unauthenticated_connection_without_a_proof_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        with monkeypatch.context() as hurried:
            hurried.setattr(listener, "STRANGER_TIMEOUT", timedelta(seconds=1))
            if how == "no TLS":
                reader, writer = await asyncio.open_connection("127.0.0.1", pair.b.path.port)
                with suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), SOON.total_seconds()) == b""
                writer.close()
            else:
                with suppress(ConnectionError, ssl.SSLError):  # where the handshake itself took a second
                    assert await answer_to(pair, b"" if how == "silent" else ticket_frame(pair, bytes(32))[:20]) == b""
            await eventually(lambda: pair.b.path.strangers_refused == 1)
        await honest_life_goes_on(pair)


async def test_a_crowd_of_unauthenticated_connections_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with direct_pair(tmp_path) as pair:
        monkeypatch.setattr(listener, "STRANGER_TIMEOUT", timedelta(hours=1))  # nobody is sent away for its silence
        pair.b.acceptor.handle(TALK, shout)
        most, crowd = listener.MAX_STRANGERS_PER_ADDRESS, 100
        ends = [await asyncio.open_connection("127.0.0.1", pair.b.path.port) for _ in range(crowd)]
        await eventually(lambda: pair.b.path.strangers_refused == crowd - most)
        assert len(pair.b.path._listener._strangers) == most
        for reader, _ in ends[most:]:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), SOON.total_seconds()) == b""
        for _, writer in ends:
            writer.transport.abort()
        await eventually(lambda: not len(pair.b.path._listener._strangers))
        await honest_life_goes_on(pair)


async def test_members_with_tickets_all_get_in_when_they_dial_at_the_same_moment(tmp_path: Path) -> None:
    """A whole swarm dials one member, here from one address; each of them holds a ticket."""
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        members = 2 * listener.MAX_STRANGERS
        for place in range(members):
            pair.b.path._tickets.issue(f"member {place}")
        ends = [await asyncio.open_connection("127.0.0.1", pair.b.path.port) for _ in range(members)]
        await eventually(lambda: len(pair.b.path._listener._strangers) == members)
        assert pair.b.path.strangers_refused == 0
        for _, writer in ends:
            writer.transport.abort()


async def test_a_peer_that_is_killed_is_noticed(tmp_path: Path) -> None:
    """Another process dials with a ticket, begins a stream, and dies."""
    outcome: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def wait(stream: Stream) -> None:
        try:
            await stream.receive(SOON)
        except BaseException as error:
            outcome.set_result(error)
            raise

    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, wait)
        first = ticket_frame(pair, (await pair.a.request_offer(pair.b.peer_id)).ticket) + on_wire(BEGIN)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CHILD, str(pair.b.path.port), first.hex(), stdout=asyncio.subprocess.PIPE
        )
        assert child.stdout is not None
        assert await asyncio.wait_for(child.stdout.readline(), SOON.total_seconds()) == b"in\n"
        child.send_signal(signal.SIGKILL)
        await child.wait()
        assert "ended the stream" in str(await asyncio.wait_for(outcome, SOON.total_seconds()))


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(150, id="short"),
        pytest.param(10_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
async def test_whatever_comes_first(tmp_path: Path, examples: int) -> None:
    """Damaged tickets; and, with a valid one, damaged first frames and what follows them."""
    async with direct_pair(tmp_path) as pair:
        pair.b.acceptor.handle(TALK, shout)
        part = Frame(FrameKind.PART, b"h", b"body")
        good = (await pair.a.request_offer(pair.b.peer_id)).ticket
        async with dialled(pair) as (reader, writer), asyncio.timeout(SOON.total_seconds()):
            writer.write(ticket_frame(pair, good) + on_wire(BEGIN) + on_wire(part, checksum_body=False))
            await reader.readuntil(b"hbody")  # what is damaged below comes as far as this where it is not
        for seed in range(examples):
            mutator = Mutator(seed)
            with_ticket = mutator.rng.random() < 0.7
            good = (await pair.a.request_offer(pair.b.peer_id)).ticket
            ticket = Frame(FrameKind.MESSAGE, proof(good, pair.a.peer_id, pair.b.peer_id))
            data = on_wire(ticket) if with_ticket else mutator.wire(mutator.frame(ticket))
            for _ in range(mutator.rng.choice((0, 1, 1, 3))):
                after = mutator.rng.choice((BEGIN, BEGIN, Frame(FrameKind.END, b""), part))
                message = dp.DirectBegin if after is BEGIN else None
                data += mutator.wire(mutator.frame(after, message), checksum_body=False)
            async with dialled(pair) as (reader, writer):
                with suppress(ConnectionError, ssl.SSLError, TimeoutError):
                    writer.write(data)
                    await writer.drain()
                    async with asyncio.timeout(QUIET_SECONDS):
                        while await reader.read(1 << 16):
                            pass
        async with asyncio.timeout(SOON.total_seconds()):
            while pair.b.gate.open_streams(pair.a.peer_id) or len(pair.b.path._listener._strangers):
                await asyncio.sleep(0.01)
        assert pair.b.acceptor.crashes == 0
        await honest_life_goes_on(pair)


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_a_member_offers(tmp_path: Path, seed: int) -> None:
    """A malformed offer costs a pause without a direct path, and nothing else."""
    async with direct_pair(tmp_path) as pair:
        mutator = Mutator(seed)
        offer = dp.DirectOffer(port=1, certificate_sha256=bytes(32), ticket=bytes(32))

        async def lie(stream: Stream) -> None:
            wrong = mutator.frame(Frame(FrameKind.MESSAGE, offer.SerializeToString()), dp.DirectOffer)
            await stream.send(wrong.kind, wrong.header, wrong.body)
            await stream.receive(SOON)

        pair.b.network.handle("/atoll/direct/2", lie)
        for _ in range(25):
            pair.a.path._dialler._failures.clear()
            assert await pair.a.path.open(pair.b.peer_id, TALK, SOON) is None
        assert not pair.a.path.peers()
