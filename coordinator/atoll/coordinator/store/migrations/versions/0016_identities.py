"""Nodes with a new identity."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("nodes", sa.Column("replaced_by", sa.Text, nullable=False, server_default=""))
    for name in ("rotated_ms", "rotations"):
        op.add_column("nodes", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for name in ("rotations", "rotated_ms", "replaced_by"):
        op.drop_column("nodes", name)
