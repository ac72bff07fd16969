"""Whatever a member asks of our part of the DHT, or answers there: a typed refusal, and the true records stay.

The handlers are hivemind's own behind our gate, called with the bytes that p2pd would deliver.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import msgpack
import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2 as dht
from hivemind.utils import MSGPackSerializer
from hypothesis import given
from support.certificates import certificate_of
from support.mutation import CASES, Mutator, cases, seeds

from atoll.core.clock import SystemClock
from atoll.core.errors import AtollError
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, MembershipVerifier
from atoll.core.records import build_address_record, page_key
from atoll.node.direct.dial_policy import DialPolicy
from atoll.node.swarm.addresses import AddressBook
from atoll.node.swarm.dht_messages import node_id_bytes
from atoll.node.swarm.msgpack_scan import MAX_DEPTH
from atoll.node.swarm.p2p import GatedP2P
from atoll.node.swarm.record_validator import MemberRecords
from atoll.node.wire.gate import Gate
from atoll.node.wire.traffic import Traffic
from atoll.v1 import common_pb2 as pb

OPERATOR, OWN, PEER = (Identity.generate() for _ in range(3))
PAGE = page_key("reef", PEER.peer_id)
HONEST = next(it for it in iter(Identity.generate, None) if page_key("reef", it.peer_id) == PAGE)
AUTHORITY = MembershipVerifier(OPERATOR.public_key, "reef")
KEY = DHTID.generate(source=PAGE)
UNTIL = time.time() + 590  # renewed for every test; a record lives ten minutes at most
ADDRESSES = ("/ip4/192.0.2.1/tcp/4001",)
ANY = DialPolicy(loopback=True, local=True)

Serve = Callable[[bytes, PeerID], Awaitable[bytes]]


CARDS = {who.peer_id: certificate_of(who, OPERATOR, time.time()) for who in (OWN, PEER, HONEST)}
RECORDS = {
    who.peer_id: build_address_record(who, CARDS[who.peer_id], "reef", UNTIL, ADDRESSES) for who in (PEER, HONEST)
}
NODE = dht.NodeInfo(node_id=node_id_bytes(PeerID.from_base58(PEER.peer_id).to_bytes()))
PEER_ID = PeerID.from_base58(PEER.peer_id)


@pytest.fixture(autouse=True)
def fresh_records() -> None:
    """Other tests may have taken longer than a record lives."""
    global UNTIL
    UNTIL = time.time() + 590
    RECORDS.update(
        {who.peer_id: build_address_record(who, CARDS[who.peer_id], "reef", UNTIL, ADDRESSES) for who in (PEER, HONEST)}
    )
    ENTRY[1:] = [msgpack.packb(RECORDS[PEER.peer_id]), UNTIL]


class Daemon:
    """p2pd's place: it hands requests to the handlers, and gives whatever a peer is made to answer."""

    def __init__(self) -> None:
        self.handlers: dict[str, Serve] = {}
        self.answer = b""
        self.control = self

    async def add_unary_handler(self, name: str, serve: Serve, balanced: bool = False) -> None:
        self.handlers[name] = serve

    async def call_unary_handler(self, peer_id: PeerID, name: str, data: bytes) -> bytes:
        return self.answer


class Undaemoned(GatedP2P):
    """Ours, without a p2pd to end."""

    def __del__(self) -> None:
        pass


class Introduced:
    async def ensure_admitted(self, peer_id: str) -> None:
        pass


async def directory() -> tuple[DHTProtocol, Daemon]:
    """Our DHT, which knows one honest record."""
    clock, daemon = SystemClock(), Daemon()
    gate = Gate(AUTHORITY, CARDS[OWN.peer_id], OWN.peer_id, EMPTY_DENY_LIST, clock)
    for who in (PEER, HONEST):
        gate.admit(who.peer_id, Gate(AUTHORITY, CARDS[who.peer_id], who.peer_id, EMPTY_DENY_LIST, clock).hello())
    p2p = Undaemoned()
    p2p._client, p2p.control, p2p.gate, p2p._clock = daemon, daemon, gate, clock  # type: ignore[assignment]
    p2p.traffic, p2p.introductions, p2p.book = (
        Traffic(clock),
        Introduced(),
        AddressBook(clock, ANY),
    )  # type: ignore[assignment]
    p2p.peer_id = PeerID.from_base58(OWN.peer_id)
    records = MemberRecords(AUTHORITY, clock)
    node_id = DHTID.from_bytes(node_id_bytes(p2p.peer_id.to_bytes()))
    protocol = await DHTProtocol.create(p2p, node_id, 20, 5, 5, 60.0, record_validator=records)
    protocol._validate_dictionary = records.prune
    honest = store(HONEST.peer_id, RECORDS[HONEST.peer_id])
    reply = await daemon.handlers["DHTProtocol.rpc_store"](honest.SerializeToString(), PEER_ID)
    assert list(dht.StoreResponse.FromString(reply).store_ok) == [True]
    return protocol, daemon


