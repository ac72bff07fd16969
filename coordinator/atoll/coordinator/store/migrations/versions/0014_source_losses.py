"""Held-out losses of the sources of a corpus, beside those of all text."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("evaluations", "runs"):
        op.add_column(table, sa.Column("sources", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    for table in ("evaluations", "runs"):
        op.drop_column(table, "sources")
