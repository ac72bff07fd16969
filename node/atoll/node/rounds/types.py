"""Events and actions of the round machine: plain data without behaviour."""

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
    """The phase of a node in a round."""

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

    The timeouts are upper limits. Measured times of earlier rounds shorten them (core/learned_deadline.py).
    """

    run_id: str
    fragments: tuple[Fragment, ...]  # of the flat vector; rounds take turns
    part_elements: int  # at most, in a part
    codecs: tuple[str, ...]  # that rounds may use, the most precise first
    screen: Screen | None  # None: contributions are not judged
    due_tokens: Callable[[int, int], int]  # (committed tokens, members) → tokens since the head that make a round due
    round_max: timedelta
    exchange_share: float  # largest share of the time between the starts of two exchanges
    stop_tokens: int
    round_samples: int  # samples that the whole swarm consumes in a round; leases are multiples of it
    ready_timeout: timedelta = timedelta(seconds=15)  # Open → every Ready: includes the rest of an inner step
    exchange_timeout: timedelta = timedelta(seconds=60)
    decision_timeout: timedelta = timedelta(seconds=20)  # Settle → Commit: repair, outer step, votes
    stall: timedelta = timedelta(seconds=0.5)  # in an exchange: no peer is given up for a shorter silence
    open_timeout: timedelta = timedelta(seconds=2)  # after which the next seat in the order opens
    report_interval: timedelta = timedelta(seconds=1)  # at most; `lately` is a multiple of it

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return self.fragments[-1].end_layer

    def fragment_of(self, number: int) -> Fragment:
        """The fragment that round `number` averages."""
        return self.fragments[fragment_of_round(number, len(self.fragments))]


class VoteSigner(Protocol):
    """Makes and checks signatures."""

    def vote(self, payload: bytes, ballot: Ballot) -> pb.Signed:
        """Our own vote."""
        ...

    def check_vote(self, payload: bytes, ballot: Ballot, signature: pb.Signed, peer: str) -> None:
        """Raise `AtollError` unless `peer` cast this vote."""
        ...

    def attest(self, payload: bytes) -> pb.Signed:
        """Our own attestation, as a holder, of this result."""
        ...

    def attested_by(self, payload: bytes, attestation: pb.Signed) -> str:
        """The peer that made this attestation. Raises `AtollError` if the signature is invalid."""
        ...

    def check_commit(self, committed: manifest_pb2.CommittedManifest, electorate: Electorate) -> Head:
        """The head, if its votes are a quorum. Raises `AtollError`."""
        ...


# --- events ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlanReceived:
    """A verified plan. The machine adopts it once no attempt is under way."""

    plan: Plan


@dataclass(frozen=True)
class HeadMoved:
    """State was fetched from others: this node is now at `head`."""

    head: Head


@dataclass(frozen=True)
class Progress:
    """Tokens trained since the head, seconds of an inner step, and tokens trained since the snapshot."""

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
    """The trainer froze its pseudo-gradient for `round_id`. With 0 tokens there is nothing to contribute.

    `tokens` were trained since the last round of this fragment that counted ours; `samples` since any round that did.
    """

    round_id: RoundId
    tokens: int
    samples: int


@dataclass(frozen=True)
class ExchangeDone:
    """The exchange is over here: digests of the averaged parts (empty: missing).

    `verdicts` are ours as a reducer, ordered by contributor. `nonce` is random and reported with them.
    """

    round_id: RoundId
    digests: tuple[bytes, ...]
    verdicts: tuple[manifest_pb2.Verdict, ...]
    nonce: bytes = b""


@dataclass(frozen=True)
class Staged:
    """The average is complete and the outer step is staged. `layers` has the digests."""

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
    """A pledge could not be written to disk, so its `message` was not sent."""

    message: dp.RoundMessage


@dataclass(frozen=True)
class SendFailed:
    """A message of ours is too large to send. `reason` names its kind and size."""

    message: dp.RoundMessage
    reason: str


@dataclass(frozen=True)
class CoordinatorVote:
    """The coordinator's answer to `AskCoordinator`. Not granted if the coordinator cannot be reached."""

    round_id: RoundId
    proposal: bytes  # serialised; empty: the question was for a promise
    granted: bool
    voted: LastVote | None  # its last vote before
    vote: pb.Signed | None
    reason: str


@dataclass(frozen=True)
class Lost:
    """The connection to a member broke. The member may be dead, or may dial again soon."""

    peer: str


@dataclass(frozen=True)
class Leave:
    """The owner wants this node to leave. The next round is its last and must open now."""


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
    """Write `record` to disk, and only then deliver the message. A message to this node itself becomes `Received`.

    If the write fails, answer with `PledgeFailed`.
    """

    record: VoteRecord
    peer: str
    message: dp.RoundMessage


@dataclass(frozen=True)
class SharePlan:
    """`peer` follows an older plan: send it our plan with the operator's signature."""

    peer: str


@dataclass(frozen=True)
class Freeze:
    """Ask the trainer for a snapshot of the fragment; answer with `Frozen` or `Failed`."""

    round_id: RoundId
    fragment: Fragment


@dataclass(frozen=True)
class RunExchange:
    """All-reduce the frozen pseudo-gradients. Always answer with `ExchangeDone`, even if other members fail."""

    round_id: RoundId
    start: dp.Start
    seconds: float  # at most
    fragment: Fragment


@dataclass(frozen=True)
class Complete:
    """Repair and zero parts as `settle` says, then stage the outer step. Answer with `Staged` or `Failed`."""

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
    """The attempt ended here without a commit: stop its exchange.

    `thaw`: no other member saw the snapshot, so it is dropped and the next snapshot contains all progress. A staged
    result that this node voted for stays, because it may still be committed.
    """

    round_id: RoundId
    thaw: bool


class Counted(Enum):
    """How much of a node's progress a committed result contains."""

    NOTHING = auto()  # all of the progress is kept
    SNAPSHOT = auto()  # only what was trained since the snapshot remains
    UNKNOWN = auto()  # unknown, or a snapshot that was replaced since: nothing remains


@dataclass(frozen=True)
class Install:
    """The round is committed. The state that `head` names becomes the anchor, if this node holds its layers."""

    head: Head
    opened_here: bool  # this node opened the round, so it reports and evaluates
    counted: Counted


@dataclass(frozen=True)
class CatchUp:
    """Others are ahead: fetch their head. Answer with `HeadMoved`."""

    reason: str


@dataclass(frozen=True)
class ContributorsMissing:
    """A reducer reports that its sums lack these contributors, whose tokens then do not count.

    Logged, as it is not proven.
    """

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