def store(owner: str, record: bytes, **changes: object) -> dht.StoreRequest:
    fields: dict[str, object] = {
        "keys": [KEY.to_bytes()],
        "subkeys": [msgpack.packb(owner)],
        "values": [msgpack.packb(record)],
        "expiration_time": [UNTIL],
        "in_cache": [False],
        "peer": NODE,
    }
    return dht.StoreRequest(**(fields | changes))


def dictionary(*entries: object, size: object = None, latest: object = 1e9) -> bytes:
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([size, latest, list(entries)], strict_types=False)))


ENTRY = [PEER.peer_id, msgpack.packb(RECORDS[PEER.peer_id]), UNTIL]
ODD: list[object] = [None, True, 0, -1, 2**63, 1.5, float("nan"), float("inf"), "x", b"x", [], [1], {}, {"a": 1}]
ODD_BYTES = [
    *(msgpack.packb(value) for value in ODD),
    b"\x81\x01\x01",  # a map whose key is a number
    b"\x81\x90\x01",  # … and a list
    b"\xa1\xff",  # text that is none
    msgpack.packb(msgpack.ExtType(0x40, b"\x01")),  # a tuple of no list
    msgpack.packb(msgpack.ExtType(0x50, b"\xc0")),  # a dictionary of nothing
    b"\x91" * MAX_DEPTH + b"\x90",
    b"\x91" * 900,
]


def odd_dictionary(mutator: Mutator) -> bytes:
    pick = mutator.rng.choice
    entry: list[object] = list(ENTRY)
    if pick((True, False)):
        entry[mutator.rng.randrange(3)] = pick(ODD)
    entries = [pick([entry, [HONEST.peer_id, msgpack.packb(b"junk"), UNTIL], ENTRY, entry[:2], pick(ODD)])]
    entries *= pick((1, 1, 3, 100))
    whole = dictionary(*entries, size=pick([None, 0, 1, *ODD]), latest=pick([UNTIL, *ODD]))
    return pick((whole, whole, mutator.bytes(whole), dictionary(), pick(ODD_BYTES)))


def request(seed: int) -> tuple[str, bytes]:
    """A call to one of the three handlers."""
    mutator = Mutator(seed)
    pick = mutator.rng.choice
    stores = [
        store(PEER.peer_id, RECORDS[PEER.peer_id]),
        store(HONEST.peer_id, RECORDS[PEER.peer_id]),
        store(PEER.peer_id, b"", subkeys=[b""], values=[odd_dictionary(mutator)]),
        store(PEER.peer_id, b"", subkeys=[pick(ODD_BYTES)], values=[pick(ODD_BYTES)]),
        store(PEER.peer_id, b"", values=[pick(ODD_BYTES)]),
        store(PEER.peer_id, mutator.bytes(RECORDS[PEER.peer_id])),
        store(PEER.peer_id, RECORDS[PEER.peer_id], expiration_time=[pick([1e300, float("nan"), 0.0, -1.0])]),
    ]
    name, valid = pick(
        [
            ("rpc_ping", dht.PingRequest(peer=NODE, validate=pick((True, False)))),
            ("rpc_find", dht.FindRequest(keys=[KEY.to_bytes()], peer=NODE)),
            *[("rpc_store", item) for item in stores],
        ]
    )
    return name, mutator.message(valid)


