"""Attacks that succeed against bare hivemind (shown where that is quick) and fail at the gate."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any

import pytest
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, PeerID
from hivemind.proto import dht_pb2 as dht
from hivemind.utils import MSGPackSerializer
from support.certificates import certificate_of
from support.loopback_hosts import Lab

from atoll.core.errors import PeerMisbehaved, Rejected
from atoll.core.frames import FrameKind, unpack_prefix
from atoll.core.identity import Identity
from atoll.core.records import build_address_record, page_key, page_keys
from atoll.node.swarm.host import SwarmHost
from atoll.node.wire.gate import Gate
from atoll.node.wire.transport import Stream

SOON = timedelta(seconds=60)
ADDRESSES = ("/ip4/192.0.2.9/tcp/9",)
PROTOCOL = "/atoll/state/1"
BOMB = """
import msgpack
from hivemind.utils import MSGPackSerializer
value = msgpack.packb([])
for _ in range({levels}):
    value = msgpack.packb(msgpack.ExtType(0x40, b"\\x91" + value))
{action}
"""


async def bare() -> P2P:
    return await P2P.create(nat_port_map=False, auto_nat=False)


@pytest.fixture
async def outsider() -> AsyncIterator[P2P]:
    p2p = await bare()
    yield p2p
    await p2p.shutdown()


async def pair(lab: Lab) -> tuple[SwarmHost, SwarmHost]:
    """A victim, and an attacker that is a member: a certificate does not prove honesty."""
    victim = await lab.start("victim", relay_service=True)
    return victim, await lab.start("attacker", seeds=victim.multiaddrs())


def bare_stub(p2p: P2P, peer: PeerID) -> Any:
    """The DHT's calls as hivemind makes them, without a node around them."""
    return super(DHTProtocol, DHTProtocol).get_stub(p2p, peer)


def rpc(host: SwarmHost) -> Any:
    """The attacker's DHT, without the checks that honest senders run."""
    return host._directory._joined_node().protocol


async def test_an_outsider_downloads_no_state(lab: Lab, outsider: P2P) -> None:
    served: list[str] = []

    async def weights(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"weights")
        writer.close()

    async def our_weights(stream: Stream) -> None:
        served.append(stream.peer_id)
        await stream.send(FrameKind.BODY, b"", b"weights")

    naive = await bare()
    await naive.add_binary_stream_handler(PROTOCOL, weights)
    victim = await lab.start("victim", relay_service=True)
    victim.handle(PROTOCOL, our_weights)
    await victim.ready()
    try:
        await outsider._client.connect(naive.peer_id, naive._visible_maddrs)
        await outsider._client.connect(PeerID.from_base58(victim.peer_id), victim._p2p._visible_maddrs)
        _, reader, writer = await outsider.call_binary_stream_handler(naive.peer_id, PROTOCOL)
        assert await reader.read() == b"weights"
        writer.close()
        _, reader, writer = await outsider.call_binary_stream_handler(PeerID.from_base58(victim.peer_id), PROTOCOL)
        answer = await asyncio.wait_for(reader.read(), SOON.total_seconds())
        writer.close()
        assert unpack_prefix(answer[:16]).kind is FrameKind.REFUSAL
        assert b"HelloRequired" in answer
        assert not served
        ping = bare_stub(outsider, PeerID.from_base58(victim.peer_id)).rpc_ping(dht.PingRequest(), timeout=60)
        with pytest.raises(Exception, match="HelloRequired"):
            await ping
    finally:
        await naive.shutdown()


async def test_a_foreign_certificate_opens_nothing(lab: Lab) -> None:
    victim = await lab.start("victim", relay_service=True)
    other_swarm = Lab(lab.directory)
    with pytest.raises(Rejected, match="not from this run's operator"):
        await other_swarm.start("stranger", seeds=victim.multiaddrs(), membership=None, authority=other_swarm.authority)
    assert not victim.gate.is_admitted(other_swarm.identity("stranger").peer_id)


def test_nested_msgpack_kills_bare_hivemind() -> None:
    kill = BOMB.format(levels=200, action="MSGPackSerializer.loads(value)")
    victim = subprocess.run([sys.executable, "-c", kill], capture_output=True, timeout=120, check=False)
    assert victim.returncode == -signal.SIGSEGV


async def test_nested_msgpack_is_refused(lab: Lab) -> None:
    victim, attacker = await pair(lab)
    built: dict[str, bytes] = {}
    exec(BOMB.format(levels=200, action="built['bomb'] = value"), {"built": built})
    key = DHTID.generate(source=page_keys("reef")[0]).to_bytes()
    for subkey in (b"", MSGPackSerializer.dumps(attacker.peer_id), built["bomb"]):
        request = dht.StoreRequest(
            keys=[key],
            subkeys=[subkey],
            values=[built["bomb"]],
            expiration_time=[time.time() + 60],
            in_cache=[False],
        )
        with pytest.raises(Exception, match=PeerMisbehaved.__name__):
            await attacker._p2p.control.call_unary_handler(
                PeerID.from_base58(victim.peer_id), "DHTProtocol.rpc_store", request.SerializeToString()
            )
    assert await rpc(attacker).call_ping(PeerID.from_base58(victim.peer_id)) is not None


