"""Rounds that wait for the one before them; the number of attempts, because rows of old ones are dropped."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "waiting_rounds",
        sa.Column("run_id", sa.Text, primary_key=True, nullable=False),
        sa.Column("number", sa.BigInteger, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("peer_id", sa.Text, primary_key=True, nullable=False),
        sa.Column("report", sa.LargeBinary, nullable=False),
        sa.Column("told_ms", sa.BigInteger, nullable=False),
    )
    op.add_column("runs", sa.Column("rounds_opened", sa.BigInteger, nullable=False, server_default="0"))
    runs = sa.table("runs", sa.column("run_id", sa.Text), sa.column("rounds_opened", sa.BigInteger))
    rounds = sa.table("rounds", sa.column("run_id", sa.Text))
    count = sa.select(sa.func.count()).where(rounds.c.run_id == runs.c.run_id).scalar_subquery()
    op.execute(sa.update(runs).values(rounds_opened=count))


def downgrade() -> None:
    op.drop_column("runs", "rounds_opened")
    op.drop_table("waiting_rounds")
