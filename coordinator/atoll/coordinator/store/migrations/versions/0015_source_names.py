"""Names of sources that a run's evaluations had, so that their number is bounded for good."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("source_names", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("runs", "source_names")
