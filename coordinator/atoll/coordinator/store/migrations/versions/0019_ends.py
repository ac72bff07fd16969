"""Why nodes ended."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("ended", sa.Text, nullable=False, server_default=""))
    op.add_column("nodes", sa.Column("ended_detail", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("nodes", "ended_detail")
    op.drop_column("nodes", "ended")
