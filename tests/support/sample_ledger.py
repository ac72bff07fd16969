"""A run without a model, which keeps a ledger: how often a committed round holds a training of each sample.

Members consume samples at their own paces through the shipped `SampleFeed` and `Progress`, and the shipped rules of
`core/data_position.py` say who holds which. There is no clock: a round is due when its members have trained
`round_samples`. Members die, drain, come back and restart; some stall, and some rounds are committed without a member.
Plans change several times in a round. All draws follow from the seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.core.data_position import (
    DataPosition,
    SampleRange,
    advance,
    first_lease_samples,
    genesis_position,
    goes_on,
    with_first_leases,
)
from atoll.node.training.progress import Progress
from atoll.node.training.sample_feed import SampleFeed

_NAME_LETTERS = 52  # of a peer id, which positions contain
_PLANS_AT = (0.1, 0.4, 0.7, 0.9)  # when plans change: parts of a round, the exchange included


@dataclass(frozen=True)
class Setting:
    """What happens in a run. Shares are of the members, each round."""

    members: int
    samples_each: int = 32  # that a member of mean pace trains in a round
    epoch_rounds: int = 100
    seed: int = 0
    fastest: float = 4.0  # times the pace of the slowest
    noise: float = 0.1  # standard deviation of a member's pace from round to round
    exchange: float = 0.2  # part of a round, in which members train on
    replaced: float = 0.05
    die: float = 0.5  # of those that are replaced; the others drain
    come_back: float = 0.3  # of newcomers are members that left
    restarts: float = 0.01
    stalls: float = 0.02  # for a round or two
    left_out: float = 0.03  # a round is committed without them

    @property
    def round_samples(self) -> int:
        return self.members * self.samples_each

    @property
    def epoch(self) -> int:
        return self.epoch_rounds * self.round_samples


PEACE = {"noise": 0.0, "replaced": 0.0, "restarts": 0.0, "stalls": 0.0, "left_out": 0.0}


@dataclass(frozen=True)
class Shares:
    """Of the samples of an epoch: how often committed rounds hold them."""

    never: float
    lost: float  # of these: in flight when a node died, so that a round counted them without an update
    once: float
    more: float

    @property
    def coverage(self) -> float:
        """Share that committed rounds hold, up to what was in flight when a node died."""
        return 1.0 - self.never + self.lost


@dataclass
class Outcome:
    """What the ledger shows of the first epoch."""

    at_epoch: Shares | None = None  # when as many trainings are committed as the epoch has samples
    at_end: Shares | None = None  # when no sample of the epoch is held, returned or new any more
    rounds: int = 0  # until the first of the two moments
    rounds_to_end: int = 0
    position_bytes: list[int] = field(default_factory=list)
    ranges: list[int] = field(default_factory=list)
    piece_samples: float = 0.0  # mean length of the pieces that members trained
    piece_rounds: float = 0.0  # the same, in rounds of the member's own consumption
    doubled: dict[str, int] = field(default_factory=dict)  # trainings of a sample that was committed before, by cause


class Member:
    """A driver: what it trained that no committed round holds yet."""

    def __init__(self, name: str, pace: float, since: int, number: int) -> None:
        self.name, self.pace, self.since, self.number = name, pace, since, number
        self.speed = pace  # in this round
        self.stalled_rounds = 0
        self.owed = 0.0  # part of a sample
        self.trained_samples, self.pieces, self._last = 0, 0, -2
        self.restart(())

    def restart(self, ranges: tuple[SampleRange, ...]) -> None:
        """Begin at the anchor."""
        self.progress = Progress()
        self.trained, self.repeated = list[int](), list[bool]()  # since the last round that counted it
        self.marked = 0  # how much of it the snapshot contains
        self.set_ranges(ranges)

    def set_ranges(self, ranges: tuple[SampleRange, ...]) -> None:
        """As `Replica.set_ranges`."""
        self.ranges = ranges
        self.feed = SampleFeed(ranges, skip=self.progress.samples)

    def train(self, rounds: float) -> None:
        """Consume what its speed allows in this part of a round."""
        self.owed += rounds * self.speed
        count = int(self.owed)
        self.owed -= count
        if self.feed.empty or not count:
            return
        taken = self.feed.take(count)
        self.progress.add(count, taken)
        self.trained += taken.samples
        self.repeated += [False] * taken.fresh + [True] * taken.repeated
        self.trained_samples += count
        for sample in taken.samples:
            self.pieces += sample != self._last + 1
            self._last = sample

    def snapshot(self) -> int:
        """Return how many fresh samples the snapshot contains."""
        self.marked = len(self.trained)
        return self.progress.mark_snapshot().samples

    def commit(self, ranges: tuple[SampleRange, ...]) -> list[tuple[int, bool]]:
        """A round holds the snapshot: return its samples, and whether each is repeated."""
        contents = list(zip(self.trained[: self.marked], self.repeated[: self.marked], strict=True))
        del self.trained[: self.marked], self.repeated[: self.marked]
        self.progress.commit_snapshot()
        self.set_ranges(ranges)
        return contents


class Swarm:
    """The run. `round` trains and commits one round."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self._random = setting, random.Random(setting.seed)
        self.version, self._names, self._serial = 1, 0, 0
        self.members: dict[str, Member] = {}
        self._gone: list[str] = []
        self._draining: list[str] = []
        for _ in range(setting.members):
            self._join(self._new_name())
        each = first_lease_samples(setting.round_samples, setting.members)
        self.head = genesis_position(sorted(self.members), each, setting.epoch)
        for name, member in self.members.items():
            member.restart(self.head.holdings[name])
        self.plan = {name: (member.since, member.number) for name, member in self.members.items()}
        self.next_plan, self.plan_serial = self.plan, self._serial
        self.counts = bytearray(setting.epoch)  # of the first epoch: committed trainings of each sample
        self.lost: set[int] = set()
        self.committed = self.rounds = 0
        self.outcome = Outcome()

    # --- members ---------------------------------------------------------------------------------------

    def _new_name(self) -> str:
        self._names += 1
        return f"{self._random.getrandbits(4 * _NAME_LETTERS):0{_NAME_LETTERS}x}"

    def _join(self, name: str) -> Member:
        pace = self._random.uniform(1.0, self.setting.fastest)
        mean = (1.0 + self.setting.fastest) / 2
        member = Member(name, pace / mean * self.setting.samples_each, self.version, self._serial)
        self._serial += 1
        self.members[name] = member
        return member

    def _chance(self, share: float) -> list[str]:
        """Draw members, each with the probability `share`."""
        return [name for name in sorted(self.members) if self._random.random() < share]

    # --- plans -------------------------------------------------------------------------------------------

    def position(self, plan: Mapping[str, tuple[int, int]]) -> DataPosition:
        """The position at the head under `plan`."""
        began = [(since, number, name) for name, (since, number) in plan.items()]
        return with_first_leases(self.head, began, self.setting.round_samples)

    def _change_plan(self, leaves: list[str], joins: int) -> None:
        """Issue a plan. Newcomers begin under it at once, with the samples that it gives them at this head."""
        if not leaves and not joins:
            return
        self.version += 1
        for name in leaves:
            del self.members[name]
            self._gone.append(name)
        new = []
        for _ in range(joins):
            known = [name for name in self._gone if name not in self.plan and name not in leaves]
            back = known and self._random.random() < self.setting.come_back
            name = self._random.choice(known) if back else self._new_name()
            if back:
                self._gone.remove(name)
            new.append(self._join(name))
        self.next_plan = {name: (member.since, member.number) for name, member in self.members.items()}
        position = self.position(self.next_plan)
        for member in new:
            member.restart(position.holdings[member.name])

    def _adopt_plan(self) -> None:
        """Between rounds: all members follow the newest plan."""
        if self.plan == self.next_plan:
            return
        self.plan, self.plan_serial = self.next_plan, self._serial
        position = self.position(self.plan)
        for name, member in self.members.items():
            if member.ranges != position.holdings[name]:
                member.set_ranges(position.holdings[name])

    # --- a round -----------------------------------------------------------------------------------------

    def round(self) -> None:
        """Train until a round is due, exchange, commit."""
        setting, draw = self.setting, self._random
        replaced = [name for name in self._chance(setting.replaced) if name not in self._draining]
        dies = {name: draw.choice(_PLANS_AT) for name in replaced if draw.random() < setting.die}
        joins = [draw.choice(_PLANS_AT) for _ in replaced]
        restarts = {name: draw.choice(_PLANS_AT) for name in self._chance(setting.restarts) if name not in dies}
        for name in self._chance(setting.stalls):
            self.members[name].stalled_rounds = draw.choice((1, 2))
        left_out = set(self._chance(setting.left_out))
        for member in self.members.values():
            member.speed = 0.0 if member.stalled_rounds else member.pace * max(0.2, draw.gauss(1.0, setting.noise))
        leaving, self._draining = self._draining, [name for name in replaced if name not in dies]
        length, until_snapshot, now = self._length(), 1.0 - setting.exchange, 0.0
        snapshots: dict[str, int] = {}
        dead: dict[str, Member] = {}
        restarted: set[str] = set()
        for moment in _PLANS_AT:
            if now < until_snapshot <= moment:
                self._train((until_snapshot - now) * length)
                now, snapshots = until_snapshot, self._snapshots(left_out)
            self._train((moment - now) * length)
            now = moment
            gone = [name for name in sorted(self.members) if dies.get(name) == moment]
            dead |= {name: self.members[name] for name in gone if name in snapshots}
            if moment == _PLANS_AT[0]:
                gone += [name for name in leaving if name in self.members and name not in gone]
            self._change_plan(gone, joins.count(moment))
            if not snapshots:
                self._adopt_plan()
            for name, when in restarts.items():
                if when == moment and name in self.members:
                    self._restart(self.members[name], snapshots, restarted)
        self._train((1.0 - now) * length)
        self._commit(snapshots, dead, restarted)

    def _length(self) -> float:
        """Part of a round of mean length until enough is trained. The first epoch ends with a round."""
        rest = self.setting.epoch - self.committed
        due = min(self.setting.round_samples, rest) if rest > 0 else self.setting.round_samples
        return due / (sum(member.speed for member in self.members.values()) or 1.0)

    def _train(self, rounds: float) -> None:
        for member in self.members.values():
            member.train(rounds)

    def _snapshots(self, left_out: set[str]) -> dict[str, int]:
        """The exchange begins: how many fresh samples each contribution holds."""
        taking_part = [name for name in self.plan if name in self.members and name not in left_out]
        return {name: self.members[name].snapshot() for name in taking_part if not self.members[name].stalled_rounds}

    def _restart(self, member: Member, snapshots: dict[str, int], restarted: set[str]) -> None:
        """It begins again at the anchor. If others have its snapshot, the round still counts that."""
        if member.name in snapshots:
            for sample in member.trained[: member.marked]:
                self._count(sample, "restart")
            restarted.add(member.name)
        member.restart(self.position(self.next_plan).holdings[member.name])

    def _commit(self, snapshots: dict[str, int], dead: dict[str, Member], restarted: set[str]) -> None:
        """Commit a round that counts all snapshots. Those of members that died in the exchange are in no sum."""
        for member in dead.values():
            self.lost.update(member.trained[: member.marked])
        before = self.position(self.plan)
        self.head = advance(
            before, sorted(self.plan), snapshots, self.setting.round_samples, routes_begun=self.plan_serial
        )
        self.rounds += 1
        self.plan, self.plan_serial = self.next_plan, self._serial
        position = self.position(self.plan)
        for name, member in self.members.items():
            ranges = position.holdings[name]
            went_on = goes_on(member.ranges, snapshots.get(name, 0), ranges)
            if name in restarted:
                member.progress.subtract_consumed(snapshots[name])
                member.set_ranges(ranges)
            elif name in snapshots:
                for sample, repeated in member.commit(ranges):
                    self._count(sample, "repeated" if repeated else "fresh")
            else:
                member.progress.discard_snapshot()
                member.set_ranges(ranges)
            if not went_on:  # as the engine: others got its samples
                member.restart(ranges)
            member.stalled_rounds = max(0, member.stalled_rounds - 1)
        self._look()

    def _count(self, sample: int, cause: str) -> None:
        self.committed += 1
        if sample < len(self.counts):
            if self.counts[sample]:
                self.outcome.doubled[cause] = self.outcome.doubled.get(cause, 0) + 1
            self.counts[sample] = min(255, self.counts[sample] + 1)

    # --- what it came to ---------------------------------------------------------------------------------

    def _look(self) -> None:
        outcome, epoch = self.outcome, self.setting.epoch
        message = self.head.to_proto()
        outcome.position_bytes.append(message.ByteSize())
        outcome.ranges.append(len(message.returned) + sum(len(item.ranges) for item in message.holdings))
        if outcome.at_epoch is None and self.committed >= epoch:
            outcome.at_epoch, outcome.rounds = self.shares(), self.rounds
        if outcome.at_end is None and self._is_through():
            outcome.at_end, outcome.rounds_to_end = self.shares(), self.rounds

    def _is_through(self) -> bool:
        pieces = [*self.head.returned, *(piece for ranges in self.head.holdings.values() for piece in ranges)]
        return self.head.cursor >= self.setting.epoch and all(
            start >= self.setting.epoch for start, end in pieces if end > start
        )

    def shares(self) -> Shares:
        """How often committed rounds hold the samples of the first epoch."""
        epoch = self.setting.epoch
        never, once = self.counts.count(0), self.counts.count(1)
        lost = sum(sample < epoch and not self.counts[sample] for sample in self.lost)
        return Shares(never / epoch, lost / epoch, once / epoch, (epoch - never - once) / epoch)


def run(setting: Setting) -> Outcome:
    """Run until both moments have passed, or for as many rounds as two epochs have."""
    swarm, members = Swarm(setting), dict[int, Member]()
    while swarm.rounds < 2 * setting.epoch_rounds and None in (swarm.outcome.at_epoch, swarm.outcome.at_end):
        swarm.round()
        members |= {id(member): member for member in swarm.members.values()}
    pieces = sum(member.pieces for member in members.values())
    swarm.outcome.piece_samples = sum(member.trained_samples for member in members.values()) / max(1, pieces)
    swarm.outcome.piece_rounds = sum(m.trained_samples / m.pace for m in members.values()) / max(1, pieces)
    return swarm.outcome
