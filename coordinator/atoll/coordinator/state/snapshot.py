"""State of the whole coordinator as one immutable value, and the draft from which the next state is made.

Durable rows (`store/records.py`) and state that lasts only as long as a connection (`LiveNode`) are held together,
so that a decision reads one value. A function of the machine takes a `State` and a `StepTime`, works on a `Draft`,
and returns a `Step`: the next state, the rows to make durable *before any response leaves*, and what the operator
key has to sign. Nothing here does I/O.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from atoll.coordinator.planner.question import Answer, PathMeasurement, Preferences, Question
from atoll.coordinator.state.rate_limits import STORED_ROWS_RATE, Allowance
from atoll.coordinator.store.records import (
    Change,
    Checkpoint,
    Delete,
    DeletedRun,
    DropMetrics,
    DropRun,
    Evaluation,
    Event,
    ForgottenNode,
    Node,
    NodeMetrics,
    PlanFigures,
    PlanRow,
    ProofRow,
    Round,
    Run,
    Thin,
    Token,
    Vote,
)
from atoll.coordinator.store.retention import KEPT_COMMITS
from atoll.core.membership import EMPTY_DENY_LIST, DenyList
from atoll.core.plan import Base, Plan
from atoll.core.quorum import Electorate
from atoll.core.run_spec import RunSpec
from atoll.v1 import membership_pb2 as mb

T = TypeVar("T")
AttemptKey = tuple[int, int, int, int]  # number, plan version, fragment, attempt
KEPT_EVENTS = 100_000
KEPT_PLANS = 256  # of a run; plans that set a base are kept in addition
KEPT_ATTEMPTS = 4096  # abandoned attempts of a run


@dataclass(frozen=True)
class StepTime:
    """The current time, read once per step: wall-clock for people and certificates, monotonic for deadlines."""

    unix_ms: int
    monotonic: float


@dataclass(frozen=True)
class Policy:
    """Timeouts and intervals in seconds, and the preferences of plans."""

    silence_seconds: float = 15.0  # a stream without a heartbeat for this long is ended
    lost_after_seconds: float = 20.0  # a node without a stream for this long leaves the plan
    debounce_seconds: float = 1.0  # changes this close together make one plan
    plan_interval_seconds: float = 10.0  # between two plans, unless waiting would stop the run
    reshare_after_seconds: float = 60.0  # other shares of reducing must have been better for this long
    replan_seconds: float = 120.0  # routes are replanned after this long, because links and speeds drift
    solve_seconds: float = 2.0  # search time of the planner
    prepare_seconds: float = 60.0  # for nodes to fetch layers before a plan assigns them, plus the transfer time
    solve_steps: int | None = None  # most steps of a search; set where its result must repeat
    standby_seconds: float = 10.0  # a node without a place becomes a standby after this long: others may join
    resume_seconds: float = 5.0  # after a pause, nodes have this long to reconnect before the plan changes
    genesis_seconds: float = 600.0  # to write the genesis anchor before another node is asked
    recover_seconds: float = 10.0  # the whole electorate must report older rounds for this long before a recovery
    lost_layers_seconds: float = 60.0  # all holders of some layers must report them lost for this long before it
    preferences: Preferences = field(default_factory=Preferences)


@dataclass(frozen=True)
class LiveNode:
    """Reports of a node since this process started. `session` 0: no stream is open.

    Its fields are many because every report of a node is kept here, each replaced on its own.
    """

    session: int
    last_message_at: float  # monotonic; the end of the stream if none is open
    counted_as_lost: bool = False
    connected_at: float = 0.0  # monotonic, when its stream was opened
    stays_in_run: bool = False  # its owner lets nobody move it to another run
    instance: bytes = b""  # of the process that has the stream; empty: it did not say
    challenge: bytes = b""  # that it was given because another process claims the identity (`runs/identity_claims`)
    challenge_answered: bool = False
    promised: bytes = b""  # serialised `Promise`, the newest that this process told
    promised_before: bytes = b""  # likewise, an earlier process of the node
    unfit_since: float | None = None  # monotonic, since when its state is not eligible for training
    unfit_round: int = 0  # the newest committed round at that time
    status: mb.NodeStatus = field(default_factory=mb.NodeStatus)
    profile: mb.NodeProfile = field(default_factory=mb.NodeProfile)
    paths: Mapping[str, PathMeasurement] = field(default_factory=dict)  # to other members, by peer id
    corpus_digest: str = ""
    layers: bytes = b""  # LayerTable of the run's model, as reported before genesis
    former_checkpoints: tuple[Checkpoint, ...] = ()  # of other runs, on its disk
    drain_since: float | None = None  # monotonic, since when it is asked to leave, or may leave
    handing_over: bool = False  # draining, but not ordered yet: others fetch its layers first
    row_allowance: Allowance = field(default_factory=Allowance)
    refusal_allowance: Allowance = field(default_factory=Allowance)
    metrics_allowance: Allowance = field(default_factory=Allowance)
    pending_metrics: Mapping[int, NodeMetrics] = field(default_factory=dict)  # by round, not stored yet
    memory_change_allowance: Allowance = field(default_factory=Allowance)
    dropped_reports: int = 0  # reports beyond the allowances, not logged yet
    dropped_since: float = 0.0  # monotonic

    @property
    def connected(self) -> bool:
        """True if a heartbeat stream is open."""
        return self.session != 0

    def begun_anew(self, now: float) -> LiveNode:
        """Without a stream and without what the node reported; its allowances are not refilled."""
        kept = ("allowance", "dropped_")
        said = {item.name: getattr(self, item.name) for item in fields(self) if any(word in item.name for word in kept)}
        return LiveNode(session=0, last_message_at=now, counted_as_lost=True, **said)  # not there yet: that is no loss


@dataclass(frozen=True)
class Commit:
    """Facts about a committed round that later decisions need."""

    manifest_hash: bytes
    plan_version: int = 0  # of its manifest; 0: genesis, before any plan
    committed_tokens: int | None = 0  # of the run up to this round; None: the round was never reported
    previous_hash: bytes = b""
    present: frozenset[str] = frozenset()  # peer ids, at its end
    seats: tuple[str, ...] = ()  # that decide the next round, unless a base names others
    opener: str = ""  # peer id
    members: int = 0  # contributors
    partial: int = 0  # contributors missing from some sums
    screened: int = 0  # contributors that screening excluded from more than half of all parts
    parts_zeroed: int = 0
    attempt: AttemptKey | None = None  # the attempt that committed
    reported: bool = True  # by its opener; else learned from a manifest
    committed_ms: int = 0  # when the coordinator learned of it


@dataclass(frozen=True)
class Inquiry:
    """Question to nodes for committed rounds that the coordinator lacks (`rounds/learner.py`)."""

    first: int  # the first round asked for
    since: float  # monotonic, of the question; if nobody is asked, since when nothing changed
    peer_id: str = ""  # the node that is asked; empty: nobody
    failed: frozenset[str] = frozenset()  # nodes that were asked in vain
    unable: frozenset[str] = frozenset()  # those of them that answered, and have no such round
    agreed: Mapping[str, bytes] | None = None  # by peer id: manifest hash of round `first`; None: not after a gap


@dataclass(frozen=True)
class ForkInquiry:
    """Question to a node whose head contradicts the log, for the rounds up to that head (`runs/forks.py`)."""

    peer_id: str
    first: int  # the first round asked for
    last: int
    since: float  # monotonic, of the question
    began: float  # monotonic, of the first question about this head


@dataclass(frozen=True)
class Fork:
    """Two results of one round, until the run goes on from the log."""

    round: int
    since: float  # monotonic, when it was found


@dataclass(frozen=True)
class TrainingScore:
    """What one audit of a member's training found (`rounds/training_scores.py`)."""

    round: int
    auditor: str  # peer id
    score: float | None  # None: the member did not give its contribution
    fragment: int = 0  # that the round averaged