async def test_records_of_others_and_endless_ones_are_stored_by_bare_hivemind_only(lab: Lab) -> None:
    naive, thief = await bare(), await bare()
    first = await DHTNode.create(p2p=naive)
    name = page_key("reef", lab.identity("attacker").peer_id)
    key = DHTID.generate(source=name)
    await thief._client.connect(naive.peer_id, naive._visible_maddrs)
    stub = bare_stub(thief, naive.peer_id)
    theft = dht.StoreRequest(
        keys=[key.to_bytes()],
        subkeys=[MSGPackSerializer.dumps("owner")],
        values=[MSGPackSerializer.dumps(b"mine now")],
        expiration_time=[1e300],
        in_cache=[False],
    )
    assert (await stub.rpc_store(theft, timeout=60)).store_ok == [True]
    assert not await first.store(name, b"the owner's", time.time() + 60, subkey="owner")
    await first.shutdown()
    await naive.shutdown()
    await thief.shutdown()

    victim, attacker = await pair(lab)
    identity, certificate, expires = lab.identity("attacker"), lab.certificate("attacker"), time.time() + 60
    record = build_address_record(identity, certificate, "reef", expires, ADDRESSES)

    async def store(subkey: str, value: bytes, until: float) -> list[bool] | None:
        peer, values = PeerID.from_base58(victim.peer_id), [MSGPackSerializer.dumps(value)]
        stored: list[bool] | None = await rpc(attacker).call_store(peer, [key], values, until, subkeys=[subkey])
        return stored

    assert await store(victim.peer_id, record, expires) == [False]
    others = [DHTID.generate(source=page) for page in page_keys("reef") if page != name]
    peer, values = PeerID.from_base58(victim.peer_id), [MSGPackSerializer.dumps(record)]
    assert await rpc(attacker).call_store(peer, others[:1], values, expires, subkeys=[attacker.peer_id]) == [False]
    assert await store(attacker.peer_id, record, 1e300) is None
    assert await store(attacker.peer_id, record, expires) == [True]
    assert await victim.lookup_addresses() == {attacker.peer_id: ADDRESSES}


async def test_a_record_with_a_self_signed_certificate_is_refused(lab: Lab) -> None:
    victim, attacker = await pair(lab)
    identity, expires = lab.identity("attacker"), time.time() + 60
    certificate = certificate_of(identity, Identity.generate(), time.time())
    record = build_address_record(identity, certificate, "reef", expires, ADDRESSES)
    key = DHTID.generate(source=page_key("reef", attacker.peer_id))
    stored = await rpc(attacker).call_store(
        PeerID.from_base58(victim.peer_id),
        [key],
        [MSGPackSerializer.dumps(record)],
        expires,
        subkeys=[attacker.peer_id],
    )
    assert stored == [False]
    assert await victim.lookup_addresses() == {}


async def test_a_header_of_2_to_the_40_bytes_ends_the_stream(lab: Lab) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data((2**40).to_bytes(8, "big") + bytes(1 << 20))
    waiting = asyncio.create_task(P2P.receive_raw_data(reader))
    await asyncio.sleep(0)
    assert not waiting.done()  # bare hivemind waits for a terabyte
    waiting.cancel()

    victim, attacker = await pair(lab)
    outcome: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    async def handler(stream: Stream) -> None:
        try:
            await stream.receive(SOON)
        except PeerMisbehaved as error:
            outcome.set_result(error)
            raise

    victim.handle(PROTOCOL, handler)
    await victim.ready()
    stream = await attacker.open(victim.peer_id, PROTOCOL, SOON)
    stream._writer.write((2**40).to_bytes(8, "big") + bytes(64))
    with pytest.raises(PeerMisbehaved):
        await stream.receive(SOON)
    assert "atoll frames" in str(await outcome)
    await stream.close()


async def test_a_fake_peer_id_in_a_certificate_is_refused(lab: Lab) -> None:
    victim, attacker = await pair(lab)
    impostor = Gate(attacker.gate._authority, lab.certificate("victim"), victim.peer_id, attacker.gate.deny, lab.clock)
    attacker.gate.hello = impostor.hello  # type: ignore[method-assign]
    with pytest.raises(Rejected, match="sent the membership certificate of"):
        await attacker._p2p.introductions.say_hello(victim.peer_id)


async def test_one_bad_entry_does_not_hide_the_others(lab: Lab) -> None:
    victim, liar = await pair(lab)
    third = await lab.start("third", seeds=victim.multiaddrs())
    await victim.publish_address(timedelta(minutes=5))
    key, until = DHTID.generate(source=page_key("reef", victim.peer_id)), time.time() + 60
    for host in (victim, liar):  # as if both had accepted it
        rpc(host).storage.store_subkey(key, "nobody", MSGPackSerializer.dumps(b"junk"), until)
    assert await third.lookup_addresses() == {victim.peer_id: victim.multiaddrs()}
