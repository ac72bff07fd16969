"""Nodes remember how much of the time they were there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None
COLUMNS = ("there_seconds", "away_seconds", "losses")


def upgrade() -> None:
    for name in COLUMNS:
        op.add_column("nodes", sa.Column(name, sa.Double, nullable=False, server_default="0"))


def downgrade() -> None:
    for name in reversed(COLUMNS):
        op.drop_column("nodes", name)
