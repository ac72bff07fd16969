"""Which codec a round's exchange used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("rounds", sa.Column("codec", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("rounds", "codec")
