"""Tickets: what lets one member, once and soon, onto our direct listener.

They are handed out over a gated libp2p stream, where the handshake has proved who asks. What is shown in the first
frame of a TLS connection is not the ticket but a proof: its hash together with who dials whom, as the dialler believes.
A member that passes on another one's offer as its own gains nothing, because the dialler then names the wrong listener.
Only the proofs' hashes are kept here.
"""

from __future__ import annotations

import hashlib
import secrets
from datetime import timedelta

from atoll.core.clock import Clock

TICKET_BYTES = PROOF_BYTES = 32
LIFETIME = timedelta(seconds=30)
MAX_PER_PEER = 8  # handed out and not shown yet; one more makes the oldest worthless


class Tickets:
    """Those that are good now."""

    def __init__(self, clock: Clock, me: str) -> None:
        self._clock = clock
        self._me = me
        self._good: dict[bytes, tuple[str, float]] = {}  # hash → peer and monotonic end, oldest first

    def __len__(self) -> int:
        return len(self._good)

    def issue(self, peer_id: str) -> bytes:
        """A new one for `peer_id`."""
        self._drop_expired()
        held = [digest for digest, (owner, _) in self._good.items() if owner == peer_id]
        if len(held) >= MAX_PER_PEER:
            del self._good[held[0]]
        ticket = secrets.token_bytes(TICKET_BYTES)
        self._good[_digest(proof(ticket, peer_id, self._me))] = (
            peer_id,
            self._clock.monotonic() + LIFETIME.total_seconds(),
        )
        return ticket

    def redeem(self, presented: bytes) -> str | None:
        """Who dials with that proof; it is worthless afterwards. None for one that is not good."""
        self._drop_expired()
        owner, _ = self._good.pop(_digest(presented), (None, 0.0))
        return owner

    def _drop_expired(self) -> None:
        now = self._clock.monotonic()
        while self._good:
            digest = next(iter(self._good))
            if self._good[digest][1] > now:
                return
            del self._good[digest]


def proof(ticket: bytes, dialler: str, listener: str) -> bytes:
    """What `dialler` shows to `listener`, peer ids both."""
    return hashlib.sha256(b"\0".join((b"atoll direct", ticket, dialler.encode(), listener.encode()))).digest()


def _digest(presented: bytes) -> bytes:
    return hashlib.sha256(presented).digest()
