"""What this node promised and voted, on disk before anyone hears of it: a restart must not vote twice."""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode, b64encode
from pathlib import Path

from atoll.core import log
from atoll.core.files import write_atomic
from atoll.core.quorum import Ballot, LastVote, VoteRecord

_FILE = "votes"

_log = log.get("rounds")


class VoteStore:
    """The newest record; older rounds are decided."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE

    def begin(self) -> None:
        """The blank record of a node that got its identity just now, and so cannot have voted."""
        self.save(VoteRecord(0, b"", Ballot(0, 0)))

    def save(self, record: VoteRecord) -> None:
        """Make it durable. Raises `DataDirUnusable`."""
        voted = record.voted
        plain = {
            "version": 1,
            "number": record.number,
            "head_hash": record.head_hash.hex(),
            "promised": list(record.promised),
            "voted": None
            if voted is None
            else {"ballot": list(voted.ballot), "payload": b64encode(voted.payload).decode()},
        }
        body = json.dumps(plain, indent=1).encode()
        write_atomic(self._path, body + b"\n" + hashlib.sha256(body).hexdigest().encode())

    def load(self) -> VoteRecord | None:
        """The record, or None: then this node abstains until it was part of a round again (round.py, `_recall`)."""
        try:
            body, _, checksum = self._path.read_bytes().rpartition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != checksum:
                raise ValueError("the checksum is wrong")
            plain = json.loads(body)
            voted = plain["voted"]
            return VoteRecord(
                number=int(plain["number"]),
                head_hash=bytes.fromhex(plain["head_hash"]),
                promised=Ballot(*map(int, plain["promised"])),
                voted=voted
                and LastVote(Ballot(*map(int, voted["ballot"])), b64decode(voted["payload"], validate=True)),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.error("the record of votes cannot be read: this node abstains for now", reason=str(error))
            return None
