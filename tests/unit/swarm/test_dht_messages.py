"""Checks of DHT messages, in both directions."""

from __future__ import annotations

import hashlib

import base58
import msgpack
import pytest
from hivemind.proto import dht_pb2 as dht

from atoll.core.errors import PeerMisbehaved
from atoll.core.identity import Identity
from atoll.node.swarm.dht_messages import check_dht_message, node_id_bytes

NOW = 1_700_000_000.0
SENDER = Identity.generate().peer_id
NODE_ID = node_id_bytes(base58.b58decode(SENDER))
KEY = hashlib.sha1(b"key", usedforsecurity=False).digest()


def store(**changes: object) -> dht.StoreRequest:
    fields = {
        "keys": [KEY],
        "subkeys": [msgpack.packb("owner")],
        "values": [msgpack.packb(b"value")],
        "expiration_time": [NOW + 60],
        "in_cache": [False],
        "peer": dht.NodeInfo(node_id=NODE_ID),
    }
    return dht.StoreRequest(**(fields | changes))


def dictionary(*entries: object, latest: object = NOW + 60, capacity: object = None) -> bytes:
    return msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([capacity, latest, list(entries)])))


ENTRY = ["owner", msgpack.packb(b"value"), NOW + 60]


def found(**changes: object) -> dht.FindResponse:
    fields = {"type": dht.FOUND_DICTIONARY, "value": dictionary(ENTRY), "expiration_time": NOW + 60}
    return dht.FindResponse(results=[dht.FindResult(**(fields | changes))], peer=dht.NodeInfo(node_id=NODE_ID))


def bomb() -> bytes:
    value = msgpack.packb([])
    for _ in range(200):
        value = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + value))
    return value


NO_DICTIONARIES = [
    msgpack.packb([1]),
    msgpack.packb(msgpack.ExtType(0x50, b"\xc0")),
    msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([None, NOW]))),
    dictionary(latest="soon"),
    dictionary(ENTRY, capacity=b"x"),
    dictionary(ENTRY, capacity=[1]),
    dictionary(5),
    dictionary(ENTRY[:2]),
    *(dictionary([*ENTRY[:i], odd, *ENTRY[i + 1 :]]) for i in range(3) for odd in (None, [], 7)),
    dictionary([{"a": {"b": 1}}, b"", 1.0]),
    b"\xc7\x0c\x50\x93\xc0\xca\0\0\0\0\x91\x81\x01\x01\xc0",  # a map whose key is a number
    b"\xa1\xff",  # text that is none
]


@pytest.mark.parametrize(
    "message",
    [
        store(),
        store(subkeys=[b""], values=[dictionary(ENTRY, ["other", b"", NOW])]),
        found(),
        dht.PingRequest(),
        dht.FindRequest(keys=[KEY]),
        dht.FindResponse(
            results=[dht.FindResult(nearest_node_ids=[NODE_ID], nearest_peer_ids=[base58.b58decode(SENDER)])]
        ),
    ],
)
def test_honest_messages_pass(message: dht.StoreRequest) -> None:
    check_dht_message(message, SENDER, NOW)


@pytest.mark.parametrize(
    "message",
    [
        store(expiration_time=[1e300]),
        store(expiration_time=[float("nan")]),
        store(expiration_time=[NOW + 700]),
        store(keys=[b"short"]),
        store(subkeys=[]),
        store(values=[bomb()]),
        store(subkeys=[bomb()]),
        store(subkeys=[b""], values=[bomb()]),
        *(store(subkeys=[b""], values=[value]) for value in NO_DICTIONARIES),
        *(found(value=value) for value in NO_DICTIONARIES),
        store(peer=dht.NodeInfo(node_id=KEY)),
        dht.FindRequest(keys=[KEY] * 17),
        found(value=bomb()),
        found(expiration_time=float("inf")),
        found(type=7),
        found(nearest_node_ids=[KEY]),
        found(nearest_node_ids=[KEY], nearest_peer_ids=[base58.b58decode(SENDER)]),
        dht.PingResponse(peer=dht.NodeInfo(node_id=KEY)),
        dht.NodeInfo(),
    ],
)
def test_what_no_honest_member_sends_is_refused(message: dht.StoreRequest) -> None:
    with pytest.raises(PeerMisbehaved):
        check_dht_message(message, SENDER, NOW)
