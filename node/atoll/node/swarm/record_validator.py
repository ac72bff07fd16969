"""MemberRecords: hivemind's record validator, which checks DHT records with `core/records.py`.

A record is valid under its owner's page of the run only. Its subkey must be the owner's peer id, and its value a
msgpack byte string that contains a signed `DhtRecord`. Two Ed25519 checks per record take about a millisecond, and
dictionaries hold one record per member, so a bounded cache remembers accepted records.
"""

from __future__ import annotations

from collections import OrderedDict

import msgpack
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.dht.validation import RecordValidatorBase
from hivemind.utils import MSGPackSerializer

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, PeerMisbehaved
from atoll.core.membership import MembershipVerifier
from atoll.core.records import MAX_RECORD_BYTES, Record, RecordLocation, page_keys, verify_record
from atoll.node.swarm.msgpack_scan import check_msgpack

MAX_CACHED_RECORDS = 4096
_ENVELOPE_BYTES = 5  # msgpack's prefix of a byte string
_log = log.get("swarm")


class MemberRecords(RecordValidatorBase):  # type: ignore[misc]
    """Accepts records that members have signed about themselves, and no others."""

    def __init__(self, authority: MembershipVerifier, clock: Clock) -> None:
        self._authority = authority
        self._clock = clock
        self._names = {DHTID.generate(source=name).to_bytes(): name for name in page_keys(authority.run_id)}
        self._accepted: OrderedDict[DHTRecord, None] = OrderedDict()

    def validate(self, record: DHTRecord) -> bool:
        """Return whether a record is valid. hivemind calls this before it stores and after it finds a record."""
        if not isinstance(record.value, bytes) or not isinstance(record.expiration_time, float):
            return False
        if record in self._accepted:
            return True
        try:
            self._check(record)
        except AtollError as error:
            _log.info("DHT record refused", reason=error.reason, error=str(error))
            return False
        self._accepted[record] = None
        while len(self._accepted) > MAX_CACHED_RECORDS:
            self._accepted.popitem(last=False)
        return True

    def prune(self, key: bytes, dictionary: DictionaryDHTValue) -> bool:
        """Remove invalid records from a dictionary that a peer sent; the others stay usable."""
        with dictionary.freeze():
            for subkey, (value, expires) in tuple(dictionary.items()):
                record = DHTRecord(key, MSGPackSerializer.dumps(subkey), value, expires)
                if not self.validate(record):
                    del dictionary[subkey]
        return True

    def read(self, name: str, subkey: str, value: bytes, expires: float) -> Record:
        """Verify a record that a lookup returned, without its msgpack envelope. Raises `AtollError`."""
        return verify_record(value, RecordLocation(name, subkey, expires), self._authority, self._clock.unix())

    def _check(self, record: DHTRecord) -> None:
        name = self._names.get(record.key)
        if name is None:
            raise PeerMisbehaved(f"the DHT of this run has no key {record.key.hex()}")
        if len(record.value) > MAX_RECORD_BYTES + _ENVELOPE_BYTES:
            raise PeerMisbehaved(f"a DHT record has at most {MAX_RECORD_BYTES} bytes")
        check_msgpack(record.subkey)
        check_msgpack(record.value)
        try:
            subkey, value = msgpack.unpackb(record.subkey), msgpack.unpackb(record.value)
        except ValueError as error:  # invalid UTF-8 or map keys
            raise PeerMisbehaved(f"a DHT record cannot be read: {error}") from error
        if not isinstance(subkey, str) or not isinstance(value, bytes):
            raise PeerMisbehaved("a DHT record must be a byte string, and its subkey a string")
        self.read(name, subkey, value, record.expiration_time)
