"""Interface of the coordinator's durable rows; one test suite runs against every backend.

The coordinator loads all rows that its decisions depend on once (`load`) and keeps them in memory. After that it only
writes the changes of each step (`apply`). The long logs (events, rounds, plans, losses) stay in the store and are read
on demand. One coordinator owns a store; calls come from one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.coordinator.store.records import (
    Change,
    Checkpoint,
    Credit,
    DeletedRun,
    DenyRow,
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
    Token,
    Vote,
)


@dataclass(frozen=True)
class Contents:
    """Rows that the state machine needs at start.

    `rounds` are abandoned attempts, the newest `retention.KEPT_COMMITS`, and those of checkpoints, without manifests.
    """

    tokens: tuple[Token, ...]
    nodes: tuple[Node, ...]
    runs: tuple[Run, ...]
    plans: tuple[PlanRow, ...]  # the kept plans of every run, in order of version
    rounds: tuple[Round, ...]
    deny: DenyRow | None  # the newest
    last_event_id: int  # 0: none yet
    votes: tuple[Vote, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    plan_figures: tuple[PlanFigures, ...] = ()
    credits: tuple[Credit, ...] = ()
    deleted_runs: tuple[DeletedRun, ...] = ()
    forgotten_nodes: tuple[ForgottenNode, ...] = ()


@dataclass(frozen=True)
class EventFilter:
    """Condition on events; a field that is empty or 0 matches all events."""

    run_id: str = ""
    subjects: tuple[str, ...] = ()
    kind: str = ""  # this kind, and kinds that begin with it and a dot
    since_ms: int = 0


ALL_EVENTS = EventFilter()


@dataclass(frozen=True)
class MetricsPage:
    """Selection of a run's metrics: the first `limit` rows after a given place in their order, or the newest."""

    limit: int
    since_round: int = 0  # this one and later ones
    after_peer_id: str = ""  # of `since_round`, only peers after this one
    peers: tuple[str, ...] = ()  # of these peers only; empty: of all
    newest: bool = False


@dataclass(frozen=True)
class RoundMeans:
    """Metrics of one round, combined over all nodes."""

    round: int
    train_loss: float  # nats per token, mean of the nodes that measured it; 0: none did
    tokens_per_second: float  # sum over nodes


class Store(ABC):
    """Durable rows."""

    @abstractmethod
    def load(self) -> Contents:
        """Read the rows from which the machine starts. MUST see all rows of every `apply` that returned."""

    @abstractmethod
    def apply(self, changes: Sequence[Change]) -> None:
        """Insert or replace each row by its key, delete it, thin a run's log, or delete all rows of a run.

        MUST refuse an event whose number is taken.

        MUST be atomic: all rows or none. MUST have reached the disk when it returns. MUST apply changes of one key in
        order, so that the last wins. Raises `StateError`, also as `AlreadyRunning` if another coordinator has become
        the owner; nothing has changed in either case.
        """

    @abstractmethod
    def events(self, after_id: int, limit: int, wanted: EventFilter = ALL_EVENTS) -> tuple[Event, ...]:
        """The first `limit` matching events with an id greater than `after_id`. MUST be in order of id."""

    @abstractmethod
    def newest_events(self, after_id: int, limit: int, wanted: EventFilter) -> tuple[Event, ...]:
        """The last `limit` matching events, also in order of id."""

    @abstractmethod
    def rounds(self, run_id: str, after_round: int, limit: int) -> tuple[Round, ...]:
        """Rounds with a number greater than `after_round`. MUST be ordered by number, plan, fragment, attempt.

        MUST leave `manifest` empty.
        """

    @abstractmethod
    def newest_rounds(self, run_id: str, limit: int) -> tuple[Round, ...]:
        """The last `limit` rounds of a run, in the order of `rounds`."""

    @abstractmethod
    def evaluations(self, run_id: str, most: int | None = None) -> tuple[Evaluation, ...]:
        """Stored evaluations of a run: all, or at most `most` with the newest among them. MUST be ordered by round.

        If there are more, it MUST return the newest of each of equal ranges from the first of these rounds to the last,
        and MUST NOT read the others.
        """

    @abstractmethod
    def node_metrics(self, run_id: str, wanted: MetricsPage) -> tuple[NodeMetrics, ...]:
        """A page of the metrics that nodes reported. MUST be ordered by round and peer id."""

    @abstractmethod
    def round_means(self, run_id: str, rounds: Sequence[int]) -> tuple[RoundMeans, ...]:
        """Combined metrics of each of these rounds. MUST be ordered by round, without rounds that have no row."""

    @abstractmethod
    def plan(self, run_id: str, version: int) -> PlanRow | None:
        """One plan version, or None."""

    @abstractmethod
    def plan_figures(self, run_id: str) -> tuple[PlanFigures, ...]:
        """Figures of all plans of a run. MUST be ordered by version."""

    @abstractmethod
    def proofs(self, run_id: str) -> tuple[ProofRow, ...]:
        """All proofs against members of a run; empty: of any run. MUST be ordered by run and peer."""

    @abstractmethod
    def close(self) -> None:
        """Release files and connections. MUST be safe to call twice."""
