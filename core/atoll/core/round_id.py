"""Identifier of one attempt at an outer round, and the pseudo-random order of peers that it defines."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from atoll.core.quorum import Ballot
from atoll.v1 import common_pb2 as pb


@dataclass(frozen=True, order=True)
class RoundId:
    """Run, plan version, fragment, number and attempt of an outer round."""

    run_id: str
    plan_version: int
    fragment: int
    number: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.number}.{self.attempt}@plan{self.plan_version}"

    def order(self, peers: Iterable[str]) -> tuple[str, ...]:
        """Order peers by SHA-256 of round and peer id. Sums run in this order; it differs between rounds."""
        return _order(self.key, tuple(peers))

    def opener(self, openers: Sequence[str]) -> str:
        """Return the only peer of `openers` that may open this attempt; empty if there is none."""
        return openers[self.attempt % len(openers)] if openers else ""

    @property
    def ballot(self) -> Ballot:
        """The attempt's ballot, which votes are for."""
        return Ballot(self.plan_version, self.attempt)

    @property
    def key(self) -> str:
        """All fields except the attempt, as one line of text."""
        return f"{self.run_id}/{self.plan_version}/{self.fragment}/{self.number}"

    def to_proto(self) -> pb.RoundId:
        """Convert to the message."""
        return pb.RoundId(
            run_id=self.run_id,
            plan_version=self.plan_version,
            fragment=self.fragment,
            number=self.number,
            attempt=self.attempt,
        )

    @classmethod
    def from_proto(cls, message: pb.RoundId) -> RoundId:
        """Parse the message."""
        return cls(message.run_id, message.plan_version, message.fragment, message.number, message.attempt)


@lru_cache(maxsize=16)  # called several times a second for the next round
def _order(key: str, peers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(peers, key=lambda peer: hashlib.sha256(f"{key}/{peer}".encode()).digest()))
