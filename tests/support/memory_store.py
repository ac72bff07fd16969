"""A store that forgets when the process ends: for tests, and the simplest statement of what a store does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, cast

from atoll.coordinator.store import retention
from atoll.coordinator.store.records import (
    OF_RUN,
    RECORDS,
    Change,
    Checkpoint,
    Credit,
    Delete,
    DeletedRun,
    DenyRow,
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
    Record,
    Round,
    Run,
    Thin,
    Token,
    Vote,
)
from atoll.coordinator.store.store import ALL_EVENTS, Contents, EventFilter, MetricsPage, RoundMeans, Store
from atoll.core.errors import AlreadyRunning

_R = TypeVar("_R", bound=Record)


class MemoryStore(Store):
    """One dictionary per table."""

    def __init__(self) -> None:
        self._tables: dict[type[Record], dict[tuple[object, ...], Record]] = {table: {} for table in RECORDS}

    def load(self) -> Contents:
        denied = self._rows(DenyRow)
        events = self._rows(Event)
        return Contents(
            tokens=self._rows(Token),
            nodes=self._rows(Node),
            runs=self._rows(Run),
            plans=self._rows(PlanRow),
            rounds=tuple(replace(row, manifest=b"") for row in self._rows(Round) if self._is_loaded(row)),
            deny=denied[-1] if denied else None,
            last_event_id=events[-1].event_id if events else 0,
            votes=self._rows(Vote),
            checkpoints=self._rows(Checkpoint),
            plan_figures=self._rows(PlanFigures),
            credits=self._rows(Credit),
            deleted_runs=self._rows(DeletedRun),
            forgotten_nodes=self._rows(ForgottenNode),
        )

    def apply(self, changes: Sequence[Change]) -> None:
        for change in changes:
            if isinstance(change, Event) and (change.event_id,) in self._tables[Event]:
                raise AlreadyRunning(f"event {change.event_id} is taken")
        for change in changes:
            if isinstance(change, Delete):
                self._tables[change.record].pop(change.key, None)
            elif isinstance(change, Thin):
                self._thin(change)
            elif isinstance(change, DropMetrics):
                for key in list(self._tables[NodeMetrics]):
                    if key[0] == change.run_id and int(str(key[1])) > change.after_round:
                        del self._tables[NodeMetrics][key]
            elif isinstance(change, DropRun):
                for table in OF_RUN:
                    rows = self._tables[table].items()
                    self._tables[table] = {key: row for key, row in rows if vars(row)["run_id"] != change.run_id}
            else:
                self._tables[type(change)][tuple(getattr(change, name) for name in change.KEY)] = change

    def events(self, after_id: int, limit: int, wanted: EventFilter = ALL_EVENTS) -> tuple[Event, ...]:
        return self._wanted(after_id, wanted)[:limit]

    def newest_events(self, after_id: int, limit: int, wanted: EventFilter) -> tuple[Event, ...]:
        return self._wanted(after_id, wanted)[-limit:]

    def _wanted(self, after_id: int, wanted: EventFilter) -> tuple[Event, ...]:
        return tuple(row for row in self._rows(Event) if row.event_id > after_id and _permits(wanted, row))

    def rounds(self, run_id: str, after_round: int, limit: int) -> tuple[Round, ...]:
        rows = (row for row in self._rows(Round) if row.run_id == run_id and row.number > after_round)
        return tuple(replace(row, manifest=b"") for row in rows)[:limit]

    def newest_rounds(self, run_id: str, limit: int) -> tuple[Round, ...]:
        return self.rounds(run_id, 0, len(self._tables[Round]))[-limit:]

    def evaluations(self, run_id: str, most: int | None = None) -> tuple[Evaluation, ...]:
        rows = [row for row in self._rows(Evaluation) if row.run_id == run_id]
        if most is not None and len(rows) > most:
            first = rows[0].round
            width = -(-(rows[-1].round - first + 1) // most)
            rows = list({(row.round - first) // width: row for row in rows}.values())
        return tuple(rows)

    def node_metrics(self, run_id: str, wanted: MetricsPage) -> tuple[NodeMetrics, ...]:
        after = (wanted.since_round, wanted.after_peer_id)
        rows = [row for row in self._rows(NodeMetrics) if row.run_id == run_id and (row.round, row.peer_id) > after]
        rows = [row for row in rows if not wanted.peers or row.peer_id in wanted.peers]
        return tuple(rows[-wanted.limit :] if wanted.newest else rows[: wanted.limit])

    def round_means(self, run_id: str, rounds: Sequence[int]) -> tuple[RoundMeans, ...]:
        found = []
        for number in sorted(set(rounds)):
            rows = [row for row in self._rows(NodeMetrics) if (row.run_id, row.round) == (run_id, number)]
            losses = [row.train_loss for row in rows if row.train_loss]
            loss = sum(losses) / max(1, len(losses))
            speed = sum(row.tokens / row.seconds for row in rows if row.seconds)
            found += [RoundMeans(number, loss, speed)] if rows else []
        return tuple(found)

    def plan(self, run_id: str, version: int) -> PlanRow | None:
        return cast("PlanRow | None", self._tables[PlanRow].get((run_id, version)))

    def proofs(self, run_id: str) -> tuple[ProofRow, ...]:
        return tuple(row for row in self._rows(ProofRow) if run_id in ("", row.run_id))

    def plan_figures(self, run_id: str) -> tuple[PlanFigures, ...]:
        return tuple(row for row in self._rows(PlanFigures) if row.run_id == run_id)

    def close(self) -> None:
        return

    def _is_loaded(self, row: Round) -> bool:
        heads = {run.run_id: run.head_round for run in self._rows(Run)}
        newest = row.run_id in heads and row.number > heads[row.run_id] - retention.KEPT_COMMITS
        return not row.committed or newest or self._has_checkpoint(row.run_id, row.number)

    def _has_checkpoint(self, run_id: str, number: int) -> bool:
        return any((row.run_id, row.round) == (run_id, number) for row in self._rows(Checkpoint))

    def _thin(self, change: Thin) -> None:
        rounds = {key: row for key, row in self._tables[Round].items() if isinstance(row, Round) and row.committed}
        for key, row in rounds.items():
            if row.run_id == change.run_id and row.number <= change.head_round - retention.KEPT_MANIFESTS:
                self._tables[Round][key] = replace(row, manifest=b"")
        for table, keys, full_rounds in (
            (Round, rounds, retention.FULL_ROUNDS),
            (Evaluation, self._tables[Evaluation], retention.FULL_ROUNDS),
            (NodeMetrics, self._tables[NodeMetrics], retention.FULL_METRICS_ROUNDS),
        ):
            numbers = {key: int(str(key[1])) for key in keys if key[0] == change.run_id}
            for newest, bucket in retention.thinning(change.head_round, full_rounds):
                old = {key: number for key, number in numbers.items() if number <= newest}
                losses = {int(str(key[1])) for key in self._tables[Evaluation] if key[0] == change.run_id}
                with_losses = losses if table is NodeMetrics else set()
                by_worth = sorted(old.values(), key=lambda number: (number in with_losses, number))
                kept = {number // bucket: number for number in by_worth}.values()
                for key, number in old.items():
                    held = self._has_checkpoint(change.run_id, number) or number in change.kept
                    if number not in kept and not (held and table is not NodeMetrics):
                        del self._tables[table][key], numbers[key]
        ours = [key for key in self._tables[NodeMetrics] if key[0] == change.run_id]
        rounds_newest_first = sorted((int(str(key[1])) for key in ours), reverse=True)
        for oldest in rounds_newest_first[retention.MAX_METRICS_ROWS :][:1]:
            for key in ours:
                if int(str(key[1])) <= oldest:
                    del self._tables[NodeMetrics][key]

    def _rows(self, table: type[_R]) -> tuple[_R, ...]:
        rows = self._tables[cast("type[Record]", table)]
        return tuple(cast("_R", rows[key]) for key in sorted(rows, key=lambda key: cast("tuple[str, ...]", key)))


def _permits(wanted: EventFilter, event: Event) -> bool:
    return (
        wanted.run_id in ("", event.run_id)
        and (not wanted.subjects or event.subject in wanted.subjects)
        and (not wanted.kind or f"{event.kind}.".startswith(f"{wanted.kind}."))
        and event.unix_ms >= wanted.since_ms
    )