async def quiet() -> None:
    """Wait for what hivemind does aside; none of it may end with an error that is not ours."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for outcome in await asyncio.gather(*others, return_exceptions=True):
            assert not isinstance(outcome, Exception) or isinstance(outcome, AtollError), outcome


@pytest.mark.parametrize("examples", CASES)
def test_whatever_is_asked_of_the_dht(examples: int) -> None:
    @cases(examples)
    @given(seeds)
    def ask(seed: int) -> None:
        async def scene() -> None:
            protocol, daemon = await directory()
            protocol.p2p.control.answer = dht.PingResponse(peer=NODE).SerializeToString()
            name, data = request(seed)
            try:
                reply = await daemon.handlers[f"DHTProtocol.{name}"](data, PEER_ID)
                assert len(reply) < 64 * 1024
            except AtollError:
                pass
            await quiet()
            held = protocol.storage.get(KEY)
            assert held is not None
            entries = {subkey: MSGPackSerializer.loads(value) for subkey, (value, _) in held.value.items()}
            assert entries.pop(HONEST.peer_id) == RECORDS[HONEST.peer_id]
            assert set(entries) <= {PEER.peer_id}
            assert len(protocol.storage) == 1
            assert not protocol.cache or set(dict(protocol.cache.items())) == {KEY}

        asyncio.run(scene())

    ask()


def answer(seed: int) -> bytes:
    """What a peer may answer when it is asked for addresses."""
    mutator = Mutator(seed)
    pick = mutator.rng.choice
    held = [
        dictionary(ENTRY, [HONEST.peer_id, msgpack.packb(RECORDS[HONEST.peer_id]), UNTIL]),
        odd_dictionary(mutator),
    ]
    result = dht.FindResult(
        type=pick((dht.FOUND_DICTIONARY, dht.FOUND_DICTIONARY, dht.FOUND_REGULAR, dht.NOT_FOUND, 7)),
        value=pick(held),
        expiration_time=pick((UNTIL, UNTIL, 1e300, float("nan"), 0.0)),
        nearest_node_ids=[NODE.node_id],
        nearest_peer_ids=[PEER_ID.to_bytes()],
    )
    return mutator.message(dht.FindResponse(results=[result] * pick((1, 1, 2, 30)), peer=NODE))


@pytest.mark.parametrize("examples", CASES)
def test_whatever_the_dht_answers(examples: int) -> None:
    @cases(examples)
    @given(seeds)
    def look(seed: int) -> None:
        async def scene() -> None:
            protocol, daemon = await directory()
            daemon.answer = answer(seed)
            caught: list[BaseException] = []
            parse = protocol.p2p._parse

            def parsed(*arguments: object) -> object:
                try:
                    return parse(*arguments)
                except AtollError as error:
                    caught.append(error)
                    raise

            protocol.p2p._parse = parsed
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: caught.append(RuntimeError(str(context))))
            found = await protocol.call_find(PEER_ID, [KEY])
            await quiet()
            assert all(isinstance(error, AtollError) for error in caught)
            value = found[KEY][0] if found and KEY in found else None
            for subkey, (raw, _) in value.value.items() if value is not None else ():
                assert MSGPackSerializer.loads(raw) == RECORDS[subkey]
            if found is None:
                assert caught or len(dht.FindResponse.FromString(daemon.answer).results) != 1

        asyncio.run(scene())

    look()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_record_is_judged(examples: int) -> None:
    """The validator itself: no bytes under any key, subkey or expiry make it raise, or take what is not true."""

    @cases(examples)
    @given(seeds)
    def judge(seed: int) -> None:
        mutator = Mutator(seed)
        pick = mutator.rng.choice
        record = RECORDS[PEER.peer_id]
        good = msgpack.packb(record)
        value = pick([good, msgpack.packb(mutator.message(pb.Signed.FromString(record))), mutator.bytes(good)])
        candidate = SimpleNamespace(
            key=pick([KEY.to_bytes(), b"", b"k" * 20]),
            subkey=pick([msgpack.packb(PEER.peer_id), msgpack.packb(HONEST.peer_id), pick(ODD_BYTES)]),
            value=pick([value, value, pick(ODD_BYTES)]),
            expiration_time=pick([UNTIL, UNTIL, 1e300, float("nan"), -1.0]),
        )
        taken = MemberRecords(AUTHORITY, SystemClock()).validate(DHTRecord(**vars(candidate)))
        if taken:
            assert (candidate.key, candidate.expiration_time) == (KEY.to_bytes(), UNTIL)
            assert candidate.subkey == msgpack.packb(PEER.peer_id)
            sealed = pb.Signed.FromString(MSGPackSerializer.loads(candidate.value))
            assert sealed.payload == pb.Signed.FromString(record).payload

    judge()
