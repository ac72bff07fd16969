"""Everything the coordinator decides from, as one immutable value, and the draft that makes the next one.

Durable rows (`records.py`) and what only lives while connections do (`LiveNode`) stand side by side, so that a
decision reads one thing. A function of the machine takes a `State` and a `StepTime`, works on a `Draft`, and
returns a `Step`: the next state, the rows to make durable *before anyone is told*, and what the operator
key has to sign. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from atoll.coordinator.planner.question import Answer, PathMeasurement, Preferences, Question
from atoll.coordinator.state.rate_limits import STORED_ROWS_RATE, Allowance
from atoll.coordinator.store.records import (
    Change,
    Checkpoint,
    Delete,
    Evaluation,
    Event,
    Node,
    PlanFigures,
    PlanRow,
    Round,
    Run,
    Token,
    Vote,
    WaitingRound,
)
from atoll.core.membership import EMPTY_DENY_LIST, DenyList
from atoll.core.plan import Base, Plan
from atoll.core.quorum import Electorate
from atoll.core.run_spec import RunSpec
from atoll.v1 import membership_pb2 as mb

T = TypeVar("T")
AttemptKey = tuple[int, int, int, int]  # number, plan version, fragment, attempt
KEPT_EVENTS = 100_000
KEPT_PLANS = 256  # of a run, beside those that set a base
KEPT_ATTEMPTS = 4096  # abandoned ones of a run


@dataclass(frozen=True)
class StepTime:
    """Now, read once per step: for people and certificates, and for deadlines."""

    unix_ms: int
    monotonic: float


@dataclass(frozen=True)
class Policy:
    """How patient the coordinator is, in seconds, and what plans it prefers."""

    silence_seconds: float = 15.0  # without a heartbeat a stream counts as gone
    lost_after_seconds: float = 20.0  # without a stream a node leaves the plan
    debounce_seconds: float = 1.0  # changes this close together make one plan
    reshare_after_seconds: float = 60.0  # that other shares of reducing must have been better for so long
    replan_seconds: float = 120.0  # after which routes are looked at again, because links and speeds drift
    solve_seconds: float = 2.0  # that the planner may search
    prepare_seconds: float = 60.0  # for nodes to fetch layers before a plan gives them, beside the bytes' time
    solve_steps: int | None = None  # of its search, at most; where a result must repeat
    standby_seconds: float = 10.0  # that a node must have had no place before it stands by: others may come
    resume_seconds: float = 5.0  # after a pause, nodes get this long to come back before the plan changes
    genesis_seconds: float = 600.0  # to write the genesis anchor before another node is asked
    recover_seconds: float = (
        10.0  # that all who decide must have been back, with older rounds, before the run goes back
    )
    lost_layers_seconds: float = 60.0  # that all who should hold some layers must have said that these are lost
    preferences: Preferences = field(default_factory=Preferences)


@dataclass(frozen=True)
class LiveNode:
    """What a node told us since this process started. `session` 0: no stream is open."""

    session: int
    seen: float  # monotonic, of the last message or of the stream's end
    lost: bool = False
    came: float = 0.0  # monotonic, when its stream was opened
    unfit_since: float | None = None  # monotonic, since when it says that it neither trains nor could
    status: mb.NodeStatus = field(default_factory=mb.NodeStatus)
    profile: mb.NodeProfile = field(default_factory=mb.NodeProfile)
    paths: Mapping[str, PathMeasurement] = field(default_factory=dict)  # to other members, by peer id
    corpus_digest: str = ""
    layers: bytes = b""  # LayerTable of the run's model, as told before genesis
    drain_since: float | None = None  # monotonic; when the operator asked the node to leave, or it may leave since
    handing_over: bool = False  # it drains, but is not told yet: others fetch its layers
    row_allowance: Allowance = field(default_factory=Allowance)
    refused: Allowance = field(default_factory=Allowance)
    resized: Allowance = field(default_factory=Allowance)
    dropped_reports: int = 0  # reports beyond those, not told yet
    dropped_since: float = 0.0  # monotonic

    @property
    def connected(self) -> bool:
        """Whether a heartbeat stream is open."""
        return self.session != 0


@dataclass(frozen=True)
class Commit:
    """What is remembered of a committed round."""

    manifest_hash: bytes
    plan_version: int = 0  # under which it was made; 0: genesis, before any plan
    committed_tokens: int | None = 0  # of the whole run, that round included; None: nobody told us this round
    previous_hash: bytes = b""
    present: frozenset[str] = frozenset()  # peer ids: who decides the next round, unless a base says otherwise
    opener: str = ""  # peer id
    members: int = 0  # that contributed
    partial: int = 0  # of them, in some of the sums only
    screened: int = 0  # of them, left out of more than half of all parts by screening
    parts_zeroed: int = 0
    attempt: AttemptKey | None = None  # that committed it


@dataclass(frozen=True)
class PlanJoins:
    """How often a node came into a run's plan lately."""

    count: int = 0
    at: float = 0.0  # monotonic, the last time


