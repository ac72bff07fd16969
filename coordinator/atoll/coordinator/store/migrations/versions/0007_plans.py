"""What is known of each plan beside what was signed; the operator's pins."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

FIGURES = ("predicted_tokens_per_second", "measured_tokens_per_second", "measured_seconds", "moved_bytes")


def upgrade() -> None:
    op.create_table(
        "plan_figures",
        sa.Column("run_id", sa.Text, primary_key=True, nullable=False),
        sa.Column("version", sa.BigInteger, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("reason", sa.Text, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("issued_ms", "nodes", "routes")),
        *(sa.Column(name, sa.Double, nullable=False) for name in FIGURES),
        sa.Column("left_out", sa.Text, nullable=False),
    )
    op.add_column("nodes", sa.Column("pin", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("nodes", "pin")
    op.drop_table("plan_figures")
