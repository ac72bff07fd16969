"""Durable rows of the coordinator, as plain frozen dataclasses.

Each class is one table: the field names are the column names, and `KEY` names the primary key. The state machine
makes these rows, and a `Store` keeps them; nothing else is durable. Times are milliseconds since the Unix epoch.
Signed messages are stored as the exact bytes that were signed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

MAX_INTEGER = 2**62  # highest number in a row: databases store 63 bits
SHA256_BYTES = 32


@dataclass(frozen=True)
class Token:
    """A join token; only the hash of its secret is stored."""

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
    on_probation: bool = False  # nodes admitted by this token start on probation


@dataclass(frozen=True)
class Node:
    """An enrolled peer, one field a column. `epoch` grows with each membership certificate."""

    KEY: ClassVar[tuple[str, ...]] = ("peer_id",)

    peer_id: str
    name: str
    run_id: str
    roles: tuple[str, ...]
    public_key: bytes
    epoch: int
    enrolled_ms: int
    last_seen_ms: int = 0  # at the last connect or disconnect; later times are only in memory
    banned: bool = False
    draining: bool = False
    left: bool = False
    multiaddrs: tuple[str, ...] = ()  # stored so that seeds are known right after a restart
    token_id: str = ""  # the token that admitted it last
    pin: str = ""  # by the operator: layers as "0-5", or "out"; empty: none
    there_seconds: float = 0.0  # time with an open stream, decayed (`state/availability.py`)
    away_seconds: float = 0.0  # time without a stream, decayed
    losses: float = 0.0  # disconnects without an announced leave, decayed
    on_probation: bool = False  # it has a small weight in rounds (`live/probation.py`)
    replaced_by: str = ""  # peer id of the node's next identity (`runs/identity_rotation.py`); this row is then banned
    rotated_ms: int = 0  # when this identity replaced another; 0: it never did
    rotations: int = 0  # number of rotations since a token last admitted it
    moved_from: str = ""  # the run that it was in before; empty: none
    assigned_run: str = ""  # the run to which it shall move (`runs/assignment.py`); empty: it stays
    ended: str = ""  # why its last process ended, a `NodeReason` without its prefix; cleared when the next one connects
    ended_detail: str = ""  # one sentence of that process
    authority: str = ""  # hex SHA-256 of the CA that issued its last TLS certificate; empty: the first CA


@dataclass(frozen=True)
class Run:
    """A training run. `state` is a name of `RunState` without its prefix."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id",)

    run_id: str
    spec_toml: str  # with all defaults written out
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
    plan_floor: int = 0  # after a restore: higher plans up to this version may have been issued
    rounds_opened: int = 0  # number of attempts that are known or must have existed; rows of old ones are deleted
    parts_zeroed: int = 0  # in all known rounds
    sources: str = ""  # of the newest evaluation
    source_names: tuple[str, ...] = ()  # of its evaluations; at most 64 (`rounds/source_losses.py`)
    # highest plan version of a deleted run of this name; this run's plans must have higher versions
    plans_before: int = 0


@dataclass(frozen=True)
class PlanRow:
    """A signed plan."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "version")

    run_id: str
    version: int
    sealed: bytes  # Signed, context "plan"
    issued_ms: int


@dataclass(frozen=True)
class PlanFigures:
    """Facts about a plan version that are not part of the signed plan."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "version")

    run_id: str
    version: int
    reason: str
    issued_ms: int
    nodes: int
    routes: int
    predicted_tokens_per_second: float = 0.0  # 0: not predicted
    measured_tokens_per_second: float = 0.0  # average of the sum over its drivers; 0: not measured
    measured_seconds: float = 0.0
    moved_bytes: float = 0.0  # of anchor and momentum, fetched by its members
    left_out: str = "{}"  # JSON: peer id → reason why it has no place


@dataclass(frozen=True)
class Round:
    """Outcome of one attempt at one round, one field a column.

    Its opener reports it. A committed round that was learned from another node's manifest has `seconds` 0.
    """

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
    tokens: int = 0  # counted in this round
    committed_tokens: int = 0  # sum over the run up to this round
    members: int = 0  # number of contributors
    parts_zeroed: int = 0
    manifest_hash: bytes = b""
    manifest: bytes = b""  # CommittedManifest, when committed
    previous_hash: bytes = b""
    made_under: int = 0  # plan version of the manifest: of this attempt, or of an earlier attempt
    present: tuple[str, ...] = ()  # peer ids of the nodes present at its end
    partial: int = 0  # number of contributors that are missing from some sums
    screened: tuple[str, ...] = ()  # peer ids that screening excluded from more than half of all parts
    codec: str = ""  # of its exchange
    seats: tuple[str, ...] = ()  # seats that decide the next round, in the order of opening


@dataclass(frozen=True)
class Vote:
    """The promise and vote of the coordinator's seat for one undecided round."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "number")

    run_id: str
    number: int
    promised_plan: int  # with `promised_attempt`: the promise to cast no vote in earlier attempts
    promised_attempt: int
    voted_plan: int = 0
    voted_attempt: int = 0
    proposal: bytes = b""  # the Proposal that got the last vote; empty: none yet


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that a node reports."""

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
        """The layers in the checkpoint."""
        return range(self.first_layer, self.last_layer + 1)


