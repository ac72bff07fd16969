"""What the coordinator must never forget, as plain frozen rows.

Each class is one table: the field names are the column names, and `KEY` names the primary key. The state
machine makes these rows; a `Store` keeps them; nothing else is durable. Times are milliseconds since the
Unix epoch. Signed things keep the exact bytes that were signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Token:
    """A join token. The secret itself is in nobody's table."""

    KEY: ClassVar[tuple[str, ...]] = ("token_id",)

    token_id: str
    secret_hash: str
    run_id: str
    roles: tuple[str, ...]
    uses_total: int
    uses_left: int
    created_ms: int
    expires_ms: int
    revoked: bool = False


@dataclass(frozen=True)
class Node:
    """An enrolled peer. `epoch` grows with each certificate it is given."""

    KEY: ClassVar[tuple[str, ...]] = ("peer_id",)

    peer_id: str
    name: str
    run_id: str
    roles: tuple[str, ...]
    public_key: bytes
    epoch: int
    enrolled_ms: int
    last_seen_ms: int = 0  # as of the last connect or disconnect; live figures are in memory
    banned: bool = False
    draining: bool = False
    left: bool = False
    multiaddrs: tuple[str, ...] = ()  # kept so that seeds are known right after a restart
    token_id: str = ""  # that admitted it last
    pin: str = ""  # the operator's: layers "0-5", or "out"; empty: none
    there_seconds: float = 0.0  # with a stream, faded (`presence.py`)
    away_seconds: float = 0.0  # without one
    losses: float = 0.0  # without a goodbye


@dataclass(frozen=True)
class Run:
    """One training job. `state` is a name of `RunState` without its prefix."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id",)

    run_id: str
    spec_toml: str  # with every default written out
    state: str
    created_ms: int
    corpus_digest: str = ""  # hex; decided at genesis
    layers: bytes = b""  # LayerTable, once genesis is written
    genesis: bytes = b""  # CommittedManifest of round 0
    plan_version: int = 0
    head_round: int = 0
    committed_tokens: int = 0
    loss_round: int = 0  # of the newest evaluation
    loss: float = 0.0  # nats per token; 0: none yet
    plan_floor: int = 0  # after a restore: plans up to here may have been issued and are forgotten
    rounds_opened: int = 0  # attempts that were ever reported; rows of old abandoned ones are dropped


@dataclass(frozen=True)
class PlanRow:
    """A plan as it was signed."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "version")

    run_id: str
    version: int
    sealed: bytes  # Signed, context "plan"
    issued_ms: int


@dataclass(frozen=True)
class PlanFigures:
    """What is known of a version of a plan beside what was signed."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "version")

    run_id: str
    version: int
    reason: str
    issued_ms: int
    nodes: int
    routes: int
    predicted_tokens_per_second: float = 0.0  # 0: not predicted
    measured_tokens_per_second: float = 0.0  # of its drivers, on average; 0: not measured
    measured_seconds: float = 0.0
    moved_bytes: float = 0.0  # of anchor and momentum, that its members had to fetch
    left_out: str = "{}"  # JSON: why each of these peers has no part


@dataclass(frozen=True)
class Round:
    """How one attempt at one round ended, as its opener told it."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "number", "plan_version", "fragment", "attempt")

    run_id: str
    number: int
    plan_version: int
    fragment: int
    attempt: int
    committed: bool
    reason: str
    opener: str
    seconds: float
    reported_ms: int
    wire_bytes: int = 0
    tokens: int = 0  # contributed in this round
    committed_tokens: int = 0  # of the whole run, this round included
    members: int = 0  # that contributed
    parts_zeroed: int = 0
    manifest_hash: bytes = b""
    manifest: bytes = b""  # CommittedManifest, when committed
    previous_hash: bytes = b""
    made_under: int = 0  # plan version of the manifest: that of the attempt, or an earlier one's
    present: tuple[str, ...] = ()  # peer ids of those that decide the next round
    partial: int = 0  # members that are missing from some of the sums
    screened: tuple[str, ...] = ()  # peer ids: screening left them out of more than half of all parts
    codec: str = ""  # that its exchange used


@dataclass(frozen=True)
class WaitingRound:
    """A report of a committed round that cannot be judged yet: the round before it is not known here."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "number", "peer_id")

    run_id: str
    number: int
    peer_id: str  # who told it
    report: bytes  # RoundReport; the signatures on its manifest are genuine
    told_ms: int


@dataclass(frozen=True)
class Vote:
    """What the coordinator promised and voted for as the tie-breaker of one round that it knows no outcome of."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "number")

    run_id: str
    number: int
    promised_plan: int  # no votes in earlier attempts: plan version and attempt
    promised_attempt: int
    voted_plan: int = 0
    voted_attempt: int = 0
    payload: bytes = b""  # the Manifest voted for last; empty: none yet


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a node said it holds."""

    KEY: ClassVar[tuple[str, ...]] = ("peer_id", "round")

    peer_id: str
    round: int
    run_id: str
    manifest_hash: bytes
    size_bytes: int  # of all its files
    written_ms: int
    committed_tokens: int
    first_layer: int = 0
    last_layer: int = 0  # inclusive

    @property
    def layers(self) -> range:
        """That it holds."""
        return range(self.first_layer, self.last_layer + 1)


@dataclass(frozen=True)
class Evaluation:
    """Validation loss of the anchor of one committed round."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "round")

    run_id: str
    round: int
    loss: float  # nats per token
    committed_tokens: int


@dataclass(frozen=True)
class DenyRow:
    """A deny-list as it was signed; the highest number is in force.

    A restore keeps the list and writes it under a higher number than any that may have been issued and forgotten:
    the next list is numbered above that.
    """

    KEY: ClassVar[tuple[str, ...]] = ("number",)

    number: int
    sealed: bytes  # Signed, context "deny-list"


@dataclass(frozen=True)
class Event:
    """One line of the event log. Ids grow by one."""

    KEY: ClassVar[tuple[str, ...]] = ("event_id",)

    event_id: int
    unix_ms: int
    kind: str
    run_id: str
    subject: str
    message: str


Record = (
    Token | Node | Run | PlanRow | PlanFigures | Round | WaitingRound | Vote | Checkpoint | Evaluation | DenyRow | Event
)
RECORDS: tuple[type[Record], ...] = (
    Token,
    Node,
    Run,
    PlanRow,
    PlanFigures,
    Round,
    WaitingRound,
    Vote,
    Checkpoint,
    Evaluation,
    DenyRow,
    Event,
)


@dataclass(frozen=True)
class Delete:
    """No row, but the order to remove the one with this key."""

    record: type[Record]
    key: tuple[str | int, ...]


Change = Record | Delete
