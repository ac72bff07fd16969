"""Assignment of samples to members: which are consumed, and which ranges each member consumes next.

Pure, and independent of the coordinator: every member computes the same position from the same commits, on integers.

Samples are indices in the run's deterministic order. Genesis gives each member a first range. At every commit:

- each member's consumed count moves its ranges forward, and gives its pace;
- the ranges of members that left, or that no round counted for long, are returned;
- a member that holds less than `REFILL_ROUNDS` rounds at its own pace gets more, up to `FULL_ROUNDS`: returned ranges
  first, then new ones from the cursor. They are appended to its list, because it may have trained beyond the snapshot.

Refills are few and large, so that a member trains long runs of successive samples. Towards the end of an epoch they
shrink with what is left, as in guided self-scheduling (Polychronopoulos & Kuck 1987, "Guided Self-Scheduling: A
Practical Scheduling Scheme for Parallel Supercomputers"). Members differ in pace, so each gets its share of the rest in
proportion to its pace (weighted factoring: Hummel, Schmidt, Uma & Wein 1996, "Load-Sharing in Heterogeneous Systems via
Weighted Factoring").

So no sample is skipped. docs/explain/rounds.md lists which samples are trained twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from atoll.core.errors import PeerMisbehaved
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

SampleRange = tuple[int, int]
MAX_RANGES = 2**16  # in a received position: ranges and holders together

# Lengths of leases, in rounds at their member's pace, measured with benchmarks/data_coverage.py.
FULL_ROUNDS = 6  # after a refill
REFILL_ROUNDS = 3  # a lease below this is refilled
FIRST_ROUNDS = 4  # while a member's pace is unknown; in rounds at the mean pace
SHORT_PERCENT = 175  # of a round, at the end of an epoch: the time from a snapshot until the next round commits
RETURN_ROUNDS = 8  # a member loses its lease after more than this many rounds in succession that did not count it


class Pace(NamedTuple):
    """How fast a member consumes samples."""

    samples: int = 0  # per round; 0 while no round has counted any
    uncounted: int = 0  # rounds since the last one that counted samples


@dataclass(frozen=True)
class DataPosition:
    """A run's data position: the next new sample, returned ranges, and the ranges and paces of members."""

    cursor: int = 0
    returned: tuple[SampleRange, ...] = ()
    holdings: Mapping[str, tuple[SampleRange, ...]] = field(default_factory=dict)
    paces: Mapping[str, Pace] = field(default_factory=dict)
    epoch_samples: int = 0  # samples of an epoch; 0 if unknown
    # number of routes started under the plan of its round; places of first leases are counted from here
    routes_begun: int = 0

    def to_proto(self) -> manifest_pb2.DataPosition:
        """Convert to the message that a manifest contains."""
        return manifest_pb2.DataPosition(
            cursor=self.cursor,
            returned=[pb.SampleRange(start=start, end=end) for start, end in self.returned],
            holdings=[
                manifest_pb2.DataHolding(
                    peer_id=peer,
                    ranges=[pb.SampleRange(start=start, end=end) for start, end in self.holdings[peer]],
                    pace=self.pace(peer).samples,
                    rounds_uncounted=self.pace(peer).uncounted,
                )
                for peer in sorted(self.holdings)
            ],
            epoch_samples=self.epoch_samples,
            routes_begun=self.routes_begun,
        )

    @classmethod
    def from_proto(cls, message: manifest_pb2.DataPosition) -> DataPosition:
        """Parse a message. Raises `PeerMisbehaved` for too many ranges or a range that ends before it starts."""
        _check_ranges(message)
        paces = {item.peer_id: Pace(item.pace, item.rounds_uncounted) for item in message.holdings}
        return cls(
            cursor=message.cursor,
            returned=tuple((piece.start, piece.end) for piece in message.returned),
            holdings={
                holding.peer_id: tuple((piece.start, piece.end) for piece in holding.ranges)
                for holding in message.holdings
            },
            paces={peer: pace for peer, pace in paces.items() if pace != Pace()},
            epoch_samples=message.epoch_samples,
            routes_begun=message.routes_begun,
        )

    def pace(self, peer: str) -> Pace:
        """Return a member's pace."""
        return self.paces.get(peer, Pace())


def _check_ranges(message: manifest_pb2.DataPosition) -> None:
    held = [piece for holding in message.holdings for piece in holding.ranges]
    if len(message.returned) + len(message.holdings) + len(held) > MAX_RANGES:
        raise PeerMisbehaved(f"a data position has more than {MAX_RANGES} ranges and holders")
    if any(piece.end < piece.start for piece in [*message.returned, *held]):
        raise PeerMisbehaved("a data range ends before it starts")


def genesis_position(members: Sequence[str], samples_each: int, epoch_samples: int = 0) -> DataPosition:
    """Return the position at genesis: equal ranges in the order of `members`."""
    holdings = {peer: ((i * samples_each, (i + 1) * samples_each),) for i, peer in enumerate(members)}
    return DataPosition(len(members) * samples_each, holdings=holdings, epoch_samples=epoch_samples)