@dataclass(frozen=True)
class TrainingComparison:
    """One member's audits beside those of the others."""

    audits: int
    score: float  # what the median auditor found, in the mean of its audits
    typical: float  # the median of the members' scores
    doubted: bool
    proved: bool = False  # enough audits found that it trains about as much as others


@dataclass(frozen=True)
class PlanJoins:
    """Number of recent times that a node joined a run's plan."""

    count: int = 0
    at: float = 0.0  # monotonic, of the last one


@dataclass(frozen=True)
class AnsweredQuestion:
    """The planner's question that was answered last."""

    nodes: tuple[tuple[object, ...], ...]  # candidates, each with the figures that decide its place
    at: float  # monotonic


@dataclass(frozen=True)
class Preparation:
    """A plan to be issued once its nodes have fetched their layers."""

    question: Question
    answer: Answer
    spans: Mapping[str, range]  # by peer id: next spans of nodes that lack some of their layers
    since: float  # monotonic


@dataclass(frozen=True)
class PendingFetch:
    """A fetch of layers outside the plan, for a standby or a second copy."""

    span: range
    since: float  # monotonic


@dataclass(frozen=True)
class CheckpointOrder:
    """The operator's order to write a checkpoint (`runs/checkpoint_orders.py`)."""

    wanted: int  # the round, or a newer one
    target: int  # that nodes are told now, at least `wanted`
    target_since: float  # monotonic
    asked_at: float  # monotonic, when the operator asked last


