"""Names of sources that a run's evaluations had, so that their number is bounded."""

from __future__ import annotations

import json
from collections import Counter, defaultdict

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("source_names", sa.Text, nullable=False, server_default=""))
    connection = op.get_bind()
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for run_id, sources in connection.execute(sa.text("SELECT run_id, sources FROM evaluations WHERE sources != ''")):
        found[run_id].update(name for name, *_ in json.loads(sources) if name != "other")
    for run_id, names in found.items():
        most = "\n".join(name for name, _ in names.most_common(64))
        connection.execute(
            sa.text("UPDATE runs SET source_names = :names WHERE run_id = :run"), {"names": most, "run": run_id}
        )


def downgrade() -> None:
    op.drop_column("runs", "source_names")
