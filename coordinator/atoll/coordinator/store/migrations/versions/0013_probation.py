"""Members on probation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for table in ("tokens", "nodes"):
        op.add_column(table, sa.Column("on_probation", sa.Boolean, nullable=False, server_default=sa.false()))


def downgrade() -> None:
    for table in ("tokens", "nodes"):
        op.drop_column(table, "on_probation")