@dataclass(frozen=True)
class RunMemory:
    """State of a run that is rebuilt at start: parsed documents, indices, timers (monotonic).

    It is one class because `Draft.remember` replaces fields by name, and rules of all rooms read several of them.
    """

    spec: RunSpec
    plan: Plan | None = None
    token_caps: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # plan version → member → tokens a round
    on_probation: Mapping[int, frozenset[str]] = field(default_factory=dict)  # plan version → members on probation
    cut_counts: Mapping[int, int] = field(default_factory=dict)  # plan version → number of cuts between its spans
    abandoned_attempts: frozenset[AttemptKey] = frozenset()  # those whose rows are kept
    committed: Mapping[int, Commit] = field(default_factory=dict)  # newest rounds by number; no void ones (`compact`)
    inquiry: Inquiry | None = None  # present while a connected node has a newer round
    recent_manifests: Mapping[int, bytes] = field(default_factory=dict)  # CommittedManifest by number, newest rounds
    fork_inquiry: ForkInquiry | None = None
    fork: Fork | None = None
    contradictions: Mapping[str, float] = field(default_factory=dict)  # by peer id: when it was asked about its head
    head_known_since: float = 0.0  # monotonic, since when the newest round is known
    commit_seconds: float = 0.0  # between the last two rounds that were reported one after the other; 0: not known
    resumed_ms: int = 0  # when the last pause ended; 0: none since this process started
    raise_allowances: Mapping[str, Allowance] = field(default_factory=dict)  # by opener, for raising attempts
    plan_joins: Mapping[str, PlanJoins] = field(default_factory=dict)  # by peer id
    votes: Mapping[int, Vote] = field(default_factory=dict)  # by number of each undecided round
    bases: tuple[Base, ...] = ()  # of all plans, each once, the newest last
    void_manifest_hashes: frozenset[bytes] = frozenset()  # of rounds that a recovery made void
    recoverable_since: float | None = None  # monotonic, since when the newest round is lost to its electorate
    training_scores: Mapping[str, tuple[TrainingScore, ...]] = field(default_factory=dict)  # by peer id, newest last
    training_compared: Mapping[str, TrainingComparison] = field(default_factory=dict)  # by peer id, of these scores
    sources_evaluated: int = 0  # rounds whose losses by source came since the start, from members not on probation
    source_seen: Mapping[str, int] = field(default_factory=dict)  # by source: which of those had it last
    genesis_writer: str = ""  # peer id
    genesis_writer_since: float = 0.0
    failed_genesis_writers: frozenset[str] = frozenset()  # asked in vain
    kept_rounds: tuple[int, ...] = ()  # of which nodes keep checkpoints, because forks begin with them
    most_common_corpus_digest: str = ""  # the digest that most fit nodes share, as last counted before genesis
    logged_corpus_mismatches: Mapping[str, str] = field(default_factory=dict)  # by peer id: the differing digest
    changed_since: float | None = None  # since when the wanted plan differs from the current one
    changed_why: str = ""  # in members, reach or links
    no_plan_before: float = 0.0
    question: Question | None = None  # waiting for the planner's answer
    questions_asked: int = 0
    question_nodes: tuple[tuple[object, ...], ...] = ()  # of that question; see `AnsweredQuestion`
    answered_question: AnsweredQuestion | None = None
    preparation: Preparation | None = None  # of the next plan
    standby_fetches: Mapping[str, PendingFetch] = field(default_factory=dict)  # by peer id of the standby
    copy_fetches: Mapping[str, PendingFetch] = field(default_factory=dict)  # by peer id of the stage that copies
    fetch_timeouts: Mapping[str, float] = field(default_factory=dict)  # by peer id: when such a fetch timed out
    copies_checked_at: float | None = None  # when the nodes that should hold copies were last computed
    unconfirmed_takeovers: Mapping[str, float] = field(
        default_factory=dict
    )  # by peer id: when it took over unconfirmed
    no_question_before: float = 0.0  # after a route was shortened, it trains again before the planner is asked
    prepare_retry_at: Mapping[str, float] = field(default_factory=dict)  # by peer id, after a fetch that timed out
    shares_checked_at: float | None = None  # when other shares of reducing were last compared
    new_shares_pay: bool = False  # result of that comparison
    left_out: Mapping[str, str] = field(default_factory=dict)  # by peer id: why it has no place in the plan
    claim_doubts: Mapping[str, str] = field(default_factory=dict)  # by peer id: how its claims differ from measurements
    corrections: Mapping[str, float] = field(default_factory=dict)  # by peer id: see `Measured.learned`
    no_plan_reason: str = ""  # why no plan is possible now
    undecidable_reason: str = ""  # why no plan may be issued now: too few voters are left
    undecidable_at: float = 0.0  # monotonic, when a plan was last refused for that
    plan_issued_at: float | None = None  # monotonic, of the newest plan; None: before this process started
    figures: PlanFigures | None = None  # of the newest plan
    sampled_at: float | None = None  # when its speed was last sampled
    predicted_version: int = 0  # version of the last plan whose prediction was requested
    checkpoint_order: CheckpointOrder | None = None  # by the operator


