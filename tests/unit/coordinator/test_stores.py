"""One suite for every store: what `Store` says it MUST do."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import create_engine, inspect
from support.memory_store import MemoryStore
from support.postgres import Postgres, missing, postgres

from atoll.coordinator.store import database_lock, migrations, retention
from atoll.coordinator.store.copying import copy_rows
from atoll.coordinator.store.database_lock import OWNER_TABLE
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
    Round,
    Run,
    Thin,
    Token,
    Vote,
)
from atoll.coordinator.store.sql import SqlStore
from atoll.coordinator.store.store import Contents, EventFilter, MetricsPage, RoundMeans, Store
from atoll.coordinator.store.tables import METADATA
from atoll.core.errors import (
    AlreadyExists,
    AlreadyRunning,
    ConfigError,
    DatabaseCorrupt,
    DatabaseMissing,
    DataDirUnusable,
    Unreachable,
)

TOKEN = Token("t1", "hash", "reef", ("node", "seed"), 3, 2, 10, 20)
NODE = Node("p1", "ann", "reef", ("node",), b"\0\xff", 1, 10, multiaddrs=("/ip4/1", "/ip6/2"), pin="3-7")
RUN = Run("reef", "version = 1\n", "CREATED", 10)
PLAN = PlanRow("reef", 1, b"signed", 11)
FIGURES = PlanFigures("reef", 1, "ann joins", 11, 2, 1, 100.5, 90.25, 600.0, 2.0**33, '{"p3": "too slow"}')
ROUND = Round(
    "reef", 1, 1, 0, 0, True, "", "p1", 1.5, 12, tokens=2**62, manifest_hash=b"h", manifest=b"m", present=("p1", "p2")
)
LOSS = Evaluation("reef", 1, 4.125, 1000, '[["web", 4.0, 48, 750]]')
METRICS = NodeMetrics("reef", 1, "p1", 12, 4.25, 1e-4, 2**62, 30.5, 0.125, 20.25, 1.5, 3.75, 2**40, 2**41)
DENY = DenyRow(1, b"list")
EVENT = Event(1, 10, "run.created", "reef", "reef", "run reef created · 3 ±")
VOTE = Vote("reef", 8, 3, 2**32 - 1, 3, 2, b"\0payload")
HELD = Checkpoint("p1", 7, "reef", b"hash", 2**40, 13, 2**50)
CREDIT = Credit("reef", "p1", 640, 3, 12, 15)
GONE_RUN = DeletedRun("kelp", 7, 14)
GONE_NODE = ForgottenNode("p9", "zoe", "kelp", True, 3, 14)
PROOF = ProofRow("reef", "p1", "0a", "double-vote", 1, 15, "it voted twice", b"proof")
ALL = (
    TOKEN,
    NODE,
    RUN,
    PLAN,
    FIGURES,
    ROUND,
    VOTE,
    HELD,
    LOSS,
    METRICS,
    DENY,
    PROOF,
    CREDIT,
    GONE_RUN,
    GONE_NODE,
    EVENT,
)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    reason = missing()
    if reason:
        pytest.skip(reason)
    with postgres() as running:
        yield running


def sqlite(path: Path) -> Store:
    return SqlStore(f"sqlite:///{path / 'c.db'}")


@pytest.fixture(params=["memory", "sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    make: dict[str, Callable[[], Store]] = {
        "memory": MemoryStore,
        "sqlite": lambda: sqlite(tmp_path),
        "postgres": lambda: SqlStore(request.getfixturevalue("server").fresh()),
    }
    made = make[request.param]()
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of a database that outlives its store."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'c.db'}"
    fresh: str = request.getfixturevalue("server").fresh()
    return fresh


def test_an_empty_store_is_empty(store: Store) -> None:
    assert store.load() == Contents((), (), (), (), (), None, 0)
    assert store.events(0, 10) == ()
    assert store.plan("reef", 1) is None


def test_applied_rows_are_loaded_field_by_field(store: Store) -> None:
    store.apply(ALL)
    kept = replace(ROUND, manifest=b"")
    rows = (TOKEN,), (NODE,), (RUN,), (PLAN,), (kept,), DENY, 1, (VOTE,), (HELD,), (FIGURES,)
    assert store.load() == Contents(*rows, (CREDIT,), (GONE_RUN,), (GONE_NODE,))
    assert store.proofs("") == (PROOF,)
    assert store.plan_figures("reef") == (FIGURES,)
    assert store.plan_figures("another") == ()
    assert store.events(0, 10) == (EVENT,)
    assert store.rounds("reef", 0, 10) == (replace(ROUND, manifest=b""),)
    assert store.evaluations("reef") == (LOSS,)
    assert store.node_metrics("reef", MetricsPage(10)) == (METRICS,)
    assert store.plan("reef", 1) == PLAN


def test_a_dropped_run_takes_all_its_rows_along_and_nothing_else(store: Store) -> None:
    other = [replace(row, run_id="kelp", **_other_key(row)) for row in ALL if type(row) in OF_RUN]  # type: ignore[arg-type]
    store.apply([*ALL, *other])
    store.apply([DropRun("reef")])
    left = store.load()
    for rows in (left.tokens, left.nodes, left.runs, left.plans, left.rounds, left.votes, left.checkpoints):
        assert [row.run_id for row in rows] == ["kelp"]  # type: ignore[attr-defined]
    assert [row.run_id for row in left.plan_figures] == ["kelp"]
    assert (left.deny, left.deleted_runs, left.forgotten_nodes) == (DENY, (GONE_RUN,), (GONE_NODE,))
    assert [row.run_id for row in left.credits] == ["kelp"]
    assert [row.run_id for row in (*store.events(0, 10), *store.proofs(""))] == ["kelp", "kelp"]
    for run_id, kept in (("reef", 0), ("kelp", 1)):
        logs = store.rounds(run_id, 0, 10), store.evaluations(run_id), store.node_metrics(run_id, MetricsPage(10))
        assert [len(rows) for rows in logs] == [kept] * 3


def _other_key(row: object) -> dict[str, object]:
    """Another key of rows whose key has no run."""
    keys: dict[type, dict[str, object]] = {
        Token: {"token_id": "t2"},
        Node: {"peer_id": "p2"},
        Checkpoint: {"peer_id": "p2"},
        Event: {"event_id": 2},
    }
    return keys.get(type(row), {})


def test_a_row_with_a_known_key_replaces_it_and_the_last_one_wins(store: Store) -> None:
    store.apply([TOKEN])
    store.apply([replace(TOKEN, uses_left=1), replace(TOKEN, uses_left=0, revoked=True)])
    assert store.load().tokens == (replace(TOKEN, uses_left=0, revoked=True),)


def test_empty_words_stay_empty(store: Store) -> None:
    store.apply([replace(NODE, multiaddrs=())])
    assert store.load().nodes[0].multiaddrs == ()


def test_logs_are_ordered_and_cut(store: Store) -> None:
    store.apply([replace(EVENT, event_id=number) for number in (3, 1, 2, 5)])
    assert [event.event_id for event in store.events(1, 2)] == [2, 3]
    assert store.load().last_event_id == 5
    store.apply([replace(ROUND, number=number) for number in (10, 9, 11)])
    assert [row.number for row in store.rounds("reef", 9, 10)] == [10, 11]
    assert [row.number for row in store.rounds("reef", 0, 2)] == [9, 10]
    assert store.rounds("other", 0, 10) == ()
    store.apply([replace(ROUND, number=11, attempt=number, committed=False) for number in (1, 10, 2)])
    newest = [(row.number, row.attempt, row.manifest) for row in store.newest_rounds("reef", 4)]
    assert newest == [(11, ROUND.attempt, b""), (11, 1, b""), (11, 2, b""), (11, 10, b"")]
    assert store.newest_rounds("reef", 100) == store.rounds("reef", 0, 100)
    assert store.newest_rounds("other", 10) == ()
    store.apply([replace(LOSS, round=number) for number in (12, 2)])
    assert [loss.round for loss in store.evaluations("reef")] == [2, 12]


@given(rounds=st.sets(st.integers(0, 5000), max_size=60), most=st.integers(1, 70))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_a_bounded_series_of_losses_is_even_and_has_the_newest(store: Store, rounds: set[int], most: int) -> None:
    run_id = f"run {sorted(rounds)} {most}"
    store.apply([replace(LOSS, run_id=run_id, round=number) for number in rounds])
    kept = [loss.round for loss in store.evaluations(run_id, most)]
    assert kept == sorted(set(kept) & rounds)
    assert len(kept) <= most
    assert kept[-1:] == sorted(rounds)[-1:]
    if len(rounds) <= most:
        assert len(kept) == len(rounds)
    else:  # the newest of each range
        first = min(rounds)
        width = -(-(max(rounds) - first + 1) // most)
        assert {(number - first) // width for number in kept} == {(number - first) // width for number in rounds}


def test_losses_of_late_rounds_are_not_thinned_as_if_they_had_begun_at_genesis(store: Store) -> None:
    store.apply([replace(LOSS, round=number) for number in range(100_000, 100_500)])
    assert len(store.evaluations("reef", 400)) == 250


def thin_in_steps(store: Store, rounds: int, step: int) -> None:
    for number in range(1, rounds + 1):
        changes: list[Change] = [replace(RUN, head_round=number), replace(ROUND, number=number)]
        changes += [replace(LOSS, round=number)] if number % 3 == 2 else []
        store.apply([*changes, Thin("reef", number)] if number % step == 0 else changes)


def test_a_long_log_is_complete_at_its_end_and_thinner_the_older_it_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FULL_ROUNDS", 8)
    monkeypatch.setattr(retention, "KEPT_MANIFESTS", 4)
    store.apply([replace(RUN, run_id="other"), replace(ROUND, run_id="other")])
    store.apply([replace(HELD, round=number) for number in (9, 10)])
    thin_in_steps(store, 80, 4)
    numbers = [row.number for row in store.rounds("reef", 0, 1000)]
    assert numbers == [9, 10, *range(15, 48, 8), *range(51, 64, 4), *range(65, 72, 2), *range(72, 81)]
    losses = [row.round for row in store.evaluations("reef")]
    assert losses[-3:] == [74, 77, 80]
    assert all(number % 3 == 2 for number in losses)
    assert len(losses) < 20
    assert len(store.rounds("other", 0, 10)) == 1


FILTERS = [
    (EventFilter(), [1, 2, 3, 4, 5]),
    (EventFilter(run_id="reef"), [1, 3, 4]),
    (EventFilter(subjects=("p1", "p2")), [1, 2]),
    (EventFilter(kind="node"), [1, 2]),
    (EventFilter(kind="node.lost"), [2]),
    (EventFilter(kind="nod"), []),
    (EventFilter(kind="%"), []),
    (EventFilter(kind="round_"), []),
    (EventFilter(since_ms=30), [3, 4, 5]),
    (EventFilter(run_id="reef", kind="round", since_ms=40), [4]),
]


@pytest.mark.parametrize(("wanted", "found"), FILTERS)
def test_events_are_filtered(store: Store, wanted: EventFilter, found: list[int]) -> None:
    store.apply(
        [
            Event(1, 10, "node.enrolled", "reef", "p1", ""),
            Event(2, 20, "node.lost", "other", "p2", ""),
            Event(3, 30, "round.committed", "reef", "7", ""),
            Event(4, 40, "round.abandoned", "reef", "8", ""),
            Event(5, 50, "ca.rotated", "", "ca", ""),
        ]
    )
    assert [event.event_id for event in store.events(0, 10, wanted)] == found
    assert [event.event_id for event in store.events(0, 2, wanted)] == found[:2]
    assert [event.event_id for event in store.events(2, 10, wanted)] == [number for number in found if number > 2]
    assert [event.event_id for event in store.newest_events(0, 2, wanted)] == found[-2:]
    assert [event.event_id for event in store.newest_events(4, 2, wanted)] == [number for number in found if number > 4]


def metrics_in(store: Store, **wanted: Any) -> list[tuple[int, str]]:
    page = MetricsPage(**{"limit": 10_000, **wanted})
    return [(row.round, row.peer_id) for row in store.node_metrics("reef", page)]


def metrics_of(rounds: Iterable[int], *peers: str) -> list[NodeMetrics]:
    return [replace(METRICS, round=number, peer_id=peer) for number in rounds for peer in peers]


def test_metrics_are_read_in_pages_that_miss_no_row_and_repeat_none(store: Store) -> None:
    store.apply(metrics_of(range(5, 0, -1), "p3", "p1", "p2"))
    store.apply([replace(METRICS, run_id="other")])
    everything = [(number, peer) for number in range(1, 6) for peer in ("p1", "p2", "p3")]
    for limit in (1, 2, 3, 4, 100):
        read, place = [], {}
        while page := metrics_in(store, limit=limit, **place):
            read += page
            place = {"since_round": page[-1][0], "after_peer_id": page[-1][1]}
        assert read == everything
    assert metrics_in(store, since_round=4) == everything[9:]
    assert metrics_in(store, peers=("p2",)) == [(number, "p2") for number in range(1, 6)]
    assert metrics_in(store, limit=4, newest=True) == everything[-4:]
    assert metrics_in(store, limit=2, newest=True, peers=("p1", "p3")) == [(5, "p1"), (5, "p3")]


def test_metrics_of_a_round_are_replaced_and_the_last_of_one_step_counts(store: Store) -> None:
    store.apply([METRICS, replace(METRICS, peer_id="p2")])
    store.apply([replace(METRICS, train_loss=3.0), replace(METRICS, train_loss=2.0), replace(METRICS, round=2)])
    rows = store.node_metrics("reef", MetricsPage(10))
    losses = [(row.round, row.peer_id, row.train_loss) for row in rows]
    assert losses == [(1, "p1", 2.0), (1, "p2", 4.25), (2, "p1", 4.25)]


def test_what_nodes_reported_of_a_round_is_put_together(store: Store) -> None:
    store.apply(
        [
            replace(METRICS, train_loss=4.0, tokens=100, seconds=10.0),
            replace(METRICS, peer_id="p2", train_loss=2.0, tokens=60, seconds=3.0),
            replace(METRICS, peer_id="p3", train_loss=0.0, tokens=50, seconds=0.0),
            replace(METRICS, round=2, train_loss=0.0, tokens=0, seconds=0.0),
            replace(METRICS, round=3),
            replace(METRICS, round=1, run_id="other"),
        ]
    )
    assert store.round_means("reef", [5, 2, 1]) == (RoundMeans(1, 3.0, 30.0), RoundMeans(2, 0.0, 0.0))
    assert store.round_means("reef", []) == ()
    assert json.dumps([asdict(item) for item in store.round_means("reef", [1, 2])])  # no type of a database


def test_old_metrics_are_thinned_for_all_nodes_alike(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "FULL_METRICS_ROUNDS", 8)
    store.apply(metrics_of(range(1, 81), "p1", "p2"))
    store.apply([Thin("other", 80)])
    assert len(metrics_in(store)) == 160
    store.apply([Thin("reef", 80)])
    kept = [*range(15, 48, 8), *range(51, 64, 4), *range(65, 72, 2), *range(72, 81)]
    assert metrics_in(store, peers=("p1",)) == [(number, "p1") for number in kept]
    assert [number for number, _ in metrics_in(store, peers=("p2",))] == kept


def test_rounds_that_nodes_of_another_run_hold_are_not_thinned(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "FULL_ROUNDS", 8)
    store.apply([replace(RUN, head_round=80), *(replace(ROUND, number=number) for number in range(1, 81))])
    store.apply([replace(LOSS, round=number) for number in range(1, 81)])
    store.apply([Thin("reef", 80, (5, 6))])
    numbers = [row.number for row in store.rounds("reef", 0, 100)]
    assert {5, 6} <= set(numbers)
    assert len(numbers) < 40
    assert {5, 6} <= {row.round for row in store.evaluations("reef")}
    store.apply([Thin("reef", 80)])
    assert not {5, 6} & {row.number for row in store.rounds("reef", 0, 100)}


def test_metrics_of_old_rounds_that_have_a_loss_are_those_that_stay(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "FULL_METRICS_ROUNDS", 8)
    store.apply(metrics_of(range(1, 81), "p1"))
    store.apply([replace(LOSS, round=number) for number in range(4, 81, 4)])
    store.apply([Thin("reef", 80)])
    assert {60, 64, 68, 72} <= {number for number, _ in metrics_in(store)}
    kept = [number for number, _ in metrics_in(store) if number <= 48]
    assert kept
    assert not [number for number in kept if number % 4]


def test_metrics_of_void_rounds_are_dropped(store: Store) -> None:
    store.apply([*metrics_of(range(1, 6), "p1"), replace(METRICS, run_id="other", round=5)])
    store.apply([DropMetrics("reef", 3)])
    assert [number for number, _ in metrics_in(store)] == [1, 2, 3]
    assert len(store.node_metrics("other", MetricsPage(10))) == 1


def test_a_run_keeps_a_bounded_number_of_metrics_and_these_are_the_newest(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_METRICS_ROWS", 7)
    store.apply(metrics_of(range(1, 4), "p1", "p2"))
    store.apply([Thin("reef", 3)])
    assert len(metrics_in(store)) == 6
    store.apply(metrics_of(range(4, 11), "p1", "p2"))
    store.apply([Thin("reef", 10)])
    assert metrics_in(store) == [(number, peer) for number in (8, 9, 10) for peer in ("p1", "p2")]


def test_thinning_rarely_leaves_what_thinning_often_leaves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "FULL_ROUNDS", 8)
    thin_in_steps(store, 96, 96)
    often = MemoryStore()
    thin_in_steps(often, 96, 1)
    assert [row.number for row in store.rounds("reef", 0, 1000)] == [
        row.number for row in often.rounds("reef", 0, 1000)
    ]


def test_only_the_newest_rounds_and_those_of_checkpoints_are_loaded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEPT_COMMITS", 3)
    abandoned = replace(ROUND, number=2, attempt=1, committed=False)
    store.apply([abandoned, HELD, replace(HELD, round=8, run_id="other")])
    thin_in_steps(store, 20, 50)
    assert [(row.number, row.committed) for row in store.load().rounds] == [
        *[(2, False), (7, True)],
        *[(number, True) for number in (18, 19, 20)],
    ]


def test_the_newest_deny_list_is_loaded(store: Store) -> None:
    store.apply([replace(DENY, number=number) for number in (2, 10, 9)])
    assert store.load().deny == replace(DENY, number=10)


def test_closing_twice_is_fine(store: Store) -> None:
    store.close()
    store.close()


def test_deleted_rows_disappear_and_deleting_a_missing_row_is_fine(store: Store) -> None:
    other = replace(VOTE, number=9)
    store.apply([VOTE, other, Delete(Vote, ("reef", 8))])
    store.apply([Delete(Vote, ("reef", 8)), Delete(Checkpoint, ("p1", 77)), HELD])
    assert (store.load().votes, store.load().checkpoints) == ((other,), (HELD,))
    store.apply([Delete(Vote, ("reef", 9)), other])  # the last one wins
    assert store.load().votes == (other,)


def test_an_event_is_never_written_over(store: Store) -> None:
    store.apply([EVENT])
    with pytest.raises(AlreadyRunning):
        store.apply([TOKEN, replace(EVENT, message="another story")])
    assert (store.events(0, 10), store.load().tokens) == ((EVENT,), ())


# --- only for databases ----------------------------------------------------------------------------


def test_a_database_opened_again_has_everything(url: str) -> None:
    for number in (1, 2):
        store = SqlStore(url)
        store.apply([*ALL[:-1], replace(EVENT, event_id=number)])
        store.close()
    store = SqlStore(url)
    assert store.load().nodes == (NODE,)
    store.close()


def test_a_database_has_one_owner_at_a_time_named_in_the_error(url: str) -> None:
    first = SqlStore(url, "process 7 on reef")
    with pytest.raises(AlreadyRunning, match="process 7 on reef"):
        SqlStore(url, "process 8 on lagoon")
    first.apply([TOKEN])
    first.close()
    second = SqlStore(url, "process 8 on lagoon")
    second.apply([NODE])
    assert (second.load().tokens, second.load().nodes) == ((TOKEN,), (NODE,))
    with pytest.raises(AlreadyRunning, match="lagoon"):
        SqlStore(url, "process 9")
    second.close()


def test_a_coordinator_waits_for_the_lock_of_one_that_has_just_ended(
    server: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PostgreSQL server may notice the end of a session after the next coordinator has asked for the lock."""
    monkeypatch.setattr(database_lock, "_PATIENCE_MS", 60_000)
    url = server.fresh()
    first = SqlStore(url, "first")
    ending = threading.Timer(0.3, first.close)
    ending.start()
    SqlStore(url, "second").close()
    ending.join()


