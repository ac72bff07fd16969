"""What nodes contributed to runs."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "credits",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("peer_id", sa.Text, primary_key=True),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.Column("rounds", sa.BigInteger, nullable=False),
        sa.Column("first_ms", sa.BigInteger, nullable=False),
        sa.Column("last_ms", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("credits")
