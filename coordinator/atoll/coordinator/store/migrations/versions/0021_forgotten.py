"""What is left of runs that were deleted, and of nodes that were forgotten."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("plans_before", sa.BigInteger, nullable=False, server_default="0"))
    op.create_table(
        "deleted_runs",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("plan_version", sa.BigInteger, nullable=False),
        sa.Column("deleted_ms", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "forgotten_nodes",
        sa.Column("peer_id", sa.Text, primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("run_deleted", sa.Boolean, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("forgotten_ms", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("forgotten_nodes")
    op.drop_table("deleted_runs")
    op.drop_column("runs", "plans_before")