def test_an_owner_whose_lock_was_lost_and_taken_writes_nothing_over(url: str) -> None:
    """As when the database's server restarts, and another coordinator is quicker."""
    first = SqlStore(url, "first")
    first.apply([EVENT])
    assert first._lock is not None
    first._lock.close()
    first.apply([TOKEN])  # nobody has taken it yet
    second = SqlStore(url, "second")
    second.apply([NODE])
    for changes in ([replace(NODE, name="bob")], [replace(TOKEN, uses_left=0)]):
        with pytest.raises(AlreadyRunning, match="second"):
            first.apply(changes)
    assert (second.load().tokens, second.load().nodes) == ((TOKEN,), (NODE,))
    second.apply([replace(EVENT, event_id=2)])
    first._lock = None
    first.close()
    second.close()


def test_no_database_is_created_unless_allowed(url: str, tmp_path: Path) -> None:
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(DatabaseMissing, match="no coordinator's database") as refusal:
        SqlStore(url, "ann", may_create=False)
    assert "--new-database" in refusal.value.remedy
    assert {path.name for path in tmp_path.iterdir()} == before
    SqlStore(url).close()
    SqlStore(url, "ann", may_create=False).close()


def test_a_failed_step_leaves_nothing_behind(url: str) -> None:
    store = SqlStore(url)
    with pytest.raises(DatabaseCorrupt):
        store.apply([TOKEN, replace(NODE, name=None)])  # type: ignore[arg-type]
    assert store.load().tokens == ()
    store.apply([TOKEN])
    assert store.load().tokens == (TOKEN,)
    store.close()


