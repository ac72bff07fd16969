"""Who was left out of sums by screening, round by round."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("screened", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("rounds", "screened")
