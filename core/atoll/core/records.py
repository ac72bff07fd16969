"""DHT records: builds and checks the address records that members store in the DHT. No I/O.

A record is a `DhtRecord` signed by its owner. It contains the owner's membership certificate, so every node that stores
it can check it offline. It also names the key, the owner and the expiry under which it is stored, so a peer cannot
store it under another key or extend its life. A run has 16 keys, its *pages*. The owner's peer id determines the page.
So the records of thousands of members fit into messages, and a search for one member reads only one page. The checks
depend on the record's own expiry and not on a deny-list, because all nodes that store or read it must reach the same
result. Readers drop banned owners afterwards.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core import protocol
from atoll.core.errors import InvalidRequest, PeerMisbehaved
from atoll.core.identity import Identity, verify_signed
from atoll.core.membership import Member, MembershipVerifier
from atoll.v1 import common_pb2 as pb
from atoll.v1 import records_pb2 as records

MAX_RECORD_BYTES = 4096
MAX_LIFETIME = timedelta(seconds=600)
MAX_MULTIADDRS = 16
MAX_MULTIADDR_BYTES = 256
EXPIRY_TOLERANCE_SECONDS = 1.0
PAGES = 16
_CONTEXT = "dht-record"


def page_keys(run_id: str) -> tuple[str, ...]:
    """All keys under which members of a run publish their addresses."""
    return tuple(f"{run_id}.nodes.{page}" for page in range(PAGES))


def page_key(run_id: str, owner: str) -> str:
    """The key under which a member publishes its addresses. `owner`: its peer id."""
    return page_keys(run_id)[hashlib.sha256(owner.encode()).digest()[0] % PAGES]


@dataclass(frozen=True)
class RecordLocation:
    """Location of a record in the DHT, as the DHT reports it."""

    key: str
    subkey: str  # the owner's peer id
    expires: float  # Unix seconds


@dataclass(frozen=True)
class Record:
    """A verified record."""

    owner: Member
    expires: float  # Unix seconds
    multiaddrs: tuple[str, ...]


def build_address_record(
    identity: Identity, membership: pb.Signed, run_id: str, expires: float, multiaddrs: Sequence[str]
) -> bytes:
    """Build and sign a record of the addresses at which its owner can be dialled. Raises `InvalidRequest`."""
    if not 0 < len(multiaddrs) <= MAX_MULTIADDRS or any(len(a.encode()) > MAX_MULTIADDR_BYTES for a in multiaddrs):
        raise InvalidRequest(
            f"{len(multiaddrs)} addresses to publish; 1 to {MAX_MULTIADDRS} are allowed, each of at most "
            f"{MAX_MULTIADDR_BYTES} bytes"
        )
    record = records.DhtRecord(
        protocol=protocol.ours(),
        key=page_key(run_id, identity.peer_id),
        peer_id=identity.peer_id,
        expires_unix_ms=int(expires * 1000),
        membership=membership,
        address=records.AddressRecord(multiaddrs=multiaddrs),
    )
    data = identity.sign_message(_CONTEXT, record.SerializeToString()).SerializeToString()
    if len(data) > MAX_RECORD_BYTES:
        raise InvalidRequest(f"a DHT record has {len(data)} bytes; the limit is {MAX_RECORD_BYTES}")
    return data


def verify_record(data: bytes, place: RecordLocation, authority: MembershipVerifier, now: float) -> Record:
    """Verify all of a record found at `place`. Raises `PeerMisbehaved`, `Rejected` and their subclasses."""
    if len(data) > MAX_RECORD_BYTES:
        raise PeerMisbehaved(f"a DHT record has {len(data)} bytes; the limit is {MAX_RECORD_BYTES}")
    if not math.isfinite(place.expires) or place.expires > now + MAX_LIFETIME.total_seconds():
        raise PeerMisbehaved(f"a DHT record lives at most {MAX_LIFETIME}; this one expires at {place.expires}")
    try:
        signed = pb.Signed.FromString(data)
        record = records.DhtRecord.FromString(signed.payload)
    except DecodeError as error:
        raise PeerMisbehaved("a DHT record does not parse") from error
    protocol.check(record.protocol, f"the DHT record of {place.subkey}")
    owner = authority.verify_membership(record.membership, place.expires, expect_peer_id=place.subkey)
    verify_signed(_CONTEXT, signed, owner.public_key)
    _check_location(record, place)
    return _read_body(record, owner, place, authority.run_id)


def _check_location(record: records.DhtRecord, place: RecordLocation) -> None:
    if (record.key, record.peer_id) != (place.key, place.subkey):
        raise PeerMisbehaved(f"a DHT record of {record.peer_id} is stored under another key or owner")
    if abs(record.expires_unix_ms / 1000 - place.expires) > EXPIRY_TOLERANCE_SECONDS:
        raise PeerMisbehaved(f"a DHT record of {record.peer_id} is stored with an expiry that differs from its own")


def _read_body(record: records.DhtRecord, owner: Member, place: RecordLocation, run_id: str) -> Record:
    kind = record.WhichOneof("body")
    if place.key == page_key(run_id, owner.peer_id) and kind == "address":
        multiaddrs = tuple(record.address.multiaddrs)
        if len(multiaddrs) <= MAX_MULTIADDRS and all(len(a.encode()) <= MAX_MULTIADDR_BYTES for a in multiaddrs):
            return Record(owner, place.expires, multiaddrs=multiaddrs)
    raise PeerMisbehaved(f"a DHT record of {owner.peer_id} has body {kind}, which is not valid under key {place.key}")