def test_rows_travel_from_one_database_to_another(url: str, tmp_path: Path) -> None:
    store = SqlStore(url)
    store.apply(ALL)
    loaded, target = store.load(), f"sqlite:///{tmp_path / 'copy.db'}"
    store.close()
    copy_rows(url, target)
    copied = SqlStore(target)
    assert (copied.load(), copied.events(0, 10), copied.evaluations("reef")) == (loaded, (EVENT,), (LOSS,))
    assert copied.node_metrics("reef", MetricsPage(10)) == (METRICS,)
    copied.close()
    with pytest.raises(AlreadyExists):
        copy_rows(target, url)


def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    if missing():
        pytest.skip(missing())
    with pytest.raises(Unreachable) as refusal:  # not for good: the server may only be slower to start
        SqlStore(f"postgresql+psycopg://ann:hunter2@/reef?host={tmp_path}")
    assert "hunter2" not in str(refusal.value)
    assert "server" in refusal.value.remedy


def test_a_server_that_does_not_admit_us_is_no_reason_to_try_again(server: Postgres) -> None:
    with pytest.raises(ConfigError, match="denies access"):
        SqlStore(server.url("nowhere"))


def test_writes_are_synced_and_readers_do_not_wait(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path / 'c.db'}")
    with store._engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2  # FULL
    store.close()


