"""Alembic environment: `upgrade` passes the connection that the server opened."""

from __future__ import annotations

from alembic import context

from atoll.coordinator.store.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    transactional_ddl=True,  # SQLite supports it: an interrupted migration leaves nothing behind
)
with context.begin_transaction():
    context.run_migrations()
