"""SQLAlchemy tables derived from `records.py`. A migration creates them; a test compares the two."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from sqlalchemy import BigInteger, Boolean, Column, Dialect, Double, LargeBinary, MetaData, Table, Text
from sqlalchemy.types import TypeDecorator, TypeEngine

from atoll.coordinator.store.records import (
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
    Record,
    Round,
    Run,
    Token,
    Vote,
)


class StringTuple(TypeDecorator[tuple[str, ...]]):
    """Column type for a tuple of words without white space (roles, multiaddrs), stored one per line."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str:
        return "\n".join(value or ())

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...]:
        return tuple((value or "").split("\n")) if value else ()


METADATA = MetaData()
_NAMES: dict[type[Record], str] = {
    Token: "tokens",
    Node: "nodes",
    Run: "runs",
    PlanRow: "plans",
    PlanFigures: "plan_figures",
    Round: "rounds",
    Vote: "votes",
    Checkpoint: "checkpoints",
    Evaluation: "evaluations",
    NodeMetrics: "node_metrics",
    DenyRow: "deny_lists",
    Event: "events",
    ProofRow: "proofs",
    Credit: "credits",
    DeletedRun: "deleted_runs",
    ForgottenNode: "forgotten_nodes",
}
_TYPES: dict[object, type[TypeEngine[Any]]] = {
    str: Text,
    int: BigInteger,
    bool: Boolean,
    float: Double,
    bytes: LargeBinary,
    tuple[str, ...]: StringTuple,
}


def _table(record: type[Record]) -> Table:
    types = get_type_hints(record)
    columns = [
        Column(
            item.name,
            _TYPES[types[item.name]],
            primary_key=item.name in record.KEY,
            nullable=False,
            autoincrement=False,
        )
        for item in fields(record)
    ]
    return Table(_NAMES[record], METADATA, *columns)


TABLES: dict[type[Record], Table] = {record: _table(record) for record in _NAMES}
