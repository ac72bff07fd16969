"""Assignment of samples to members: which are consumed, and which ranges each member consumes next.

Pure, and independent of the coordinator: every member computes the same position from the same commits.

Samples are indices in the run's deterministic order. Genesis gives each member a first range. At every commit:

- each member's consumed count moves its ranges forward;
- the ranges of members that left are returned;
- a member with fewer samples than its target gets more: returned ranges first, then new ones from the cursor.

So no sample is skipped. A sample is trained twice only if a machine fails with it in flight, and then the first
training of it is lost with the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from atoll.core.errors import PeerMisbehaved
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

SampleRange = tuple[int, int]
MAX_RANGES = 2**16  # in a received position: ranges and holders together
LEASE_ROUNDS = 4  # a member's target: about this many rounds of samples at its last pace


@dataclass(frozen=True)
class DataPosition:
    """A run's data position: the next new sample, returned ranges, and the ranges that each member holds."""

    cursor: int = 0
    returned: tuple[SampleRange, ...] = ()
    holdings: Mapping[str, tuple[SampleRange, ...]] = field(default_factory=dict)

    def to_proto(self) -> manifest_pb2.DataPosition:
        """Convert to the message that a manifest contains."""
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
        """Parse a message. Raises `PeerMisbehaved` for too many ranges or a range that ends before it starts."""
        held = sum(len(holding.ranges) for holding in message.holdings)
        if len(message.returned) + len(message.holdings) + held > MAX_RANGES:
            raise PeerMisbehaved(f"a data position has more than {MAX_RANGES} ranges and holders")
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
    """Return the position at genesis: equal ranges in the order of `members`."""
    holdings = {peer: ((i * samples_each, (i + 1) * samples_each),) for i, peer in enumerate(members)}
    return DataPosition(cursor=len(members) * samples_each, holdings=holdings)


def first_lease_samples(round_samples: int, members: int, turns: int = 1) -> int:
    """Return what a member whose pace is unknown gets: its equal share of `LEASE_ROUNDS` times `turns` rounds.

    `turns`: the rounds until a member's samples count again, because each cut of the model has a round of its own.
    A member that is more than `LEASE_ROUNDS` times as fast as the average consumes that before its first round commits;
    it then repeats samples of its own. Its next lease follows its pace.
    """
    return -(-LEASE_ROUNDS * turns * round_samples // max(1, members))


def advance(
    position: DataPosition, members: Sequence[str], consumed: Mapping[str, int], round_samples: int, turns: int = 1
) -> DataPosition:
    """Return the position after a round in which each member consumed `consumed` samples.

    `round_samples` is what the whole swarm consumes in a round. Each member then holds what it consumes in
    `LEASE_ROUNDS` rounds at its last pace. It holds at least `first_lease_samples`, or one round of the swarm if that
    is less. So all leases together cover a few rounds, however many members there are.

    A member may report more samples than it held, because it repeats its last samples when its ranges are
    exhausted. Its remaining ranges are then empty. Raises `PeerMisbehaved` for a negative count.
    """
    if any(count < 0 for count in consumed.values()):
        raise PeerMisbehaved("a member reports a negative number of consumed samples")
    present = set(members)
    returned = list(position.returned)
    for peer in sorted(set(position.holdings) - present):
        returned.extend(position.holdings[peer])
    left = {peer: drop_samples(position.holdings.get(peer, ()), consumed.get(peer, 0)) for peer in sorted(present)}
    cursor, least = position.cursor, min(round_samples, first_lease_samples(round_samples, len(present), turns))
    for peer, ranges in left.items():
        # bounded by what the member held, and by what the whole swarm consumes in a round
        used = min(consumed.get(peer, 0), sample_count(position.holdings.get(peer, ())))
        target = max(least, LEASE_ROUNDS * min(used, round_samples))
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
    """Return how many samples the ranges contain."""
    return sum(end - start for start, end in ranges)


def drop_samples(ranges: Sequence[SampleRange], count: int) -> tuple[SampleRange, ...]:
    """Return the ranges without their first `count` samples; empty if they have fewer."""
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