@dataclass(frozen=True)
class State:
    """The state of the whole coordinator."""

    operator_key: bytes = b""  # public key that signs the coordinator's votes
    tokens: Mapping[str, Token] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    runs: Mapping[str, Run] = field(default_factory=dict)
    memory: Mapping[str, RunMemory] = field(default_factory=dict)  # by run id
    live: Mapping[str, LiveNode] = field(default_factory=dict)  # by peer id
    checkpoints: Mapping[str, tuple[Checkpoint, ...]] = field(default_factory=dict)  # by peer id, newest first
    deleted_runs: Mapping[str, DeletedRun] = field(default_factory=dict)  # by run id
    forgotten: Mapping[str, ForgottenNode] = field(default_factory=dict)  # by peer id
    deny: DenyList = EMPTY_DENY_LIST
    deny_reserved: int = 0  # numbers up to this one may have been issued before a restore
    started_at: float = -math.inf  # monotonic, when this process took over
    last_event_id: int = 0
    last_session: int = 0

    def members_of(self, run_id: str) -> list[Node]:
        """Nodes and seeds enrolled in a run, ordered by peer id."""
        return sorted((node for node in self.present_nodes() if node.run_id == run_id), key=lambda node: node.peer_id)

    def present_nodes(self) -> list[Node]:
        """All nodes and seeds, each under its newest identity."""
        return [node for node in self.nodes.values() if not node.replaced_by]


