"""Certificate authorities of the nodes' certificates."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("authority", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("nodes", "authority")
