"""Rounds know the tokens of the run so far; nodes know the token that admitted them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from atoll.v1 import manifest_pb2

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ROUNDS = sa.table(
    "rounds",
    sa.column("run_id", sa.Text),
    *(sa.column(name, sa.BigInteger) for name in ("number", "plan_version", "fragment", "attempt", "committed_tokens")),
    sa.column("committed", sa.Boolean),
    sa.column("manifest", sa.LargeBinary),
)


def upgrade() -> None:
    op.add_column("rounds", sa.Column("committed_tokens", sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("nodes", sa.Column("token_id", sa.Text, nullable=False, server_default=""))
    connection = op.get_bind()
    for row in connection.execute(sa.select(ROUNDS).where(ROUNDS.c.committed)).mappings().all():
        committed = manifest_pb2.CommittedManifest.FromString(row["manifest"])
        total = manifest_pb2.Manifest.FromString(committed.payload).committed_tokens
        keys = ("run_id", "number", "plan_version", "fragment", "attempt")
        same = [ROUNDS.c[name] == row[name] for name in keys]
        connection.execute(sa.update(ROUNDS).where(*same).values(committed_tokens=total))


def downgrade() -> None:
    op.drop_column("nodes", "token_id")
    op.drop_column("rounds", "committed_tokens")
