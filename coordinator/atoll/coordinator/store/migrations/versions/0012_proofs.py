"""Proofs against members."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "proofs",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("culprit", sa.Text, primary_key=True),
        sa.Column("proof_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("round", sa.BigInteger, nullable=False),
        sa.Column("found_ms", sa.BigInteger, nullable=False),
        sa.Column("sentence", sa.Text, nullable=False),
        sa.Column("proof", sa.LargeBinary, nullable=False),
    )


def downgrade() -> None:
    op.drop_table("proofs")