def test_the_migrations_make_exactly_the_tables_of_the_records(url: str) -> None:
    SqlStore(url, "ann").close()
    engine = create_engine(url)
    with engine.connect() as connection:
        ours = {"include_name": lambda name, kind, _parent: kind != "table" or name != OWNER_TABLE.name}
        assert compare_metadata(MigrationContext.configure(connection, opts=ours), METADATA) == []
    engine.dispose()
    assert len(METADATA.tables) == len(RECORDS)


def test_a_database_of_the_release_before_opens_with_its_rows(url: str) -> None:
    engine = create_engine(url)
    migrations.upgrade(engine, "0009")
    with engine.begin() as connection:
        connection.exec_driver_sql("INSERT INTO waiting_rounds VALUES ('reef', 9, 'p1', '', 14)")
        connection.exec_driver_sql("INSERT INTO deny_lists VALUES (3, '')")
        connection.exec_driver_sql(
            "INSERT INTO runs VALUES ('reef', '', 'TRAINING', 1, '', '', '', 1, 2, 3, 0, 0, 0, 9)"
        )
        connection.exec_driver_sql("INSERT INTO evaluations VALUES ('reef', 1, 4.5, 1000)")
        for number, zeroed in ((1, 2), (2, 5)):
            connection.exec_driver_sql(
                f"INSERT INTO rounds VALUES ('reef', {number}, 1, 0, 0, true, '', '', 1, 1, 1, 1, 1, 1, {zeroed}, "
                "'', '', '', 1, '', 0, '', '')"
            )
    engine.dispose()
    store = SqlStore(url)
    deny = store.load().deny
    assert deny is not None
    assert deny.number == 3
    assert [(run.parts_zeroed, run.sources) for run in store.load().runs] == [(7, "")]
    assert store.evaluations("reef") == (Evaluation("reef", 1, 4.5, 1000),)
    store.close()