@dataclass(frozen=True)
class AnsweredQuestion:
    """What the planner last found an answer to."""

    nodes: tuple[tuple[object, ...], ...]  # who might have a part, with what decides which
    at: float  # monotonic


@dataclass(frozen=True)
class Preparation:
    """A plan to come, and who has to fetch what before."""

    question: Question
    answer: Answer
    spans: Mapping[str, range]  # by peer id: the next span of each who lacks some of it
    since: float  # monotonic


@dataclass(frozen=True)
class PendingFetch:
    """A node that fetches layers which no plan gives it yet: to stand by with them, or as a second copy."""

    span: range
    since: float  # monotonic


@dataclass(frozen=True)
class RunMemory:
    """What belongs to a run and is rebuilt at start: parsed documents, indices, timers (monotonic)."""

    spec: RunSpec
    plan: Plan | None = None
    caps: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # plan version → member → tokens a round
    cuts: Mapping[int, int] = field(default_factory=dict)  # plan version → how many places its spans are cut at
    abandoned: frozenset[AttemptKey] = frozenset()  # attempts whose rows are kept
    committed: Mapping[int, Commit] = field(default_factory=dict)  # by round number; what a recovery made void is out
    waiting: Mapping[tuple[int, str], WaitingRound] = field(default_factory=dict)  # by round number and who told it
    waiting_since: float | None = None  # monotonic; cleared when the operator was told
    head_known_since: float = 0.0  # monotonic, since when the newest round is known
    asked: Mapping[str, Allowance] = field(default_factory=dict)  # of openers, for raising attempts
    plan_joins: Mapping[str, PlanJoins] = field(default_factory=dict)  # of nodes, into the plan
    votes: Mapping[int, Vote] = field(default_factory=dict)  # by round number: those that may still matter
    bases: tuple[Base, ...] = ()  # of all plans, each once, the newest last
    void: frozenset[bytes] = frozenset()  # manifest hashes of rounds that a recovery went back behind
    recoverable_since: float | None = None  # when it was first seen that the newest round is lost to all who decide
    writer: str = ""  # who writes genesis
    genesis_writer_since: float = 0.0
    failed_genesis_writers: frozenset[str] = frozenset()  # asked for genesis in vain
    most_common_corpus_digest: str = ""  # the digest that most fit nodes share, as last counted before genesis
    logged_corpus_mismatches: Mapping[str, str] = field(
        default_factory=dict
    )  # by peer id: digest that differed before genesis
    changed_since: float | None = None  # when what is wanted first differed from the plan
    changed_why: str = ""  # in members, reach or links
    no_plan_before: float = 0.0  # no new plan before
    question: Question | None = None  # that waits for the planner's answer
    questions: int = 0  # that were asked
    question_nodes: tuple[tuple[object, ...], ...] = ()  # by that question: see `AnsweredQuestion`
    answered_question: AnsweredQuestion | None = None
    preparation: Preparation | None = None  # of the next plan
    standbys: Mapping[str, PendingFetch] = field(
        default_factory=dict
    )  # by peer id: who fetches layers to stand by with
    copies: Mapping[str, PendingFetch] = field(
        default_factory=dict
    )  # by peer id: stages with a copy of a neighbour's layers
    fetch_timeouts: Mapping[str, float] = field(
        default_factory=dict
    )  # by peer id: who did not fetch any of those in time, when
    copies_checked_at: float | None = None  # monotonic: when it was last asked who should have one
    unconfirmed_takeovers: Mapping[str, float] = field(
        default_factory=dict
    )  # by peer id: who did on its own word alone, when
    no_question_before: float = 0.0  # a route became shorter, and is to work again before the planner is asked
    prepare_retry_at: Mapping[str, float] = field(
        default_factory=dict
    )  # by peer id: who did not fetch in time, until when
    shares_checked_at: float | None = None  # monotonic: when it was last asked whether other shares would pay
    new_shares_pay: bool = False  # what came of it
    left_out: Mapping[str, str] = field(default_factory=dict)  # by peer id: why it has no part in the plan
    claim_doubts: Mapping[str, str] = field(
        default_factory=dict
    )  # by peer id: how its word differs from what others see
    corrections: Mapping[str, float] = field(default_factory=dict)  # by peer id: see `Measured.learned`
    missing: str = ""  # why there is no plan that could be followed now
    figures: PlanFigures | None = None  # of the newest plan
    sampled_at: float | None = None  # monotonic, when its pace was looked at last
    predicted_version: int = 0  # the plan of which a prediction was asked for last