def first_lease_samples(round_samples: int, members: int, turns: int = 1) -> int:
    """Return the first lease while no pace is known: an equal share of `FIRST_ROUNDS` times `turns` rounds.

    `turns`: rounds until a member's samples count again, because each cut of the model has its own round. A member that
    is more than `FIRST_ROUNDS` times as fast as the average consumes its lease before its first round commits. It then
    repeats its own samples. Its next lease follows its pace.
    """
    return -(-FIRST_ROUNDS * turns * round_samples // max(1, members))


def with_first_leases(
    position: DataPosition, began: Sequence[tuple[int, int, str]], round_samples: int, turns: int = 1
) -> DataPosition:
    """Return the position with a first lease for each driver that holds nothing.

    `began`: for each driver, the plan with which its route began, the route's number, and the driver. All first leases
    at one position have the same length. Routes are numbered in the order in which they begin, and the number
    determines the place of the driver's lease. So no later plan moves a lease. Older plans lack these numbers; then
    leases follow one another in the order in which routes began.
    """
    newcomers = sorted(item for item in began if not position.holdings.get(item[2]))
    if not newcomers:
        return position
    lease = min(round_samples, _Leases(position, round_samples, turns).first())
    places = [number - position.routes_begun for _, number, _ in newcomers]
    if not position.routes_begun or min(places) < 0 or len(set(places)) < len(places):
        places = list(range(len(newcomers)))
    pool, holdings = _Pool(position), dict(position.holdings)
    passed: list[SampleRange] = []
    following = 0
    for place, (_, _, peer) in sorted(zip(places, newcomers, strict=True)):
        passed += pool.take((place - following) * lease)
        holdings[peer] = _merge_adjacent(pool.take(lease))
        following = place + 1
    pool.give_back(passed)
    cursor, returned = pool.rest()
    return replace(position, cursor=cursor, returned=returned, holdings=holdings)


def advance(
    position: DataPosition,
    members: Sequence[str],
    consumed: Mapping[str, int],
    round_samples: int,
    turns: int = 1,
    routes_begun: int = 0,
) -> DataPosition:
    """Return the position after a round in which each member consumed `consumed` samples.

    `round_samples`: what the whole swarm consumes in a round, which also bounds every pace. `turns`: as in
    `first_lease_samples`. `routes_begun`: number of routes started under the round's plan.

    A member may report more samples than it held, because it repeats its last samples after its ranges are used up. Its
    remaining ranges are then empty. Raises `PeerMisbehaved` for a negative count.
    """
    if any(count < 0 for count in consumed.values()):
        raise PeerMisbehaved("a member reports a negative number of consumed samples")
    present = sorted(set(members))
    returned = [*position.returned]
    for peer in sorted(set(position.holdings) - set(present)):
        returned += position.holdings[peer]
    left: dict[str, tuple[SampleRange, ...]] = {}
    paces: dict[str, Pace] = {}
    for peer in present:
        held = position.holdings.get(peer, ())
        used = min(consumed.get(peer, 0), sample_count(held))
        left[peer] = drop_samples(held, used)
        paces[peer] = _pace_after(position.pace(peer), used, not left[peer], round_samples)
        if paces[peer].uncounted > RETURN_ROUNDS * turns:
            returned += left[peer]
            left[peer], paces[peer] = (), Pace()
    before = replace(position, returned=_merge_adjacent(sorted(returned)), holdings=left, paces=paces)
    leases = _Leases(before, round_samples, turns)
    pool = _Pool(before, leases.boundary)
    for peer in sorted(present, key=leases.hunger):
        missing, of_epoch = leases.missing(peer)
        if missing:
            end = left[peer][-1][1] if left[peer] else -1
            left[peer] = _merge_adjacent([*left[peer], *pool.take(missing, end, of_epoch)])
    cursor, rest = pool.rest()
    known = {peer: pace for peer, pace in paces.items() if pace != Pace()}
    begun = max(position.routes_begun, routes_begun)
    return DataPosition(cursor, rest, left, known, position.epoch_samples, begun)


def goes_on(before: Sequence[SampleRange], consumed: int, now: Sequence[SampleRange]) -> bool:
    """Return whether `now` begins with the samples that remain of `before` after `consumed` samples.

    If not, the member's samples were given to others, and it must drop its training on them.
    """
    left = _merge_adjacent(drop_samples(before, consumed))
    return _merge_adjacent(_split_at(list(now), sample_count(left))[0]) == left


def sample_count(ranges: Sequence[SampleRange]) -> int:
    """Return how many samples the ranges contain."""
    return sum(end - start for start, end in ranges)


def drop_samples(ranges: Sequence[SampleRange], count: int) -> tuple[SampleRange, ...]:
    """Return the ranges without their first `count` samples; empty if they have fewer."""
    return tuple(_split_at(list(ranges), count)[1])


class _Leases:
    """Computes how many samples each member gets. `position`: the position before any refill."""

    def __init__(self, position: DataPosition, round_samples: int, turns: int) -> None:
        self._holdings, self._turns = position.holdings, turns
        known = [pace.samples for pace in position.paces.values() if pace.samples]
        members = max(1, len(position.holdings))
        counted = min(sum(known), round_samples)
        self._mean = max(1, counted // len(known) if known else round_samples // members)
        self._total = max(1, min(counted + self._mean * (members - len(known)), round_samples))  # samples a round
        pieces = [*position.returned, *(piece for ranges in position.holdings.values() for piece in ranges)]
        consumed, epoch = position.cursor - sample_count(pieces), position.epoch_samples
        self.boundary = (consumed // epoch + 1) * epoch if epoch else 0  # the end of this epoch
        self._until_boundary = self.boundary - consumed
        self._rest = _below(pieces, self.boundary) + max(0, self.boundary - position.cursor)  # of this epoch
        paces = {peer: position.pace(peer) for peer in position.holdings}
        self._unknown = {peer for peer, pace in paces.items() if not pace.samples}
        self._paces = {peer: pace.samples or self._mean for peer, pace in paces.items()}
        self._left = {  # samples that each member still has if it also trained in rounds that did not count it
            peer: max(0, sample_count(ranges) - self._paces[peer] * paces[peer].uncounted)
            for peer, ranges in position.holdings.items()
        }

    def first(self) -> int:
        """Return the length of the lease of a member whose pace is unknown."""
        return max(1, self._at_most(FIRST_ROUNDS, self._mean))

    def hunger(self, peer: str) -> tuple[int, str]:
        """Sort key: the members whose samples last the shortest time come first."""
        return (self._left[peer] << 32) // self._paces[peer], peer

    def missing(self, peer: str) -> tuple[int, int | None]:
        """Return how many samples a member gets, and how many of them may be of this epoch (None: any number)."""
        pace, left = self._paces[peer], self._left[peer]
        full = self.first() if peer in self._unknown else self._at_most(FULL_ROUNDS, pace)
        if left >= min(full, REFILL_ROUNDS * self._turns * pace):
            return 0, 0
        if not self.boundary:
            return full - left, None
        share = -(-self._rest * pace // self._total)
        return full - left, max(0, share - _below(self._holdings[peer], self.boundary))

    def _at_most(self, rounds: int, pace: int) -> int:
        """Return the length of a lease of `rounds` rounds.

        Towards the end of an epoch it is at most half of the rest.
        """
        usual = rounds * self._turns * pace
        if not self.boundary:
            return usual
        short = -(-SHORT_PERCENT * self._turns * pace // 100)
        return max(short, min(usual, self._until_boundary * pace // (2 * self._total)))


class _Pool:
    """Samples that no member holds: returned ranges, and all from the cursor on. No range crosses `boundary`."""

    def __init__(self, position: DataPosition, boundary: int = 0) -> None:
        self._boundary, self._cursor = boundary, position.cursor
        new = [(self._cursor, boundary)] if self._cursor < boundary else []
        self._end_of_new = boundary if new else -1
        self._cursor = max(self._cursor, boundary)
        cut = ([(start, min(end, boundary)), (max(start, boundary), end)] for start, end in position.returned)
        self._pieces = [*(piece for pair in cut for piece in pair if piece[0] < piece[1]), *new]

    def take(self, count: int, after: int = -1, most_below: int | None = None) -> list[SampleRange]:
        """Take `count` samples: first the returned range that begins at `after`, if any, then the lowest numbers.

        At most `most_below` of them are below the boundary.
        """
        below = count if most_below is None else most_below
        taken: list[SampleRange] = []

        def place(piece: SampleRange) -> tuple[bool, SampleRange]:
            return piece[0] != after or piece[1] == self._end_of_new, piece

        pieces, self._pieces = sorted(self._pieces, key=place), []
        for start, end in pieces:
            is_below = start < self._boundary
            middle = min(end, start + (min(count, below) if is_below else count))
            if middle > start:
                taken.append((start, middle))
                count -= middle - start
                below -= middle - start if is_below else 0
            if end > middle:
                self._pieces.append((middle, end))
        if count:
            taken.append((self._cursor, self._cursor + count))
            self._cursor += count
        return taken

    def give_back(self, ranges: Sequence[SampleRange]) -> None:
        """Put samples back into the pool."""
        self._pieces += ranges

    def rest(self) -> tuple[int, tuple[SampleRange, ...]]:
        """Return the cursor and the returned ranges, ascending. None of them ends at the cursor."""
        returned, cursor = list(_merge_adjacent(sorted(self._pieces))), self._cursor
        if returned and returned[-1][1] == cursor:
            cursor = returned.pop()[0]
        return cursor, tuple(returned)


def _pace_after(pace: Pace, used: int, is_dry: bool, round_samples: int) -> Pace:
    """Return a member's pace after a round that counted `used` samples of it.

    If a member used up all its samples, it may be faster than measured, so they count twice.
    """
    if not used:
        return Pace(pace.samples, pace.uncounted + 1)
    last = min(round_samples, -(-(used << is_dry) // (pace.uncounted + 1)))
    return Pace(-(-(pace.samples + last) // 2) if pace.samples else last)


def _below(ranges: Sequence[SampleRange], boundary: int) -> int:
    """Return how many samples of the ranges are below `boundary`."""
    return sum(max(0, min(end, boundary) - start) for start, end in ranges)


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