def test_a_run_of_the_build_before_keeps_the_names_of_its_sources(url: str) -> None:
    engine = create_engine(url)
    migrations.upgrade(engine, "0014")
    invented = [[f"source-{number}", 1.0, 1, 0] for number in range(64)]
    known = [["web", 4.0, 48, 750], ["code", 4.0, 16, 250], ["other", 4.0, 16, 250]]
    with engine.begin() as connection:
        for run_id, head in (("reef", 3), ("bay", 0)):
            connection.exec_driver_sql(
                "INSERT INTO runs (run_id, spec_toml, state, created_ms, corpus_digest, layers, genesis, plan_version, "
                "head_round, committed_tokens, loss_round, loss, plan_floor, rounds_opened, parts_zeroed) "
                f"VALUES ('{run_id}', '', 'TRAINING', 1, '', '', '', 1, {head}, 3, 0, 0, 0, 9, 0)"
            )
        for number, sources in enumerate([json.dumps(invented), json.dumps(known), json.dumps(known), ""]):
            connection.exec_driver_sql(f"INSERT INTO evaluations VALUES ('reef', {number}, 4.5, 1000, '{sources}')")
    engine.dispose()
    store = SqlStore(url)
    names = {run.run_id: run.source_names for run in store.load().runs}
    store.close()
    assert names["bay"] == ()
    assert (len(names["reef"]), names["reef"][:2]) == (64, ("web", "code"))
    assert "other" not in names["reef"]


