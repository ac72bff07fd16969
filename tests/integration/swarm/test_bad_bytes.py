"""Bad bytes over libp2p, on every protocol of a node: refused with a reason, in time, with little memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import msgpack
import psutil
import pytest
import structlog
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2 as dht
from support.donors import ANN, GENESIS, DonorState, commit, state_of
from support.loopback_hosts import Lab
from support.mutation import Mutator, on_wire

from atoll.core.errors import PeerMisbehaved
from atoll.core.frames import MAX_FRAME_BYTES, PREFIX, Frame, FrameKind
from atoll.core.records import build_address_record, page_keys
from atoll.core.round_id import RoundId
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.exchange.exchange_streams import PROTOCOL as AVERAGE
from atoll.node.rounds import message_bounds
from atoll.node.rounds.member_streams import PROTOCOL as ROUND
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.state_client import PROTOCOL as STATE
from atoll.node.state.state_client import StateClient
from atoll.node.state.state_server import StateServer
from atoll.node.swarm.hello import PROTOCOL as HELLO
from atoll.node.swarm.host import SwarmHost
from atoll.node.swarm.stream_acceptor import MAX_STREAMS_PER_PEER
from atoll.node.swarm.stripes import ASSEMBLE_TIMEOUT, STRIPES
from atoll.node.swarm.stripes import PROTOCOL as STRIPED
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

SOON = timedelta(seconds=60)
QUIET_SECONDS = 0.15  # an answer that has not come by then is not waited for
MEBIBYTE = 1 << 20
LIMIT = 64 * MEBIBYTE
AT_ONCE = 8
CHUNK = bytes(1 << 16)
ATTACKERS_STREAM = 4 * len(CHUNK)  # what asyncio buffers, out and in, at our end of it
STATE_NOW = state_of(1.0)
HEAD = commit(STATE_NOW, 1, [ANN], after=GENESIS)
NUMBER = RoundId("r", 1, 0, 1, 0).to_proto()
KEY = DHTID.generate(source=page_keys("reef")[0]).to_bytes()


class Node:
    """A host with everything that a node serves to its peers."""

    def __init__(self, host: SwarmHost, directory: Path) -> None:
        self.host = host
        self.heard: list[tuple[str, dp.RoundMessage]] = []
        self.links = RoundLinks(host, self._hear)
        self.exchanges = ExchangeServer(host, timedelta(seconds=1))
        holding = DonorState(ManifestStore(directory / "manifests", "r"))
        holding.hold(HEAD, STATE_NOW)
        StateServer(host, "r", holding.store, holding.current)

    async def _hear(self, peer: str, message: dp.RoundMessage) -> None:
        self.heard.append((peer, message))


VALID: dict[str, list[tuple[Frame, type]]] = {
    HELLO: [],
    ROUND: [
        (Frame(FrameKind.MESSAGE, dp.RoundMessage(**{kind: message}).SerializeToString()), dp.RoundMessage)
        for kind, message in (
            ("report", dp.TokenReport(round=NUMBER, tokens=5)),
            ("start", dp.Start(round=NUMBER, contributions=[manifest_pb2.Contribution(peer_id="a", tokens=1)])),
            ("commit", dp.Commit(round=NUMBER, manifest=HEAD.committed)),
        )
    ],
    AVERAGE: [
        (Frame(FrameKind.MESSAGE, dp.ExchangeHeader(round=NUMBER).SerializeToString()), dp.ExchangeHeader),
        (Frame(FrameKind.MESSAGE, dp.ExchangeHeader(round=NUMBER, repair=[1]).SerializeToString()), dp.ExchangeHeader),
        (Frame(FrameKind.PART, dp.PartHeader(elements=9).SerializeToString(), b"x" * 99), dp.PartHeader),
    ],
    STATE: [
        (Frame(FrameKind.MESSAGE, request.SerializeToString()), dp.StateRequest)
        for request in (
            dp.StateRequest(run_id="r", head_manifest=True),
            dp.StateRequest(run_id="r", manifest_round=1),
            dp.StateRequest(run_id="r", anchor=dp.StateSlice(manifest_hash=HEAD.hash, start=0, end=50)),
        )
    ],
    STRIPED: [
        (Frame(FrameKind.MESSAGE, stripe.SerializeToString()), dp.Stripe)
        for stripe in (
            dp.Stripe(conversation=bytes(16), index=1, protocol=AVERAGE),
            dp.Stripe(conversation=bytes(16), index=2, protocol=STATE),
        )
    ],
}


async def write(attacker: SwarmHost, victim: str, seed: int) -> None:
    """Send some frames in some protocol, read what comes back, then close."""
    mutator = Mutator(seed)
    protocol = mutator.rng.choice(list(VALID))
    valid = VALID[protocol] or [(Frame(FrameKind.MESSAGE, attacker.gate.hello().SerializeToString()), dp.Hello)]
    reader, writer = await attacker._p2p.open_socket(victim, protocol, SOON)
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        if protocol not in (HELLO, STRIPED):
            await asyncio.wait_for(reader.readexactly(PREFIX.size), SOON.total_seconds())
        for _ in range(mutator.rng.choice((1, 2, 5))):
            frame, message = mutator.rng.choice(valid)
            writer.write(mutator.wire(mutator.frame(frame, message)))
            await writer.drain()
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(), QUIET_SECONDS)
    writer.transport.abort()


async def call(attacker: SwarmHost, record: bytes, expires: float, victim: str, seed: int) -> None:
    """Call the DHT with a malformed message."""
    mutator = Mutator(seed)
    dictionary = msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([None, expires, [["a", b"b", expires]]])))
    name, message = mutator.rng.choice(
        [
            ("rpc_ping", dht.PingRequest(validate=True)),
            ("rpc_find", dht.FindRequest(keys=[KEY])),
            ("rpc_store", store(attacker.peer_id, record, expires)),
            ("rpc_store", store(attacker.peer_id, record, expires, subkeys=[b""], values=[mutator.bytes(dictionary)])),
        ]
    )
    with suppress(Exception):  # what a caller is told is libp2p's to phrase
        await asyncio.wait_for(
            attacker._p2p.control.call_unary_handler(
                PeerID.from_base58(victim), f"DHTProtocol.{name}", mutator.message(message)
            ),
            SOON.total_seconds(),
        )


def store(owner: str, record: bytes, expires: float, **changes: object) -> dht.StoreRequest:
    fields: dict[str, object] = {
        "keys": [KEY],
        "subkeys": [msgpack.packb(owner)],
        "values": [msgpack.packb(record)],
        "expiration_time": [expires],
        "in_cache": [False],
    }
    return dht.StoreRequest(**(fields | changes))


@contextmanager
def little_memory(what: str, beside: int = 0) -> Iterator[None]:
    """Assert that the peak memory of this process stays below the limit, plus `beside` for the attacker's buffers."""
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    yield
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    assert peak - before <= LIMIT + beside, f"{what}: {(peak - before) / MEBIBYTE:.0f} MiB"


