"""Rounds do not wait for others any more: the coordinator asks nodes for those that it lacks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("waiting_rounds")


def downgrade() -> None:
    op.create_table(
        "waiting_rounds",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("peer_id", sa.Text, primary_key=True),
        sa.Column("report", sa.LargeBinary, nullable=False),
        sa.Column("told_ms", sa.BigInteger, nullable=False),
    )
