"""What goes into the round machine and what comes out of it: plain data, no behaviour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum, auto
from typing import Protocol

from atoll.core.fragments import Fragment, fragment_of_round
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.quorum import Ballot, Electorate, LastVote, VoteRecord
from atoll.core.round_id import RoundId
from atoll.node.exchange.auditor import Dispute
from atoll.node.exchange.screening import Screen
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

PolicyOf = Callable[[Plan], "RoundPolicy"]


class Phase(Enum):
    """Where a node stands in a round."""

    IDLE = auto()
    FREEZING = auto()
    READY = auto()
    EXCHANGING = auto()
    AWAITING_SETTLE = auto()
    STAGING = auto()
    AWAITING_COMMIT = auto()


@dataclass(frozen=True)
class RoundPolicy:
    """What every member knows before a round: from the run spec, the layer table, and the cuts of its plan.

    The timeouts are ceilings; what was observed of earlier rounds shortens them (core/learned_deadline.py).
    """

    run_id: str
    fragments: tuple[Fragment, ...]  # of the flat vector; rounds take turns
    part_elements: int  # that a part has at most
    codecs: tuple[str, ...]  # that rounds may use, the most precise first
    screen: Screen | None  # None: contributions are not judged
    due_tokens: Callable[[int, int], int]  # (committed tokens, members) → tokens since the head that make a round due
    round_max: timedelta
    exchange_share: float  # of the time from one exchange's begin to the next's, at most
    stop_tokens: int
    round_samples: int  # that the whole swarm consumes in a round: what leases are measured in
    ready_timeout: timedelta = timedelta(seconds=15)  # Open → every Ready: includes the rest of an inner step
    exchange_timeout: timedelta = timedelta(seconds=60)
    decision_timeout: timedelta = timedelta(seconds=20)  # Settle → Commit: repair, outer step, votes
    stall: timedelta = timedelta(seconds=0.5)  # in an exchange: nobody is given up for a shorter silence
    open_timeout: timedelta = timedelta(seconds=2)  # after which the next in the order opens
    report_interval: timedelta = timedelta(seconds=1)  # at most, and what `lately` is measured in

    @property
    def layers(self) -> int:
        """How many the model has."""
        return self.fragments[-1].end_layer

    def fragment_of(self, number: int) -> Fragment:
        """What round `number` averages."""
        return self.fragments[fragment_of_round(number, len(self.fragments))]


class VoteSigner(Protocol):
    """Signatures, made and checked."""

    def vote(self, payload: bytes, ballot: Ballot) -> pb.Signed:
        """Our own vote."""
        ...

    def check_vote(self, payload: bytes, ballot: Ballot, signature: pb.Signed, peer: str) -> None:
        """Raise `AtollError` unless `peer` cast this vote."""
        ...

    def attest(self, payload: bytes) -> pb.Signed:
        """Our own word, as a holder, that this is the result."""
        ...

    def attested_by(self, payload: bytes, attestation: pb.Signed) -> str:
        """The peer whose word this is. Raises `AtollError` for a word that nobody gave."""
        ...

    def check_commit(self, committed: manifest_pb2.CommittedManifest, electorate: Electorate) -> Head:
        """The head, if its votes are enough. Raises `AtollError`."""
        ...


# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanReceived:
    """A verified plan. The machine adopts it as soon as no round is in the way."""

    plan: Plan


@dataclass(frozen=True)
class HeadMoved:
    """State was fetched from others: this node now stands at `head`."""

    head: Head


@dataclass(frozen=True)
class Progress:
    """Tokens that this node trained since its head, what an inner step takes, and what came after the snapshot."""

    tokens: int
    step_seconds: float = 0.0
    tokens_since_snapshot: int = 0


@dataclass(frozen=True)
class Received:
    """A message from an authenticated member."""

    peer: str
    message: dp.RoundMessage


@dataclass(frozen=True)
class Frozen:
    """The trainer froze its pseudo-gradient for `round_id`; no tokens: there is nothing to bring.

    `tokens` were trained since this fragment was last averaged with ours, `samples` since any was.
    """

    round_id: RoundId
    tokens: int
    samples: int


@dataclass(frozen=True)
class ExchangeDone:
    """The exchange is over here: digests of the averaged parts (empty: missing).

    `verdicts` are ours as a reducer, ordered by contributor. `nonce` is random, and told with them.
    """

    round_id: RoundId
    digests: tuple[bytes, ...]
    verdicts: tuple[manifest_pb2.Verdict, ...]
    nonce: bytes = b""


@dataclass(frozen=True)
class Staged:
    """The average is complete and the outer step is staged, with these digests."""

    round_id: RoundId
    layers: tuple[manifest_pb2.LayerState, ...]


@dataclass(frozen=True)
class Failed:
    """Freezing, repairing or staging failed here, or the audit found averages that are not the sums."""

    round_id: RoundId
    reason: str
    disputes: tuple[Dispute, ...] = ()


@dataclass(frozen=True)
class PledgeFailed:
    """What would have bound us is not on disk, so nobody was told: the message of that `Pledge` is undelivered."""

    message: dp.RoundMessage


@dataclass(frozen=True)
class SendFailed:
    """A message of ours is too large to be sent, to anybody; `reason` names its kind and size."""

    message: dp.RoundMessage
    reason: str


@dataclass(frozen=True)
class CoordinatorVote:
    """The coordinator's answer to `AskCoordinator`; not granted when it cannot be reached."""

    round_id: RoundId
    proposal: bytes  # serialised; empty: a promise was asked for
    granted: bool
    voted: LastVote | None  # what it voted for before
    vote: pb.Signed | None
    reason: str


