"""The first schema: all tables of `store/records.py`. A `*` marks the columns of a primary key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"  # databases that eight earlier steps brought to this schema open as they are
down_revision = None
branch_labels = None
depends_on = None

TABLES = {
    "tokens": (
        "token_id* text, secret_hash text, run_id text, roles text, uses_total int, uses_left int, created_ms int,"
        "expires_ms int, revoked bool"
    ),
    "nodes": (
        "peer_id* text, name text, run_id text, roles text, public_key blob, epoch int, enrolled_ms int,"
        "last_seen_ms int, banned bool, draining bool, left bool, multiaddrs text, token_id text, pin text,"
        "there_seconds real, away_seconds real, losses real"
    ),
    "runs": (
        "run_id* text, spec_toml text, state text, created_ms int, corpus_digest text, layers blob, genesis blob,"
        "plan_version int, head_round int, committed_tokens int, loss_round int, loss real, plan_floor int,"
        "rounds_opened int"
    ),
    "plans": "run_id* text, version* int, sealed blob, issued_ms int",
    "plan_figures": (
        "run_id* text, version* int, reason text, issued_ms int, nodes int, routes int,"
        "predicted_tokens_per_second real, measured_tokens_per_second real, measured_seconds real, moved_bytes real,"
        "left_out text"
    ),
    "rounds": (
        "run_id* text, number* int, plan_version* int, fragment* int, attempt* int, committed bool, reason text,"
        "opener text, seconds real, reported_ms int, wire_bytes int, tokens int, committed_tokens int, members int,"
        "parts_zeroed int, manifest_hash blob, manifest blob, previous_hash blob, made_under int, present text,"
        "partial int, screened text, codec text"
    ),
    "waiting_rounds": "run_id* text, number* int, peer_id* text, report blob, told_ms int",
    "votes": (
        "run_id* text, number* int, promised_plan int, promised_attempt int, voted_plan int, voted_attempt int,"
        "payload blob"
    ),
    "checkpoints": (
        "peer_id* text, round* int, run_id text, manifest_hash blob, size_bytes int, written_ms int,"
        "committed_tokens int, first_layer int, last_layer int"
    ),
    "evaluations": "run_id* text, round* int, loss real, committed_tokens int",
    "deny_lists": "number* int, sealed blob",
    "events": "event_id* int, unix_ms int, kind text, run_id text, subject text, message text",
}
TYPES = {"text": sa.Text, "int": sa.BigInteger, "bool": sa.Boolean, "blob": sa.LargeBinary, "real": sa.Double}


def column(text: str) -> sa.Column:
    name, kind = text.split()
    key = name.endswith("*")
    return sa.Column(name.rstrip("*"), TYPES[kind], primary_key=key, nullable=False, autoincrement=False)


def upgrade() -> None:
    for name, columns in TABLES.items():
        op.create_table(name, *(column(text) for text in columns.split(",")))


def downgrade() -> None:
    for name in reversed(TABLES):
        op.drop_table(name)