@dataclass(frozen=True)
class Step(Generic[T]):
    """Result of one input."""

    state: State
    result: T
    records: tuple[Change, ...] = ()
    plans: tuple[Plan, ...] = ()  # to be signed
    deny: DenyList | None = None  # to be signed


def token_caps_of(plan: Plan) -> Mapping[str, int]:
    """Members of a plan, each with the most tokens that it may claim in a round."""
    return {item.peer_id: item.max_round_tokens for item in plan.assignments}


def attempt_key(row: Round) -> AttemptKey:
    """Key of an attempt within its run."""
    return (row.number, row.plan_version, row.fragment, row.attempt)


def commit_from_row(row: Round, before: Commit | None) -> Commit:
    """The `Commit` of a committed row. Shares present members and seats with `before` if they are equal."""
    present = frozenset(map(sys.intern, row.present))
    return Commit(
        manifest_hash=row.manifest_hash,
        plan_version=row.made_under,
        committed_tokens=row.committed_tokens,
        previous_hash=row.previous_hash,
        present=before.present if before is not None and before.present == present else present,
        seats=before.seats if before is not None and before.seats == row.seats else row.seats,
        opener=row.opener,
        members=row.members,
        partial=row.partial,
        screened=len(row.screened),
        parts_zeroed=row.parts_zeroed,
        attempt=attempt_key(row),
        reported=row.seconds > 0,
        committed_ms=row.reported_ms,
    )


def add_base(bases: tuple[Base, ...], base: Base) -> tuple[Base, ...]:
    """The bases of a run once a plan with `base` is known."""
    return bases if base in bases else (*bases, base)


def is_void(bases: tuple[Base, ...], number: int, made_under: int) -> bool:
    """True if a recovery made this round void, given the plan version under which it was made."""
    return any(number > base.round and made_under < base.since_version for base in bases)


def electorate_after(memory: RunMemory, number: int) -> Electorate | None:
    """Electorate of the round after `number` in the valid history; None if that round is unknown here."""
    seats = seats_after(memory, number)
    return None if seats is None else Electorate(frozenset(seats))


def seats_after(memory: RunMemory, number: int) -> tuple[str, ...] | None:
    """The same, in the order of opening."""
    commit = memory.committed.get(number)
    if commit is None:
        return None
    bases = reversed(memory.bases)
    return next((base.seats for base in bases if base.manifest_hash == commit.manifest_hash), commit.seats)


def epoch_of(bases: tuple[Base, ...], number: int) -> int:
    """The epoch that valid manifests of this round have."""
    return next((base.since_version for base in reversed(bases) if base.round < number), 0)