@dataclass(frozen=True)
class Lost:
    """The connection to a member broke. It may be dead, or only be about to dial again."""

    peer: str


@dataclass(frozen=True)
class Leave:
    """The owner wants this node to go: the next round is its last, and shall open now."""


@dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = (
    PlanReceived
    | HeadMoved
    | Progress
    | Received
    | Frozen
    | ExchangeDone
    | Staged
    | Failed
    | PledgeFailed
    | SendFailed
    | CoordinatorVote
    | Lost
    | Leave
    | Tick
)

# --- actions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Deliver a message to another member, in order, with a deadline."""

    peer: str
    message: dp.RoundMessage


@dataclass(frozen=True)
class Pledge:
    """Make `record` durable, and only then deliver the message, to ourselves as `Received` too.

    Where that fails, answer with `PledgeFailed`.
    """

    record: VoteRecord
    peer: str
    message: dp.RoundMessage


@dataclass(frozen=True)
class SharePlan:
    """`peer` follows an older plan: send it ours as the operator signed it."""

    peer: str


@dataclass(frozen=True)
class Freeze:
    """Ask the trainer for a snapshot of the fragment; answer with `Frozen` or `Failed`."""

    round_id: RoundId
    fragment: Fragment


@dataclass(frozen=True)
class RunExchange:
    """All-reduce the frozen pseudo-gradients; answer with `ExchangeDone` whatever happens to others."""

    round_id: RoundId
    start: dp.Start
    seconds: float  # at most
    fragment: Fragment


@dataclass(frozen=True)
class Complete:
    """Repair and zero parts as settled, stage the outer step; answer with `Staged` or `Failed`."""

    round_id: RoundId
    settle: dp.Settle
    seconds: float


@dataclass(frozen=True)
class AskCoordinator:
    """Ask for a promise (empty proposal) or a vote; answer with `CoordinatorVote`."""

    round_id: RoundId
    proposal: bytes  # serialised


@dataclass(frozen=True)
class Release:
    """The attempt is over here without a commit: stop its exchange.

    `thaw`: nobody saw the snapshot, so it is given up and the next one holds all progress. What was staged under a
    vote of ours stays, because it may still be committed.
    """

    round_id: RoundId
    thaw: bool


class Counted(Enum):
    """What of a node's progress a committed result holds."""

    NOTHING = auto()  # all of it remains progress
    SNAPSHOT = auto()  # only what was trained since remains
    UNKNOWN = auto()  # a snapshot that made room for a later one, or the result is not known: none remains


@dataclass(frozen=True)
class Install:
    """The round is committed: the state that `head` names becomes the anchor, where this node holds its layers."""

    head: Head
    opened_here: bool  # this node opened the round, so it reports and evaluates
    counted: Counted


@dataclass(frozen=True)
class CatchUp:
    """Others are ahead: fetch their head; answer with `HeadMoved`."""

    reason: str


@dataclass(frozen=True)
class ContributorsMissing:
    """A reducer says that its sums lack these, whose tokens do not count then. It is believed, so it is named."""

    round_id: RoundId
    reducer: str
    contributors: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """How an attempt that this node opened ended, for the round log."""

    round_id: RoundId
    manifest: manifest_pb2.CommittedManifest | None
    reason: str
    seconds: float


Action = (
    Send
    | Pledge
    | SharePlan
    | Freeze
    | RunExchange
    | Complete
    | AskCoordinator
    | Release
    | Install
    | CatchUp
    | ContributorsMissing
    | Report
)
