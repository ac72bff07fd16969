"""Earlier identities of forgotten nodes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("forgotten_nodes", sa.Column("replaced_by", sa.Text, nullable=False, server_default=""))


def downgrade() -> None:
    op.drop_column("forgotten_nodes", "replaced_by")
