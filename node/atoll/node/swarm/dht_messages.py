"""Checks of DHT messages, after the gate and before hivemind reads them.

hivemind deserialises dictionary values before its validator sees them. It trusts the expiry of a reply and the node id
that a peer claims. So a message must have at most 16 keys, lists of equal length, expiries that are finite and near,
msgpack within limits, and dictionaries of the one shape that hivemind can read. A node id must be the hash of the
peer id, so that a peer cannot choose its place in the key space.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

import base58
import msgpack
from google.protobuf.message import Message
from hivemind.proto import dht_pb2 as dht

from atoll.core.errors import PeerMisbehaved
from atoll.core.records import MAX_LIFETIME
from atoll.node.swarm.msgpack_scan import DICTIONARY_EXTENSION, check_msgpack

MAX_KEYS = 16
MAX_NEIGHBOURS = 64
KEY_BYTES = 20


def node_id_bytes(peer_id: bytes) -> bytes:
    """Return the only DHT node id that a peer may have: the SHA-1 of its (binary) peer id."""
    return hashlib.sha1(peer_id, usedforsecurity=False).digest()


def check_dht_message(message: Message, sender: str, now: float) -> None:
    """Raise `PeerMisbehaved` for a message that no honest member would send. `sender`: base58 peer id."""
    if isinstance(message, dht.StoreRequest):
        _check_store(message, now)
    elif isinstance(message, dht.FindRequest):
        _check_keys(message.keys)
    elif isinstance(message, dht.FindResponse):
        _check_found(message, now)
    elif not isinstance(message, dht.PingRequest | dht.PingResponse | dht.StoreResponse):
        raise PeerMisbehaved(f"{type(message).__name__} is not a DHT message")
    claimed: bytes = message.peer.node_id
    if claimed and claimed != node_id_bytes(base58.b58decode(sender)):
        raise PeerMisbehaved(f"peer {sender} claims a DHT node id that is not its own")


def _check_store(request: dht.StoreRequest, now: float) -> None:
    _check_keys(request.keys)
    lists = (request.subkeys, request.values, request.expiration_time, request.in_cache)
    if any(len(each) != len(request.keys) for each in lists):
        raise PeerMisbehaved("a store request has lists of different lengths")
    for expires in request.expiration_time:
        _check_expiry(expires, now)
    for subkey, value in zip(request.subkeys, request.values, strict=True):
        if subkey:
            check_msgpack(subkey)
            check_msgpack(value)
        else:  # several entries at once
            check_dictionary(value)


def _check_found(response: dht.FindResponse, now: float) -> None:
    if len(response.results) > MAX_KEYS:
        raise PeerMisbehaved(f"a find response has at most {MAX_KEYS} results")
    for result in response.results:
        ids, peers = result.nearest_node_ids, result.nearest_peer_ids
        if len(ids) != len(peers) or len(ids) > MAX_NEIGHBOURS:
            raise PeerMisbehaved(
                f"a find response has {len(ids)} node ids and {len(peers)} peer ids of neighbours; the numbers must be "
                f"equal and at most {MAX_NEIGHBOURS}"
            )
        if any(node_id != node_id_bytes(peer) for node_id, peer in zip(ids, peers, strict=True)):
            raise PeerMisbehaved("a find response gives a neighbour a node id that is not its own")
        if result.type == dht.NOT_FOUND:
            continue
        _check_expiry(result.expiration_time, now)
        if result.type == dht.FOUND_DICTIONARY:
            check_dictionary(result.value)
        elif result.type == dht.FOUND_REGULAR:
            check_msgpack(result.value)
        else:
            raise PeerMisbehaved(f"a find response has a result of unknown type {result.type}")


def check_dictionary(data: bytes) -> None:
    """Raise `PeerMisbehaved` unless `data` is a dictionary of owner → (bytes, expiry) as hivemind packs it.

    The record validator checks each entry later, so that a bad entry does not hide the others.
    """
    check_msgpack(data)
    try:
        outer = msgpack.unpackb(data)
        if not isinstance(outer, msgpack.ExtType) or outer.code != DICTIONARY_EXTENSION:
            raise PeerMisbehaved("a DHT value of the type dictionary is not a DHT dictionary")
        capacity, latest, entries = msgpack.unpackb(outer.data)
        bounds = isinstance(capacity, int | float | None) and isinstance(latest, float)
        if not bounds or not all(_is_entry(*entry) for entry in entries):
            raise PeerMisbehaved("a DHT dictionary has a malformed header or entry")
    except (ValueError, TypeError) as error:  # invalid map keys, invalid UTF-8, too few or too many fields
        raise PeerMisbehaved(f"a DHT dictionary cannot be read: {error}") from error


def _is_entry(subkey: object, value: object, expires: object) -> bool:
    return isinstance(subkey, str) and isinstance(value, bytes) and isinstance(expires, float)


def _check_keys(keys: Iterable[bytes]) -> None:
    lengths = [len(key) for key in keys]
    if len(lengths) > MAX_KEYS or any(length != KEY_BYTES for length in lengths):
        raise PeerMisbehaved(f"a DHT message has at most {MAX_KEYS} keys of {KEY_BYTES} bytes")


def _check_expiry(expires: float, now: float) -> None:
    if not math.isfinite(expires) or expires > now + MAX_LIFETIME.total_seconds():
        raise PeerMisbehaved(f"a DHT value lives at most {MAX_LIFETIME}")