@dataclass(frozen=True)
class State:
    """The whole coordinator."""

    operator_key: bytes = b""  # whose tie-breaks count
    tokens: Mapping[str, Token] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    runs: Mapping[str, Run] = field(default_factory=dict)
    memory: Mapping[str, RunMemory] = field(default_factory=dict)  # by run id
    live: Mapping[str, LiveNode] = field(default_factory=dict)  # by peer id
    checkpoints: Mapping[str, tuple[Checkpoint, ...]] = field(default_factory=dict)  # by peer id, newest first
    deny: DenyList = EMPTY_DENY_LIST
    deny_reserved: int = 0  # numbers up to here may have been issued and forgotten
    last_event_id: int = 0
    last_session: int = 0

    def members_of(self, run_id: str) -> list[Node]:
        """Nodes and seeds enrolled in a run, ordered by peer id."""
        return [self.nodes[peer] for peer in sorted(self.nodes) if self.nodes[peer].run_id == run_id]


@dataclass(frozen=True)
class Step(Generic[T]):
    """What one input did."""

    state: State
    result: T
    records: tuple[Change, ...] = ()
    plans: tuple[Plan, ...] = ()  # to be signed
    deny: DenyList | None = None  # to be signed


def token_caps_of(plan: Plan) -> Mapping[str, int]:
    """The members of a plan, and how many tokens each may claim in a round."""
    return {item.peer_id: item.max_round_tokens for item in plan.assignments}


def attempt_key(row: Round) -> AttemptKey:
    """What names an attempt within its run."""
    return (row.number, row.plan_version, row.fragment, row.attempt)


def commit_from_row(row: Round, before: Commit | None) -> Commit:
    """What is remembered of a committed round. Who was present mostly were so `before`: one set serves both."""
    present = frozenset(row.present)
    return Commit(
        manifest_hash=row.manifest_hash,
        plan_version=row.made_under,
        committed_tokens=row.committed_tokens,
        previous_hash=row.previous_hash,
        present=before.present if before is not None and before.present == present else present,
        opener=row.opener,
        members=row.members,
        partial=row.partial,
        screened=len(row.screened),
        parts_zeroed=row.parts_zeroed,
        attempt=attempt_key(row),
    )


def add_base(bases: tuple[Base, ...], base: Base) -> tuple[Base, ...]:
    """The bases of a run once a plan with `base` is known."""
    return bases if base in bases else (*bases, base)


def is_void(bases: tuple[Base, ...], number: int, made_under: int) -> bool:
    """Whether a recovery went back behind a round that was made under that plan version."""
    return any(number > base.round and made_under < base.since_version for base in bases)


def electorate_after(memory: RunMemory, number: int) -> Electorate | None:
    """Who decides the round after `number`, in the history that counts; None when that round is not known here."""
    commit = memory.committed.get(number)
    if commit is None:
        return None
    voters = next((base.voters for base in reversed(memory.bases) if base.manifest_hash == commit.manifest_hash), None)
    return Electorate(commit.present if voters is None else frozenset(voters))


