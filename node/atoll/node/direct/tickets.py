"""Tickets: single-use secrets with which one member authenticates to the direct listener within 30 s.

A member gets its ticket over a gated libp2p stream, whose handshake proved its peer id. The first frame of its TLS
connection carries not the ticket but a proof: the hash of the ticket and of both peer ids, as the dialler knows them.
So a member gains nothing by presenting another node's offer as its own: the dialler's proof then names the wrong
listener. Only the hashes of the proofs are stored here.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta

from atoll.core.clock import Clock

TICKET_BYTES = PROOF_BYTES = 32
LIFETIME = timedelta(seconds=30)
MAX_PER_PEER = 8  # valid and unused; one more invalidates the peer's oldest


class Tickets:
    """The tickets that are valid now."""

    def __init__(self, clock: Clock, me: str) -> None:
        self._clock = clock
        self._me = me
        self._valid: dict[bytes, tuple[str, float]] = {}  # hash of proof → peer, monotonic expiry; oldest first

    def __len__(self) -> int:
        self._drop_expired()
        return len(self._valid)

    def issue(self, peer_id: str) -> bytes:
        """Create a ticket for `peer_id`."""
        self._drop_expired()
        held = [digest for digest, (owner, _) in self._valid.items() if owner == peer_id]
        if len(held) >= MAX_PER_PEER:
            del self._valid[held[0]]
        ticket = secrets.token_bytes(TICKET_BYTES)
        expires = self._clock.monotonic() + LIFETIME.total_seconds()
        self._valid[_digest(proof(ticket, peer_id, self._me))] = peer_id, expires
        return ticket

    def redeem(self, presented: bytes) -> str | None:
        """Return the peer that dials with this proof and invalidate the ticket; None if the proof is not valid."""
        self._drop_expired()
        owner, _ = self._valid.pop(_digest(presented), (None, 0.0))
        return owner

    def _drop_expired(self) -> None:
        now = self._clock.monotonic()
        while self._valid:
            digest = next(iter(self._valid))
            if self._valid[digest][1] > now:
                return
            del self._valid[digest]


def proof(ticket: bytes, dialler: str, listener: str) -> bytes:
    """Compute the proof that `dialler` shows to `listener` (peer ids)."""
    return hashlib.sha256(b"\0".join((b"atoll direct", ticket, dialler.encode(), listener.encode()))).digest()


def _digest(presented: bytes) -> bytes:
    return hashlib.sha256(presented).digest()
