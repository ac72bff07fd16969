"""The name of one attempt at one outer round, and the order of peers that follows from it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from atoll.core.quorum import Ballot
from atoll.v1 import common_pb2 as pb


@dataclass(frozen=True, order=True)
class RoundId:
    """Plan version, fragment, number and attempt of a run's round."""

    run_id: str
    plan_version: int
    fragment: int
    number: int
    attempt: int

    def __str__(self) -> str:
        return f"{self.number}.{self.attempt}@plan{self.plan_version}"

    def order(self, peers: Iterable[str]) -> tuple[str, ...]:
        """Peers by SHA-256 of round and peer id: in this order they may open attempts, and in this order sums run.

        It changes with every round, so that no peer opens all the time.
        """
        return _order(self.key, tuple(peers))

    def opener(self, peers: Iterable[str]) -> str:
        """The one peer that may open this attempt: attempts walk down the order, so a dead opener is passed over."""
        order = self.order(peers)
        return order[self.attempt % len(order)]

    @property
    def ballot(self) -> Ballot:
        """The attempt as votes see it."""
        return Ballot(self.plan_version, self.attempt)

    @property
    def key(self) -> str:
        """All fields but the attempt as one line of text."""
        return f"{self.run_id}/{self.plan_version}/{self.fragment}/{self.number}"

    def to_proto(self) -> pb.RoundId:
        """The wire form."""
        return pb.RoundId(
            run_id=self.run_id,
            plan_version=self.plan_version,
            fragment=self.fragment,
            number=self.number,
            attempt=self.attempt,
        )

    @classmethod
    def from_proto(cls, message: pb.RoundId) -> RoundId:
        """Read it back."""
        return cls(message.run_id, message.plan_version, message.fragment, message.number, message.attempt)


@lru_cache(maxsize=16)  # asked several times a second about the round that is next
def _order(key: str, peers: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(peers, key=lambda peer: hashlib.sha256(f"{key}/{peer}".encode()).digest()))