@dataclass(frozen=True)
class Evaluation:
    """Validation loss of the anchor of one committed round."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "round")

    run_id: str
    round: int
    loss: float  # nats per token
    committed_tokens: int
    sources: str = ""  # losses by source, of a corpus with several (`rounds/source_losses.py`)


@dataclass(frozen=True)
class NodeMetrics:
    """One node's metrics of one round, as it reported them (`rounds/node_metrics.py`). 0: not measured."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "round", "peer_id")

    run_id: str
    round: int
    peer_id: str
    reported_ms: int
    train_loss: float  # nats per token
    learning_rate: float
    tokens: int  # trained
    seconds: float  # since the node had the previous round
    update_norm: float  # of the pseudo-gradient that it exchanged
    compute_seconds: float
    stall_seconds: float
    exchange_seconds: float
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class DenyRow:
    """A signed deny-list; the one with the highest number is in force.

    A restore stores the list again under a higher number than any that may have been issued since the backup. The
    next list is numbered above that.
    """

    KEY: ClassVar[tuple[str, ...]] = ("number",)

    number: int
    sealed: bytes  # Signed, context "deny-list"


@dataclass(frozen=True)
class Event:
    """One row of the event log. Ids grow by one."""

    KEY: ClassVar[tuple[str, ...]] = ("event_id",)

    event_id: int
    unix_ms: int
    kind: str
    run_id: str
    subject: str
    message: str


@dataclass(frozen=True)
class ProofRow:
    """A proof that a member broke a rule (`core/proofs.py`); one for each member and run bounds their number."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "culprit")

    run_id: str
    culprit: str  # peer id
    proof_id: str
    kind: str
    round: int
    found_ms: int
    sentence: str  # the statement that it proves
    proof: bytes  # serialised Proof


@dataclass(frozen=True)
class Credit:
    """One node's contribution to a run, as counted by the manifests of committed rounds (`rounds/credits.py`)."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id", "peer_id")

    run_id: str
    peer_id: str  # the node's newest identity; empty: sum over all forgotten nodes
    tokens: int
    rounds: int  # number of rounds with a contribution of the node
    first_ms: int  # when the first of these rounds committed
    last_ms: int  # when the last of these rounds committed


@dataclass(frozen=True)
class DeletedRun:
    """Record of a deleted run. Members may still have its plans, which the operator signed."""

    KEY: ClassVar[tuple[str, ...]] = ("run_id",)

    run_id: str
    plan_version: int  # the highest version that may have been issued
    deleted_ms: int


@dataclass(frozen=True)
class ForgottenNode:
    """Record of a forgotten node, with the reason to refuse it, until its certificates have expired."""

    KEY: ClassVar[tuple[str, ...]] = ("peer_id",)

    peer_id: str
    name: str
    run_id: str
    run_deleted: bool  # whether it was forgotten together with its run
    epoch: int  # of its last membership certificate
    forgotten_ms: int
    replaced_by: str = ""  # its next identity


Record = (
    Token
    | Node
    | Run
    | PlanRow
    | PlanFigures
    | Round
    | Vote
    | Checkpoint
    | Evaluation
    | NodeMetrics
    | DenyRow
    | Event
    | ProofRow
    | Credit
    | DeletedRun
    | ForgottenNode
)
RECORDS: tuple[type[Record], ...] = (
    Token,
    Node,
    Run,
    PlanRow,
    PlanFigures,
    Round,
    Vote,
    Checkpoint,
    Evaluation,
    NodeMetrics,
    DenyRow,
    Event,
    ProofRow,
    Credit,
    DeletedRun,
    ForgottenNode,
)
OF_RUN: tuple[type[Record], ...] = (  # tables whose rows belong to one run
    Token,
    Node,
    Run,
    PlanRow,
    PlanFigures,
    Round,
    Vote,
    Checkpoint,
    Evaluation,
    NodeMetrics,
    Event,
    ProofRow,
    Credit,
)


@dataclass(frozen=True)
class Delete:
    """Order to delete the row with this key."""

    record: type[Record]
    key: tuple[str | int, ...]


@dataclass(frozen=True)
class Thin:
    """Order to delete old rounds, losses and metrics of a run, and manifests of older rounds (`retention.py`).

    Rounds of checkpoints are kept, and also those in `kept`, which nodes that moved to another run have.
    """

    run_id: str
    head_round: int
    kept: tuple[int, ...] = ()


@dataclass(frozen=True)
class DropMetrics:
    """Order to delete the metrics of a run's rounds after this one, which a recovery discarded."""

    run_id: str
    after_round: int


@dataclass(frozen=True)
class DropRun:
    """Order to delete all rows of a run (`OF_RUN`)."""

    run_id: str


Change = Record | Delete | Thin | DropMetrics | DropRun