class Draft:
    """Collects the changes of one step. Tables are copied on first write, so the initial state never changes."""

    def __init__(self, state: State, now: StepTime) -> None:
        self.state = state
        self.now = now
        self._records: list[Change] = []
        self._plans: list[Plan] = []
        self._deny: DenyList | None = None

    def put(self, row: Token | Node | Run | DeletedRun) -> None:
        """Insert or replace a durable row."""
        match row:
            case Token():
                self._set("tokens", row.token_id, row)
            case Node():
                self._set("nodes", row.peer_id, row)
            case Run():
                self._set("runs", row.run_id, row)
            case DeletedRun():
                self._set("deleted_runs", row.run_id, row)
        self._records.append(row)

    def put_traces(self, traces: Sequence[ForgottenNode]) -> None:
        """Keep what is left of these nodes; the table is copied once."""
        self.state = replace(self.state, forgotten={**self.state.forgotten, **{it.peer_id: it for it in traces}})
        self._records += traces

    def drop_nodes(self, peer_ids: Set[str]) -> None:
        """Delete nodes' rows, their checkpoints' records and their live state."""
        held = self.state.checkpoints
        for peer_id in sorted(peer_ids):
            self._records.append(Delete(Node, (peer_id,)))
            self._records += [Delete(Checkpoint, (peer_id, item.round)) for item in held.get(peer_id, ())]
        for table in ("nodes", "checkpoints", "live"):
            self._unset(table, peer_ids)

    def drop_run(self, run_id: str) -> None:
        """Delete all rows of a run, among them its tokens and nodes, and their live state."""
        self._records.append(DropRun(run_id))
        self._unset("tokens", {token.token_id for token in self.state.tokens.values() if token.run_id == run_id})
        peers = {node.peer_id for node in self.state.nodes.values() if node.run_id == run_id}
        for table in ("nodes", "checkpoints", "live"):
            self._unset(table, peers)
        for table in ("runs", "memory"):
            self._unset(table, {run_id})

    def drop_traces(self, deleted_runs: Set[str], peer_ids: Set[str]) -> None:
        """Delete what is left of these deleted runs and forgotten nodes."""
        self._records += [Delete(DeletedRun, (run_id,)) for run_id in sorted(deleted_runs)]
        self._records += [Delete(ForgottenNode, (peer_id,)) for peer_id in sorted(peer_ids)]
        self._unset("deleted_runs", deleted_runs)
        self._unset("forgotten", peer_ids)

    def log(self, row: Round | Evaluation | NodeMetrics | ProofRow | DropMetrics) -> None:
        """Append a durable row to a log that is not held in memory."""
        self._records.append(row)

    def set_vote(self, vote: Vote) -> None:
        """Store the coordinator's promise or vote at one round number, durably."""
        self.remember(vote.run_id, votes={**self.state.memory[vote.run_id].votes, vote.number: vote})
        self._records.append(vote)

    def forget_votes(self, run_id: str, numbers: list[int]) -> None:
        """Delete the votes at these round numbers: the rounds are decided, or void."""
        if numbers:
            votes = self.state.memory[run_id].votes
            self.remember(run_id, votes={number: vote for number, vote in votes.items() if number not in numbers})
            self._records += [Delete(Vote, (run_id, number)) for number in numbers]

    def add_abandoned(self, run_id: str, key: AttemptKey) -> None:
        """Record an attempt whose row is kept; delete the oldest row beyond `KEPT_ATTEMPTS`."""
        kept = self.state.memory[run_id].abandoned_attempts | {key}
        if len(kept) > KEPT_ATTEMPTS:
            oldest = min(kept)
            kept -= {oldest}
            self._records.append(Delete(Round, (run_id, *oldest)))
        self.remember(run_id, abandoned_attempts=kept)

    def compact(self, run_id: str, elsewhere: tuple[int, ...]) -> None:
        """Forget old rounds, here and in the store. Genesis, the base, rounds of checkpoints and `elsewhere` stay."""
        run, memory = self.state.runs[run_id], self.state.memory[run_id]
        kept = {0, *(base.round for base in memory.bases), *elsewhere}
        kept |= {item.round for held in self.state.checkpoints.values() for item in held if item.run_id == run_id}
        oldest = run.head_round - KEPT_COMMITS
        committed = {number: commit for number, commit in memory.committed.items() if number > oldest or number in kept}
        self.remember(run_id, committed=committed)
        self._records.append(Thin(run_id, run.head_round, elsewhere))

    def set_checkpoints(self, peer_id: str, held: tuple[Checkpoint, ...]) -> None:
        """Replace all checkpoints of a node, the newest first."""
        before = {item.round: item for item in self.state.checkpoints.get(peer_id, ())}
        self._records += [item for item in held if before.pop(item.round, None) != item]
        self._records += [Delete(Checkpoint, (peer_id, number)) for number in before]
        self._set("checkpoints", peer_id, held)

    def remember(self, run_id: str, **changes: Any) -> None:
        """Replace fields of a run's memory. An unknown field name raises `TypeError`."""
        self._set("memory", run_id, replace(self.state.memory[run_id], **changes))

    def add_memory(self, run_id: str, memory: RunMemory) -> None:
        """Add the memory of a new run."""
        self._set("memory", run_id, memory)

    def set_live(self, peer_id: str, live: LiveNode) -> None:
        """Replace the live state of a node."""
        self._set("live", peer_id, live)

    def set_many_live(self, live: Mapping[str, LiveNode]) -> None:
        """Replace the live states of several nodes; the table is copied once."""
        self.state = replace(self.state, live={**self.state.live, **live})

    def event(self, kind: str, run_id: str, subject: str, message: str) -> None:
        """Append one row to the event log; delete the oldest beyond `KEPT_EVENTS`."""
        number = self.state.last_event_id + 1
        self.state = replace(self.state, last_event_id=number)
        self._records.append(Event(number, self.now.unix_ms, kind, run_id, subject, message))
        if number > KEPT_EVENTS:
            self._records.append(Delete(Event, (number - KEPT_EVENTS,)))

    def new_session(self) -> int:
        """Number of a new heartbeat stream."""
        self.state = replace(self.state, last_session=self.state.last_session + 1)
        return self.state.last_session

    def issue_plan(self, plan: Plan, figures: PlanFigures) -> None:
        """Make `plan` the run's newest; the operator key signs it before it is sent."""
        memory = self.state.memory[plan.run_id]
        bases = add_base(memory.bases, plan.base)
        caps = {**memory.token_caps, plan.version: token_caps_of(plan)}
        cuts = {**memory.cut_counts, plan.version: len(plan.cuts)}
        on_probation = {**memory.on_probation, plan.version: plan.on_probation}
        for version in sorted(caps)[:-KEPT_PLANS]:
            del caps[version]
            cuts.pop(version, None)
            on_probation.pop(version, None)
            if all(version != base.since_version for base in bases):
                self._records += [Delete(table, (plan.run_id, version)) for table in (PlanRow, PlanFigures)]
        self.remember(
            plan.run_id,
            plan=plan,
            plan_issued_at=self.now.monotonic,
            token_caps=caps,
            cut_counts=cuts,
            on_probation=on_probation,
            bases=bases,
            changed_since=None,
            preparation=None,
        )
        self._plans.append(plan)
        self.set_figures(figures)

    def set_figures(self, figures: PlanFigures) -> None:
        """Store the figures of the run's newest plan, durably."""
        self.remember(figures.run_id, figures=figures)
        self._records.append(figures)

    def issue_deny(self, deny: DenyList) -> None:
        """Replace the deny-list; the operator key signs it before it is sent."""
        self.state = replace(self.state, deny=deny)
        self._deny = deny

    def done(self, result: T) -> Step[T]:
        """The finished step."""
        return Step(self.state, result, tuple(self._records), tuple(self._plans), self._deny)

    def _unset(self, table: str, keys: Set[str]) -> None:
        before: Mapping[str, object] = getattr(self.state, table)
        if not keys.isdisjoint(before):
            changes: dict[str, Any] = {table: {key: row for key, row in before.items() if key not in keys}}
            self.state = replace(self.state, **changes)

    def _set(self, table: str, key: str, value: object) -> None:
        changes: dict[str, Any] = {table: {**getattr(self.state, table), key: value}}
        self.state = replace(self.state, **changes)


def charge_row(draft: Draft, peer_id: str) -> bool:
    """Charge a row to this peer's allowance; False if it is used up. A peer without live state is not charged."""
    live = draft.state.live.get(peer_id)
    if live is None:
        return True
    remaining = live.row_allowance.spend(STORED_ROWS_RATE, draft.now.monotonic)
    if remaining is not None:
        draft.set_live(peer_id, replace(live, row_allowance=remaining))
    return remaining is not None