async def nobody_hears(peer: str, message: dp.RoundMessage) -> None:
    pass


async def honest_life_goes_on(lab: Lab, node: Node, name: str) -> None:
    honest = await lab.start(name, seeds=node.host.multiaddrs())
    conversation = await StateClient.connect(honest, node.host.peer_id, "r", SOON)
    assert (await conversation.manifest(None)).hash == HEAD.hash
    await conversation.close()
    links = RoundLinks(honest, nobody_hears)
    word = dp.RoundMessage(report=dp.TokenReport(round=NUMBER, tokens=77))
    links.send(node.host.peer_id, word)
    async with asyncio.timeout(SOON.total_seconds()):
        while (honest.peer_id, word) not in node.heard:
            await asyncio.sleep(0.01)
    await links.close()
    await honest.publish_address(timedelta(minutes=5))
    assert (await node.host.lookup_addresses())[honest.peer_id] == honest.multiaddrs()


@pytest.mark.parametrize(
    "examples",
    [
        pytest.param(400, id="short"),
        pytest.param(10_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
async def test_whatever_bytes_a_member_writes(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: int
) -> None:
    monkeypatch.setattr(message_bounds, "LONGEST_PAUSE_SECONDS", 1.0)  # all streams are read soon
    node = Node(await lab.start("victim", relay_service=True), tmp_path)
    await node.host.ready()
    attacker = await lab.start("attacker", seeds=node.host.multiaddrs())
    victim, expires = node.host.peer_id, time.time() + 300
    identity, certificate = lab.identity("attacker"), lab.certificate("attacker")
    record = build_address_record(identity, certificate, "reef", expires, attacker.multiaddrs())
    await asyncio.gather(*(write(attacker, victim, seed) for seed in range(AT_ONCE)))  # what is loaded lazily
    with structlog.testing.capture_logs() as logs, little_memory("all of it"):
        for start in range(0, examples, AT_ONCE):
            seeds = range(start, start + AT_ONCE)
            await asyncio.gather(*(write(attacker, victim, seed) for seed in seeds))
            await call(attacker, record, expires, victim, start)
    assert node.host.handler_crashes == 0
    refused = [line for line in logs if line["event"] in ("refused", "stream refused", "handler crashed")]
    assert len(refused) > examples / 10
    assert {line["peer"] for line in refused} == {attacker.peer_id}
    assert {peer for peer, _ in node.heard} <= {attacker.peer_id}
    wait = ASSEMBLE_TIMEOUT + SOON  # a stream that says it is one of four waits for the others
    async with asyncio.timeout(wait.total_seconds()):
        while any(stream.protocol != HELLO for stream in node.host.gate._streams.get(attacker.peer_id, ())):  # type: ignore[attr-defined]
            await asyncio.sleep(0.05)
    await honest_life_goes_on(lab, node, "honest")


def tiny_entries(size: int) -> bytes:
    """Entries without content: two bytes each here, many more once they are parsed."""
    inner = b"\x12\x00" * (size // 2)  # Start.contributions
    return b"\x22" + _length(len(inner)) + inner  # RoundMessage.start


def _length(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes(made) + bytes([number])


async def test_the_memory_that_one_member_can_use_is_bounded(lab: Lab, tmp_path: Path) -> None:
    """Send the largest frames that pass, made of the smallest items, on as many streams as allowed."""
    node = Node(await lab.start("victim", relay_service=True), tmp_path)
    await node.host.ready()
    attacker = await lab.start("attacker", seeds=node.host.multiaddrs())
    victim, peer = node.host.peer_id, PeerID.from_base58(node.host.peer_id)
    await write(attacker, victim, 0)
    numbers = b"\x0a\x00\x12" + _length(MAX_FRAME_BYTES - 100) + bytes(MAX_FRAME_BYTES - 100)  # ExchangeHeader.repair
    worst = [
        (ROUND, Frame(FrameKind.MESSAGE, tiny_entries((1 << 20) - 64))),
        (AVERAGE, Frame(FrameKind.MESSAGE, numbers)),
        (AVERAGE, Frame(FrameKind.MESSAGE, b"\x0a\x00" * (MAX_FRAME_BYTES // 2))),
        (STATE, Frame(FrameKind.MESSAGE, b"\x0a\x00" * (1 << 14))),
    ]
    for protocol, frame in worst:
        data = on_wire(frame)
        with little_memory(protocol):
            reader, writer = await attacker._p2p.open_socket(victim, protocol, SOON)
            await asyncio.wait_for(reader.readexactly(PREFIX.size), SOON.total_seconds())
            writer.write(data)
            with suppress(TimeoutError, ConnectionError):
                await asyncio.wait_for(reader.read(), 1.0)
            writer.transport.abort()
    for request in (b"\x0a\x00" * (3 * MEBIBYTE // 2), b"\x12\x00" * (3 * MEBIBYTE // 2)):
        for name in ("rpc_store", "rpc_find"):
            with little_memory(name), suppress(Exception):
                await asyncio.wait_for(
                    attacker._p2p.control.call_unary_handler(peer, f"DHTProtocol.{name}", request),
                    SOON.total_seconds(),
                )
    streams = MAX_STREAMS_PER_PEER + 4
    with little_memory("unfinished frames", beside=streams * ATTACKERS_STREAM):
        await asyncio.gather(*(leave_unfinished(attacker, victim) for _ in range(streams)))
    both = 2 * streams * ATTACKERS_STREAM  # of the stream that is several, and of those
    with little_memory("unfinished frames over several streams", beside=both):
        await asyncio.gather(
            *(leave_unfinished(attacker, victim, several=True) for _ in range(MAX_STREAMS_PER_PEER // STRIPES))
        )
    assert node.host.handler_crashes == 0
    await honest_life_goes_on(lab, node, "honest")


async def leave_unfinished(attacker: SwarmHost, victim: str, *, several: bool = False) -> None:
    """Announce the largest frame, send as much of it as is taken except its last byte, and wait."""
    if several:
        try:
            stream = await attacker._open_over_libp2p(victim, AVERAGE, SOON)
        except PeerMisbehaved:  # it has as many as there may be
            return
        reader, writer = stream._reader, stream._writer
    else:
        reader, writer = await attacker._p2p.open_socket(victim, AVERAGE, SOON)
    writer.transport.set_write_buffer_limits(high=1 << 16)
    with suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError):
        async with asyncio.timeout(3.0):
            writer.write(PREFIX.pack(b"AT", 1, FrameKind.PART, 0, MAX_FRAME_BYTES, 0))
            for _ in range(MAX_FRAME_BYTES // len(CHUNK) - 1):
                writer.write(CHUNK)
                await writer.drain()
            while True:
                await reader.readexactly(1)
    writer.transport.abort()
