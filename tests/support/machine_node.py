"""One node of a simulated run: a round machine and what stands around it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from support.machine_plans import GENESIS, POLICY

from atoll.core.manifest import Head
from atoll.core.quorum import Ballot, VoteRecord
from atoll.core.round_id import RoundId
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.types import Counted
from atoll.v1 import dataplane_pb2 as dp

BLANK = VoteRecord(0, b"", Ballot(0, 0))  # of a node that got its identity just now


@dataclass
class Disk:
    """What survives SIGKILL."""

    record: VoteRecord | None = BLANK  # None: it was lost
    known: Head = GENESIS
    checkpoint: Head = GENESIS
    full: bool = False  # nothing new can be written
    backups: list["Disk"] = field(default_factory=list)  # the newest last

    def knows(self, head: Head) -> None:
        """`head` was seen committed."""
        if not self.full:
            self.known = max(self.known, head, key=lambda item: item.round)

    def save(self, head: Head) -> None:
        """A checkpoint of `head`."""
        if not self.full:
            self.checkpoint = head


@dataclass(frozen=True)
class Snapshot:
    """Tokens (start, end] of a life, in these layers."""

    layers: range
    start: int
    end: int


@dataclass(eq=False)
class Node:
    """One life of a member."""

    peer: str
    machine: RoundMachine
    disk: Disk
    skew: float  # of its clock, seconds
    incarnation: int = 0
    up: bool = True
    frozen: bool = False  # SIGSTOP
    leaving: bool = False
    catching_up: bool = False
    looked_at: float = 0.0  # when it last had another head, or asked others for theirs
    heard: int = 0  # the newest plan's version
    trained: int = 0  # tokens of this incarnation
    spent: int = 0  # of them, counted in committed rounds or given up
    counted: dict[int, int] = field(default_factory=dict)  # layer → tokens that its last round with us holds
    snapshot: Snapshot | None = None
    frozen_at: int = 0  # tokens at the last snapshot
    parts: dict[RoundId, tuple[bytes, ...]] = field(default_factory=dict)
    starts: dict[RoundId, dp.Start] = field(default_factory=dict)
    staged: set[bytes] = field(default_factory=set)  # digests of states that it holds beside its head
    backlog: list[tuple[Callable[..., None], tuple]] = field(default_factory=list)  # what came while it was frozen
    busy_in: RoundId | None = None
    busy_since: float = 0.0

    @property
    def alive(self) -> bool:
        """Whether it does anything."""
        return self.up and not self.frozen

    def busy_for(self, now: float) -> float:
        """Seconds that its machine is in one attempt; every attempt ends by its deadlines."""
        following = self.machine._attendance.following
        attempt = None if following is None else following.round_id
        if attempt != self.busy_in:
            self.busy_in, self.busy_since = attempt, now
        return 0.0 if attempt is None else now - self.busy_since

    def settle(self, counted: Counted) -> None:
        """A round was committed that holds the snapshot, or perhaps one before it: then all progress is dropped."""
        if counted is Counted.UNKNOWN:
            self.spent = self.trained
            self.counted = dict.fromkeys(range(POLICY.layers), self.trained)
        elif counted is Counted.SNAPSHOT:
            assert self.snapshot is not None
            self.spent = self.snapshot.end
            self.counted |= dict.fromkeys(self.snapshot.layers, self.snapshot.end)

    def move(self) -> None:
        """It stands at another head: what belonged to the last one is gone."""
        self.snapshot = None
        self.parts, self.staged = {}, set()
