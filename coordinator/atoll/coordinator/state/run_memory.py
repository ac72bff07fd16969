"""The coordinator's memory of a run between its steps: `RunMemory`, and functions that only read it.

It is rebuilt from stored rows at start (`runs/restart.py`): parsed documents, indices, timers. Nothing here does I/O.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.state.rate_limits import Allowance
from atoll.coordinator.store.records import Credit, PlanFigures, Round, Vote
from atoll.core.plan import Base, Plan
from atoll.core.quorum import Electorate
from atoll.core.run_spec import RunSpec

AttemptKey = tuple[int, int, int, int]  # number, plan version, fragment, attempt


@dataclass(frozen=True)
class Commit:
    """Facts about a committed round that later decisions need."""

    manifest_hash: bytes
    plan_version: int = 0  # of its manifest; 0: genesis, before any plan
    committed_tokens: int | None = 0  # of the run up to this round; None: the round was never reported
    previous_hash: bytes = b""
    present: frozenset[str] = frozenset()  # peer ids, at its end
    seats: tuple[str, ...] = ()  # seats of the next round, unless a base names others
    opener: str = ""  # peer id
    members: int = 0  # contributors
    partial: int = 0  # contributors missing from some sums
    screened: int = 0  # contributors that screening excluded from more than half of all parts
    parts_zeroed: int = 0
    attempt: AttemptKey | None = None  # the attempt that committed
    reported: bool = True  # by its opener; otherwise learned from a manifest
    committed_ms: int = 0  # when the coordinator received it


@dataclass(frozen=True)
class Inquiry:
    """Question to nodes for committed rounds that the coordinator lacks (`rounds/learner.py`)."""

    first: int  # the first round asked for
    since: float  # monotonic, time of the question; if no node is asked, time of the last change
    peer_id: str = ""  # the node that is asked; empty: none
    failed: frozenset[str] = frozenset()  # nodes that did not answer usefully
    unable: frozenset[str] = frozenset()  # those of `failed` that answered but do not have the round
    # peer id → manifest hash of round `first`; None: rounds are not being skipped
    agreed: Mapping[str, bytes] | None = None


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
    """Two results of one round, until the run continues from the log."""

    round: int
    since: float  # monotonic, when it was found


@dataclass(frozen=True)
class TrainingScore:
    """The result of one audit of a member's training (`rounds/training_scores.py`)."""

    round: int
    auditor: str  # peer id
    score: float | None  # None: the member did not give its contribution
    fragment: int = 0  # that the round averaged


@dataclass(frozen=True)
class TrainingComparison:
    """One member's audits compared with those of the others."""

    audits: int
    score: float  # the mean of the median auditor's scores
    typical: float  # the median of the members' scores
    doubted: bool
    proved: bool = False  # enough audits found that it trains about as much as the others


@dataclass(frozen=True)
class PlanJoins:
    """How often a node recently joined a run's plan."""

    count: int = 0
    at: float = 0.0  # monotonic, of the last one


@dataclass(frozen=True)
class AnsweredQuestion:
    """The planner's last answered question."""

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

    wanted: int  # the ordered round, or a newer one
    target: int  # the round that nodes are told to write; at least `wanted`
    target_since: float  # monotonic
    asked_at: float  # monotonic, when the operator asked last


