"""Who was present in a round, the coordinator's votes, the nodes' checkpoints, and what a restore leaves behind."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from atoll.v1 import manifest_pb2

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

KEYS = ("run_id", "number", "plan_version", "fragment", "attempt")
ROUNDS = sa.table(
    "rounds",
    *(sa.column(name, sa.BigInteger) for name in (*KEYS[1:], "made_under", "partial")),
    *(sa.column(name, sa.Text) for name in ("run_id", "present")),
    *(sa.column(name, sa.LargeBinary) for name in ("manifest", "previous_hash")),
    sa.column("committed", sa.Boolean),
)


def upgrade() -> None:
    op.create_table(
        "votes",
        sa.Column("run_id", sa.Text, primary_key=True, nullable=False),
        sa.Column("number", sa.BigInteger, primary_key=True, nullable=False, autoincrement=False),
        *(
            sa.Column(name, sa.BigInteger, nullable=False)
            for name in ("promised_plan", "promised_attempt", "voted_plan", "voted_attempt")
        ),
        sa.Column("payload", sa.LargeBinary, nullable=False),
    )
    op.create_table(
        "checkpoints",
        sa.Column("peer_id", sa.Text, primary_key=True, nullable=False),
        sa.Column("round", sa.BigInteger, primary_key=True, nullable=False, autoincrement=False),
        sa.Column("run_id", sa.Text, nullable=False),
        sa.Column("manifest_hash", sa.LargeBinary, nullable=False),
        *(sa.Column(name, sa.BigInteger, nullable=False) for name in ("size_bytes", "written_ms", "committed_tokens")),
    )
    op.add_column("runs", sa.Column("plan_floor", sa.BigInteger, nullable=False, server_default="0"))
    for name in ("made_under", "partial"):
        op.add_column("rounds", sa.Column(name, sa.BigInteger, nullable=False, server_default="0"))
    op.add_column("rounds", sa.Column("present", sa.Text, nullable=False, server_default=""))
    op.add_column("rounds", sa.Column("previous_hash", sa.LargeBinary, nullable=False, server_default=""))
    _read_manifests()


def _read_manifests() -> None:
    """Until now every contributor was present, and every manifest was of the attempt that committed it."""
    connection = op.get_bind()
    connection.execute(sa.update(ROUNDS).values(previous_hash=b""))  # SQLite keeps the default as text
    for row in connection.execute(sa.select(ROUNDS).where(ROUNDS.c.committed)).mappings().all():
        committed = manifest_pb2.CommittedManifest.FromString(row["manifest"])
        manifest = manifest_pb2.Manifest.FromString(committed.payload)
        same = [ROUNDS.c[name] == row[name] for name in KEYS]
        known = {
            "present": "\n".join(item.peer_id for item in manifest.contributions),
            "previous_hash": manifest.previous_hash,
            "made_under": manifest.round.plan_version,
        }
        connection.execute(sa.update(ROUNDS).where(*same).values(**known))


def downgrade() -> None:
    for name in ("previous_hash", "present", "partial", "made_under"):
        op.drop_column("rounds", name)
    op.drop_column("runs", "plan_floor")
    op.drop_table("checkpoints")
    op.drop_table("votes")
