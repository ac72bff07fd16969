"""What DHT messages may say, in both directions."""

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


def found(**changes: object) -> dht.FindResponse:
    fields = {"type": dht.FOUND_DICTIONARY, "value": msgpack.packb([1]), "expiration_time": NOW + 60}
    return dht.FindResponse(results=[dht.FindResult(**(fields | changes))], peer=dht.NodeInfo(node_id=NODE_ID))


def bomb() -> bytes:
    value = msgpack.packb([])
    for _ in range(200):
        value = msgpack.packb(msgpack.ExtType(0x40, b"\x91" + value))
    return value


@pytest.mark.parametrize(
    "message",
    [
        store(),
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
        store(peer=dht.NodeInfo(node_id=KEY)),
        dht.FindRequest(keys=[KEY] * 17),
        found(value=bomb()),
        found(expiration_time=float("inf")),
        found(nearest_node_ids=[KEY]),
        found(nearest_node_ids=[KEY], nearest_peer_ids=[base58.b58decode(SENDER)]),
        dht.PingResponse(peer=dht.NodeInfo(node_id=KEY)),
        dht.NodeInfo(),
    ],
)
def test_what_no_honest_member_sends_is_refused(message: dht.StoreRequest) -> None:
    with pytest.raises(PeerMisbehaved):
        check_dht_message(message, SENDER, NOW)
