"""Rounds name the seats that decide the next one; the coordinator votes for proposals.

Earlier votes are for results of protocol 1, which no round of protocol 2 can commit.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, and rename the other."""
    op.add_column("rounds", sa.Column("seats", sa.Text, nullable=False, server_default="[]"))
    op.execute("DELETE FROM votes")
    op.execute("ALTER TABLE votes RENAME COLUMN payload TO proposal")
