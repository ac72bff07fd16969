"""What rounds cost nodes, as they report."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

COUNTS = ("tokens", "bytes_sent", "bytes_received")
MEASURES = (
    "train_loss",
    "learning_rate",
    "seconds",
    "update_norm",
    "compute_seconds",
    "stall_seconds",
    "exchange_seconds",
)


def upgrade() -> None:
    op.create_table(
        "node_metrics",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("round", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("peer_id", sa.Text, primary_key=True),
        sa.Column("reported_ms", sa.BigInteger, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in COUNTS),
        *(sa.Column(name, sa.Double, nullable=False) for name in MEASURES),
    )


def downgrade() -> None:
    op.drop_table("node_metrics")
