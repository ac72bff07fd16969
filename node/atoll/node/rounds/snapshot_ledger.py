"""The snapshot that this node gives to the attempts of one round, and how much of it a result contains. Pure.

There is one snapshot per head, whichever attempts get it, so nothing is counted twice. If a plan with other cuts makes
it useless, another snapshot replaces it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.v1 import manifest_pb2


@dataclass(frozen=True)
class CountedShare:
    """What a round counts of one node."""

    counted: rt.Counted  # of its progress
    samples: int = 0  # taken from its ranges, by this or an earlier process of the node

    @classmethod
    def of(cls, peer: str, manifest: manifest_pb2.Manifest, counted: rt.Counted) -> CountedShare:
        """The share of `peer`, with the samples that the manifest has for it."""
        return cls(counted, sum(item.samples for item in manifest.contributions if item.peer_id == peer))


class SnapshotLedger:
    """At one head: the snapshot, and the attempts that may hold it."""

    def __init__(self) -> None:
        self._snapshot: rt.Frozen | None = None
        self._layers: Sequence[int] = ()
        self._to: set[RoundId] = set()  # attempts that began an exchange with it
        self._outlived: set[RoundId] = set()  # attempts that began with a snapshot that was replaced since
        self._hoped = False  # one attempt already had the chance to commit a result with the snapshot
        self.exposed = False  # the snapshot left this node in an exchange; with weight 0 it does not

    def of(self, layers: Sequence[int]) -> rt.Frozen | None:
        """The snapshot, if it has exactly these layers."""
        return self._snapshot if self._snapshot is not None and self._layers == layers else None

    def keep(self, snapshot: rt.Frozen, layers: Sequence[int]) -> None:
        """Record the snapshot of these layers."""
        self._snapshot, self._layers = snapshot, layers

    def begin(self, round_id: RoundId, *, weighs: bool) -> None:
        """Record that the exchange of this attempt uses the snapshot."""
        self._to.add(round_id)
        self.exposed |= weighs

    def hope(self) -> bool:
        """Whether this node contributes nothing to one attempt, which may then commit a result with the snapshot.

        True once.
        """
        hopes = self._snapshot is not None and not self._hoped
        self._hoped |= hopes
        return hopes

    def make_room(self) -> None:
        """Replace the snapshot by one of other layers. A result that contains the old one may still be committed."""
        self._outlived |= self._to
        self.drop()

    def drop(self) -> None:
        """Forget the snapshot, which no other member saw."""
        self._snapshot, self._layers = None, ()
        self._to, self.exposed = set(), False

    def counted(self, me: str, manifest: manifest_pb2.Manifest) -> rt.Counted:
        """How much of this node's progress the result contains."""
        round_id = RoundId.from_proto(manifest.round)
        if not any(item.peer_id == me for item in manifest.contributions):
            return rt.Counted.NOTHING
        if round_id in self._outlived:
            return rt.Counted.UNKNOWN
        return rt.Counted.SNAPSHOT if round_id in self._to else rt.Counted.NOTHING
