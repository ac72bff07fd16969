"""This node's promises and votes on disk, so that the node does not vote twice after a restart.

The node saves the record before it sends a promise or a vote. The file is JSON and a line with its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import threading
from base64 import b64decode, b64encode
from pathlib import Path

from atoll.core import log
from atoll.core.files import write_atomic
from atoll.core.quorum import Ballot, LastVote, Promised, VoteRecord

_FILE = "votes"

_log = log.get("rounds")


class VoteStore:
    """Stores the newest vote record only, because older rounds are decided."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / _FILE
        self.promised: Promised | None = None  # the newest promise on disk, if this process read or wrote it
        self._writing = threading.Lock()  # an engine that was cancelled may still write its last record

    def begin(self) -> None:
        """Save the empty record of a node with a new identity, which cannot have voted yet."""
        self.save(VoteRecord(0, b"", Ballot(0, 0)))

    def save(self, record: VoteRecord) -> None:
        """Write the record durably. Raises `DataDirUnusable`."""
        voted = record.voted
        plain = {
            "version": 3,
            "number": record.number,
            "head_hash": record.head_hash.hex(),
            "promised": list(record.promised),
            "voted": None
            if voted is None
            else {"ballot": list(voted.ballot), "proposal": b64encode(voted.proposal).decode()},
            "marks": [mark.hex() for mark in record.marks],
            "complete": record.complete,
        }
        body = json.dumps(plain, indent=1).encode()
        with self._writing:
            write_atomic(self._path, body + b"\n" + hashlib.sha256(body).hexdigest().encode())
            self.promised = record.newest

    def load(self) -> VoteRecord | None:
        """Read the record.

        None if it is missing or damaged: the node then abstains until it has taken part in a round.
        """
        try:
            with self._writing:
                body, _, checksum = self._path.read_bytes().rpartition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != checksum:
                raise ValueError("the file does not match its checksum")
            plain = json.loads(body)
            voted = plain["voted"]
            return VoteRecord(
                number=int(plain["number"]),
                head_hash=bytes.fromhex(plain["head_hash"]),
                promised=Ballot(*map(int, plain["promised"])),
                voted=voted
                and LastVote(Ballot(*map(int, voted["ballot"])), b64decode(voted["proposal"], validate=True)),
                marks=tuple(bytes.fromhex(mark) for mark in plain.get("marks", [])),  # none before version 3
                complete=bool(plain.get("complete", True)),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            _log.error("vote record unreadable; this node abstains for now", reason=str(error))
            return None
