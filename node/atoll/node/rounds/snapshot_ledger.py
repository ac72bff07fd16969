"""The progress that this node brings to the attempts of one round, and what of it a result holds. Pure.

One snapshot at a head, whatever becomes of the attempts that it is given to: so nothing is counted twice. Where a plan
with other cuts makes it useless, another takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.v1 import manifest_pb2


@dataclass(frozen=True)
class CountedShare:
    """What a round holds of one node."""

    counted: rt.Counted  # of its progress
    samples: int = 0  # taken from its ranges, by whichever life of it

    @classmethod
    def of(cls, peer: str, manifest: manifest_pb2.Manifest, counted: rt.Counted) -> CountedShare:
        """With the samples that the manifest has for it."""
        return cls(counted, sum(item.samples for item in manifest.contributions if item.peer_id == peer))


class SnapshotLedger:
    """At one head: the snapshot, and the attempts that may hold it."""

    def __init__(self) -> None:
        self._snapshot: rt.Frozen | None = None
        self._layers: Sequence[int] = ()
        self._to: set[RoundId] = set()  # attempts that began an exchange with it
        self._outlived: set[RoundId] = set()  # attempts whose snapshot had to make room for another
        self._hoped = False  # an attempt had the chance to commit what holds it
        self.exposed = False  # it left this node in one of them: with no weight nothing does

    def of(self, layers: Sequence[int]) -> rt.Frozen | None:
        """The snapshot, if it is of exactly these layers."""
        return self._snapshot if self._snapshot is not None and self._layers == layers else None

    def keep(self, snapshot: rt.Frozen, layers: Sequence[int]) -> None:
        """It was taken: of these layers."""
        self._snapshot, self._layers = snapshot, layers

    def begin(self, round_id: RoundId, *, weighs: bool) -> None:
        """The exchange of that attempt begins with it."""
        self._to.add(round_id)
        self.exposed |= weighs

    def hope(self) -> bool:
        """Whether one attempt shall do without us, so that it can commit what holds the snapshot: once."""
        hopes = self._snapshot is not None and not self._hoped
        self._hoped |= hopes
        return hopes

    def make_room(self) -> None:
        """For a snapshot of other layers; what holds this one may be committed all the same."""
        self._outlived |= self._to
        self.drop()

    def drop(self) -> None:
        """Nobody saw it."""
        self._snapshot, self._layers = None, ()
        self._to, self.exposed = set(), False

    def counted(self, me: str, manifest: manifest_pb2.Manifest) -> rt.Counted:
        """What of it that result holds."""
        round_id = RoundId.from_proto(manifest.round)
        if not any(item.peer_id == me for item in manifest.contributions):
            return rt.Counted.NOTHING
        if round_id in self._outlived:
            return rt.Counted.UNKNOWN
        return rt.Counted.SNAPSHOT if round_id in self._to else rt.Counted.NOTHING
