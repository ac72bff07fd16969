"""Which samples were consumed, and who may consume which next. Pure; every member computes the same.

Samples are numbers in the run's deterministic order. Genesis hands each member a first range. At every
commit the members' consumed counts move their ranges forward, members that left give theirs back, and
whoever holds less than its target is topped up: first with what was given back, then from the cursor. So
no sample is skipped, and none is trained twice but those in flight on a machine that died, whose progress
died with them. Nothing here needs the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.core.errors import PeerMisbehaved
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

SampleRange = tuple[int, int]
MAX_RANGES = 2**16  # of a position that comes from outside, and of who holds some
LEASE_ROUNDS = 4  # a member holds samples for about that many rounds at its last pace


@dataclass(frozen=True)
class DataPosition:
    """The whole data position of a run."""

    cursor: int = 0
    returned: tuple[SampleRange, ...] = ()
    holdings: Mapping[str, tuple[SampleRange, ...]] = field(default_factory=dict)

    def to_proto(self) -> manifest_pb2.DataPosition:
        """The form that stands in a manifest."""
        return manifest_pb2.DataPosition(
            cursor=self.cursor,
            returned=[pb.SampleRange(start=start, end=end) for start, end in self.returned],
            holdings=[
                manifest_pb2.DataHolding(
                    peer_id=peer,
                    ranges=[pb.SampleRange(start=start, end=end) for start, end in self.holdings[peer]],
                )
                for peer in sorted(self.holdings)
            ],
        )

    @classmethod
    def from_proto(cls, message: manifest_pb2.DataPosition) -> DataPosition:
        """Read it back. Raises `PeerMisbehaved` for a range that ends before it starts, and for too many."""
        held = sum(len(holding.ranges) for holding in message.holdings)
        if len(message.returned) + len(message.holdings) + held > MAX_RANGES:
            raise PeerMisbehaved(f"a data position has at most {MAX_RANGES} ranges")
        holdings = [piece for holding in message.holdings for piece in holding.ranges]
        if any(piece.end < piece.start for piece in [*message.returned, *holdings]):
            raise PeerMisbehaved("a data range ends before it starts")
        return cls(
            cursor=message.cursor,
            returned=tuple((piece.start, piece.end) for piece in message.returned),
            holdings={
                holding.peer_id: tuple((piece.start, piece.end) for piece in holding.ranges)
                for holding in message.holdings
            },
        )


def genesis_position(members: Sequence[str], samples_each: int) -> DataPosition:
    """Genesis: equal ranges, in the order of the members."""
    holdings = {peer: ((i * samples_each, (i + 1) * samples_each),) for i, peer in enumerate(members)}
    return DataPosition(cursor=len(members) * samples_each, holdings=holdings)


def advance(
    position: DataPosition, members: Sequence[str], consumed: Mapping[str, int], minimum_lease_samples: int
) -> DataPosition:
    """The position after a round: `consumed` samples per member since the last one.

    `minimum_lease_samples` is what the whole swarm consumes in a round; each member then holds at least that much.

    Consuming more than one holds is allowed up to re-reading (a member whose ranges ran dry trains the last
    of them again): its holding is then simply empty. Raises `PeerMisbehaved` for a negative count.
    """
    if any(count < 0 for count in consumed.values()):
        raise PeerMisbehaved("a member claims to have consumed a negative number of samples")
    present = set(members)
    returned = list(position.returned)
    for peer in sorted(set(position.holdings) - present):
        returned.extend(position.holdings[peer])
    left = {peer: drop_samples(position.holdings.get(peer, ()), consumed.get(peer, 0)) for peer in sorted(present)}
    cursor = position.cursor
    for peer, ranges in left.items():
        # no more than it held can have been consumed, and no member outruns the whole swarm
        used = min(consumed.get(peer, 0), sample_count(position.holdings.get(peer, ())))
        target = max(minimum_lease_samples, LEASE_ROUNDS * min(used, minimum_lease_samples))
        missing = target - sample_count(ranges)
        if missing <= 0:
            continue
        taken, returned = _split_at(returned, missing)
        rest = missing - sample_count(taken)
        if rest:
            taken = [*taken, (cursor, cursor + rest)]
            cursor += rest
        left[peer] = _merge_adjacent([*ranges, *taken])
    return DataPosition(cursor, _merge_adjacent(sorted(returned)), left)


def sample_count(ranges: Sequence[SampleRange]) -> int:
    """How many samples the ranges hold."""
    return sum(end - start for start, end in ranges)


def drop_samples(ranges: Sequence[SampleRange], count: int) -> tuple[SampleRange, ...]:
    """The ranges without their first `count` samples; empty when there are fewer."""
    return tuple(_split_at(list(ranges), count)[1])


def _split_at(ranges: list[SampleRange], count: int) -> tuple[list[SampleRange], list[SampleRange]]:
    taken: list[SampleRange] = []
    rest: list[SampleRange] = []
    for start, end in ranges:
        middle = min(end, start + count)
        count -= middle - start
        if middle > start:
            taken.append((start, middle))
        if end > middle:
            rest.append((middle, end))
    return taken, rest


def _merge_adjacent(ranges: Sequence[SampleRange]) -> tuple[SampleRange, ...]:
    joined: list[SampleRange] = []
    for start, end in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return tuple(joined)