@dataclass(frozen=True)
class RunMemory:
    """State of a run that is rebuilt at start: parsed documents, indices, timers (monotonic).

    It is one class because `Draft.remember` replaces fields by name, and all rooms read several of them.
    """

    spec: RunSpec
    plan: Plan | None = None
    token_caps: Mapping[int, Mapping[str, int]] = field(default_factory=dict)  # plan version → member → tokens a round
    on_probation: Mapping[int, frozenset[str]] = field(default_factory=dict)  # plan version → members on probation
    cut_counts: Mapping[int, int] = field(default_factory=dict)  # plan version → number of cuts between its spans
    abandoned_attempts: frozenset[AttemptKey] = frozenset()  # abandoned attempts whose rows are kept
    committed: Mapping[int, Commit] = field(default_factory=dict)  # newest rounds by number; no void ones (`compact`)
    inquiry: Inquiry | None = None  # present while a connected node has a newer round
    recent_manifests: Mapping[int, bytes] = field(default_factory=dict)  # CommittedManifest by number, newest rounds
    fork_inquiry: ForkInquiry | None = None
    fork: Fork | None = None
    contradictions: Mapping[str, float] = field(default_factory=dict)  # peer id → when it was last asked about its head
    head_known_since: float = 0.0  # monotonic, when the newest round became known
    commit_seconds: float = 0.0  # between the last two rounds that were both reported in order; 0: not known
    resumed_ms: int = 0  # when the last pause ended; 0: none since this process started
    raise_allowances: Mapping[str, Allowance] = field(default_factory=dict)  # by opener, for raising attempts
    plan_joins: Mapping[str, PlanJoins] = field(default_factory=dict)  # by peer id
    votes: Mapping[int, Vote] = field(default_factory=dict)  # by number of each undecided round
    bases: tuple[Base, ...] = ()  # of all plans, each once, the newest last
    void_manifest_hashes: frozenset[bytes] = frozenset()  # of rounds that a recovery made void
    recoverable_since: float | None = None  # monotonic, since when all voters have lost the newest round
    training_scores: Mapping[str, tuple[TrainingScore, ...]] = field(default_factory=dict)  # by peer id, newest last
    training_compared: Mapping[str, TrainingComparison] = field(default_factory=dict)  # by peer id, of these scores
    sources_evaluated: int = 0  # number of rounds since the start with losses by source, from members not on probation
    # source → the number of the last such round that reported it
    source_seen: Mapping[str, int] = field(default_factory=dict)
    genesis_writer: str = ""  # peer id
    genesis_writer_since: float = 0.0
    failed_genesis_writers: frozenset[str] = frozenset()  # writers that failed
    kept_rounds: tuple[int, ...] = ()  # rounds whose checkpoints nodes keep, because forks begin with them
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
    no_question_before: float = 0.0  # a shortened route trains again before the planner is asked
    prepare_retry_at: Mapping[str, float] = field(default_factory=dict)  # by peer id, after a fetch that timed out
    shares_checked_at: float | None = None  # when new reduce shares were last computed
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
    checkpoint_order: CheckpointOrder | None = None  # of the operator
    credits: Mapping[str, Credit] = field(default_factory=dict)  # by peer id, what each node contributed to the run
    credit_ranks: Mapping[str, int] = field(default_factory=dict)  # peer id → rank; 1: most tokens


def token_caps_of(plan: Plan) -> Mapping[str, int]:
    """Members of a plan, each with the most tokens that it may claim per round."""
    return {item.peer_id: item.max_round_tokens for item in plan.assignments}


def ranks_of(credits: Mapping[str, Credit]) -> Mapping[str, int]:
    """Rank nodes by the tokens that they contributed; equal numbers of tokens have equal ranks."""
    ordered = sorted((item for peer, item in credits.items() if peer), key=lambda item: -item.tokens)
    ranks: dict[str, int] = {}
    for place, item in enumerate(ordered):
        is_tie = place > 0 and item.tokens == ordered[place - 1].tokens
        ranks[item.peer_id] = ranks[ordered[place - 1].peer_id] if is_tie else place + 1
    return ranks


def attempt_key(row: Round) -> AttemptKey:
    """Key of an attempt within its run."""
    return (row.number, row.plan_version, row.fragment, row.attempt)


def commit_from_row(row: Round, before: Commit | None) -> Commit:
    """The `Commit` of a committed row.

    It shares the sets of present members and seats with `before` if they are equal.
    """
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
    """Seats of the round after `number`, in the order in which they may open it; None if that round is unknown."""
    commit = memory.committed.get(number)
    if commit is None:
        return None
    bases = reversed(memory.bases)
    return next((base.seats for base in bases if base.manifest_hash == commit.manifest_hash), commit.seats)


def epoch_of(bases: tuple[Base, ...], number: int) -> int:
    """The epoch of valid manifests of this round."""
    return next((base.since_version for base in reversed(bases) if base.round < number), 0)
