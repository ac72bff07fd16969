"""One step of the state machine: the draft that collects its changes, and its result.

A function of the machine takes a `State` and a `StepTime`, works on a `Draft`, and returns a `Step`: the next state,
the rows to make durable *before any response leaves*, and what the operator key has to sign. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from atoll.coordinator.state.rate_limits import REFUSED_REPORTS_RATE, STORED_ROWS_RATE
from atoll.coordinator.state.run_memory import AttemptKey, RunMemory, add_base, ranks_of, token_caps_of
from atoll.coordinator.state.snapshot import LiveNode, State, StepTime
from atoll.coordinator.store.records import (
    Change,
    Checkpoint,
    Credit,
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
from atoll.core.membership import DenyList
from atoll.core.plan import Plan

T = TypeVar("T")
KEPT_EVENTS = 100_000
KEPT_PLANS = 256  # of a run; plans that set a base are kept in addition
KEPT_ATTEMPTS = 4096  # abandoned attempts of a run


@dataclass(frozen=True)
class Step(Generic[T]):
    """Result of one input."""

    state: State
    result: T
    records: tuple[Change, ...] = ()
    plans: tuple[Plan, ...] = ()  # to be signed
    deny: DenyList | None = None  # to be signed


class Draft:
    """Collects the changes of one step. Tables are copied on first write, so the initial state never changes.

    It has many methods because each kind of change also deletes or indexes other things.
    """

    def __init__(self, state: State, now: StepTime) -> None:
        self.state = state
        self.now = now
        self._credits_before: dict[str, Mapping[str, Credit]] = {}  # by run id, of the runs whose credits changed
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
        """Keep the traces of these forgotten nodes. The table is copied once."""
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
        """Delete the traces of these deleted runs and forgotten nodes."""
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
        """Forget old rounds in memory and in the store. Genesis, bases, rounds of checkpoints and `elsewhere` stay."""
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

    def set_credits(self, run_id: str, credits: Mapping[str, Credit]) -> None:
        """Replace what the nodes of a run contributed, by peer id, and their ranks. `done` writes what changed."""
        self._credits_before.setdefault(run_id, self.state.memory[run_id].credits)
        self.remember(run_id, credits=credits, credit_ranks=ranks_of(credits))

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
        for run_id, before in self._credits_before.items():
            if run_id in self.state.memory:  # else `drop_run` deletes all of them
                after = self.state.memory[run_id].credits
                self._records += [item for peer, item in after.items() if before.get(peer) != item]
                self._records += [Delete(Credit, (run_id, peer)) for peer in before.keys() - after.keys()]
        return Step(self.state, result, tuple(self._records), tuple(self._plans), self._deny)

    def _unset(self, table: str, keys: Set[str]) -> None:
        before: Mapping[str, object] = getattr(self.state, table)
        if not keys.isdisjoint(before):
            changes: dict[str, Any] = {table: {key: row for key, row in before.items() if key not in keys}}
            self.state = replace(self.state, **changes)

    def _set(self, table: str, key: str, value: object) -> None:
        changes: dict[str, Any] = {table: {**getattr(self.state, table), key: value}}
        self.state = replace(self.state, **changes)


def charge_refusal(draft: Draft, peer_id: str) -> bool:
    """Charge a message that may be refused to this peer's allowance. False if it is used up or the peer is not live."""
    live = draft.state.live.get(peer_id)
    remaining = live.refusal_allowance.spend(REFUSED_REPORTS_RATE, draft.now.monotonic) if live is not None else None
    if live is None or remaining is None:
        return False
    draft.set_live(peer_id, replace(live, refusal_allowance=remaining))
    return True


def charge_row(draft: Draft, peer_id: str) -> bool:
    """Charge a row to this peer's allowance; False if it is used up. A peer without live state is not charged."""
    live = draft.state.live.get(peer_id)
    if live is None:
        return True
    remaining = live.row_allowance.spend(STORED_ROWS_RATE, draft.now.monotonic)
    if remaining is not None:
        draft.set_live(peer_id, replace(live, row_allowance=remaining))
    return remaining is not None