class Draft:
    """Collects one step. Tables are copied when first written, so the state it began from never changes."""

    def __init__(self, state: State, now: StepTime) -> None:
        self.state = state
        self.now = now
        self._records: list[Change] = []
        self._plans: list[Plan] = []
        self._deny: DenyList | None = None

    def put(self, row: Token | Node | Run) -> None:
        """Insert or replace a row, durably."""
        match row:
            case Token():
                self._set("tokens", row.token_id, row)
            case Node():
                self._set("nodes", row.peer_id, row)
            case Run():
                self._set("runs", row.run_id, row)
        self._records.append(row)

    def log(self, row: Round | Evaluation) -> None:
        """Append to a log that is not kept in memory."""
        self._records.append(row)

    def set_vote(self, vote: Vote) -> None:
        """What the coordinator is bound by at one round number, durably."""
        self.remember(vote.run_id, votes={**self.state.memory[vote.run_id].votes, vote.number: vote})
        self._records.append(vote)

    def forget_votes(self, run_id: str, numbers: list[int]) -> None:
        """These rounds are decided, or void."""
        if numbers:
            votes = self.state.memory[run_id].votes
            self.remember(run_id, votes={number: vote for number, vote in votes.items() if number not in numbers})
            self._records += [Delete(Vote, (run_id, number)) for number in numbers]

    def add_abandoned(self, run_id: str, key: AttemptKey) -> None:
        """One more attempt whose row is kept; the oldest row goes when there are too many."""
        kept = self.state.memory[run_id].abandoned | {key}
        if len(kept) > KEPT_ATTEMPTS:
            oldest = min(kept)
            kept -= {oldest}
            self._records.append(Delete(Round, (run_id, *oldest)))
        self.remember(run_id, abandoned=kept)

    def set_waiting(self, row: WaitingRound) -> None:
        """A round that cannot be judged yet, durably."""
        memory = self.state.memory[row.run_id]
        since = self.now.monotonic if memory.waiting_since is None else memory.waiting_since
        waiting = {**memory.waiting, (row.number, row.peer_id): row}
        self.remember(row.run_id, waiting=waiting, waiting_since=since)
        self._records.append(row)

    def forget_waiting(self, run_id: str, keys: list[tuple[int, str]]) -> None:
        """These were judged, or do not matter any more."""
        if keys:
            memory = self.state.memory[run_id]
            left = {key: row for key, row in memory.waiting.items() if key not in keys}
            self.remember(run_id, waiting=left, waiting_since=self.now.monotonic if left else None)
            self._records += [Delete(WaitingRound, (run_id, *key)) for key in keys]

    def set_checkpoints(self, peer_id: str, held: tuple[Checkpoint, ...]) -> None:
        """All checkpoints that a node holds, the newest first."""
        before = {item.round: item for item in self.state.checkpoints.get(peer_id, ())}
        self._records += [item for item in held if before.pop(item.round, None) != item]
        self._records += [Delete(Checkpoint, (peer_id, number)) for number in before]
        self._set("checkpoints", peer_id, held)

    def remember(self, run_id: str, **changes: Any) -> None:
        """Change fields of a run's memory; `replace` refuses names that it does not have."""
        self._set("memory", run_id, replace(self.state.memory[run_id], **changes))

    def add_memory(self, run_id: str, memory: RunMemory) -> None:
        """Begin a run's memory."""
        self._set("memory", run_id, memory)

    def set_live(self, peer_id: str, live: LiveNode) -> None:
        """Change what a connection told us."""
        self._set("live", peer_id, live)

    def event(self, kind: str, run_id: str, subject: str, message: str) -> None:
        """Write one line of the event log."""
        number = self.state.last_event_id + 1
        self.state = replace(self.state, last_event_id=number)
        self._records.append(Event(number, self.now.unix_ms, kind, run_id, subject, message))
        if number > KEPT_EVENTS:
            self._records.append(Delete(Event, (number - KEPT_EVENTS,)))

    def new_session(self) -> int:
        """A number for a heartbeat stream."""
        self.state = replace(self.state, last_session=self.state.last_session + 1)
        return self.state.last_session

    def issue_plan(self, plan: Plan, figures: PlanFigures) -> None:
        """Make `plan` the run's newest; the operator's key signs it before anyone sees it."""
        memory = self.state.memory[plan.run_id]
        bases = add_base(memory.bases, plan.base)
        caps = {**memory.caps, plan.version: token_caps_of(plan)}
        cuts = {**memory.cuts, plan.version: len(plan.cuts)}
        for version in sorted(caps)[:-KEPT_PLANS]:
            del caps[version]
            cuts.pop(version, None)
            if all(version != base.since_version for base in bases):
                self._records += [Delete(table, (plan.run_id, version)) for table in (PlanRow, PlanFigures)]
        self.remember(plan.run_id, plan=plan, caps=caps, cuts=cuts, bases=bases, changed_since=None, preparation=None)
        self._plans.append(plan)
        self.set_figures(figures)

    def set_figures(self, figures: PlanFigures) -> None:
        """What is known of the run's newest plan, durably."""
        self.remember(figures.run_id, figures=figures)
        self._records.append(figures)

    def issue_deny(self, deny: DenyList) -> None:
        """Replace the deny-list; signed likewise."""
        self.state = replace(self.state, deny=deny)
        self._deny = deny

    def done(self, result: T) -> Step[T]:
        """The step."""
        return Step(self.state, result, tuple(self._records), tuple(self._plans), self._deny)

    def _set(self, table: str, key: str, value: object) -> None:
        changes: dict[str, Any] = {table: {**getattr(self.state, table), key: value}}
        self.state = replace(self.state, **changes)


def charge_row(draft: Draft, peer_id: str, cost: float = 1.0) -> bool:
    """Spend one more row or event of this peer's, if it may have that: whether it may. Free for who never connected."""
    live = draft.state.live.get(peer_id)
    if live is None:
        return True
    left = live.row_allowance.spend(STORED_ROWS_RATE, draft.now.monotonic, cost)
    if left is not None:
        draft.set_live(peer_id, replace(live, row_allowance=left))
    return left is not None
