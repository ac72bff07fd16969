"""Rounds do not wait for others any more, because the coordinator asks nodes for those that it lacks.

Old rounds are deleted, so their zeroed parts are counted in the run.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_table("waiting_rounds")
    op.add_column("runs", sa.Column("parts_zeroed", sa.BigInteger, nullable=False, server_default="0"))
    op.execute(
        "UPDATE runs SET parts_zeroed = COALESCE("
        "(SELECT SUM(rounds.parts_zeroed) FROM rounds WHERE rounds.run_id = runs.run_id AND rounds.committed), 0)"
    )


def downgrade() -> None:
    op.drop_column("runs", "parts_zeroed")
    op.create_table(
        "waiting_rounds",
        sa.Column("run_id", sa.Text, primary_key=True),
        sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("peer_id", sa.Text, primary_key=True),
        sa.Column("report", sa.LargeBinary, nullable=False),
        sa.Column("told_ms", sa.BigInteger, nullable=False),
    )
