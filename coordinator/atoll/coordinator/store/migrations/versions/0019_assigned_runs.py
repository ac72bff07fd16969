"""The run that a node is to move to, and the one that it came from."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("assigned_run", sa.Text, nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("moved_from", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("nodes", "moved_from")
    op.drop_column("nodes", "assigned_run")
