"""Checkpoints know their layers. Nodes tell theirs anew when they come back."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    for name in ("first_layer", "last_layer"):
        op.add_column("checkpoints", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))


def downgrade() -> None:
    for name in ("last_layer", "first_layer"):
        op.drop_column("checkpoints", name)