def test_nodes_from_before_new_columns_are_read(url: str) -> None:
    engine = create_engine(url)
    migrations.upgrade(engine, "0015")
    known = {column["name"] for column in inspect(engine).get_columns("nodes")}
    assert known < {item.name for item in fields(Node)}
    with engine.begin() as connection:
        connection.execute(METADATA.tables["nodes"].insert().values({name: getattr(NODE, name) for name in known}))
    engine.dispose()
    store = SqlStore(url)
    assert store.load().nodes == (NODE,)
    store.close()


def test_a_file_that_is_no_database_is_reported_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    path.write_bytes(b"this is not a database, it is a poem " * 100)
    before = path.read_bytes()
    with pytest.raises(DatabaseCorrupt, match="cannot be used") as refusal:
        sqlite(tmp_path)
    assert "backup" in refusal.value.remedy
    assert path.read_bytes() == before


def test_a_damaged_database_is_reported(tmp_path: Path) -> None:
    store = sqlite(tmp_path)
    store.apply([replace(EVENT, event_id=number, message="x" * 500) for number in range(1, 200)])
    store.close()
    path = tmp_path / "c.db"
    damaged = bytearray(path.read_bytes())
    damaged[8192 : len(damaged) - 4096] = b"\x5a" * (len(damaged) - 4096 - 8192)
    path.write_bytes(damaged)
    with pytest.raises(DatabaseCorrupt):
        sqlite(tmp_path).load()


def test_a_database_of_a_newer_release_is_not_touched(tmp_path: Path) -> None:
    sqlite(tmp_path).close()
    connection = sqlite3.connect(tmp_path / "c.db")
    connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.commit()
    connection.close()
    with pytest.raises(DatabaseCorrupt, match="another release"):
        sqlite(tmp_path)


def test_a_place_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataDirUnusable, match="unable to open"):
        SqlStore(f"sqlite:///{tmp_path / 'missing' / 'c.db'}")


@pytest.mark.parametrize("url", ["nonsense", "nosuchdb://host/x"])
def test_an_invalid_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError):
        SqlStore(url)


def test_passwords_stay_out_of_messages() -> None:
    with pytest.raises(ConfigError) as refusal:
        SqlStore("nosuchdb://user:hunter2@host/x")
    assert "hunter2" not in str(refusal.value)
