"""The schema's history, applied from code at every start: `upgrade(engine)` is all the server calls.

To change a table: change its class in `store/records.py`, add `versions/NNNN_what.py`, run the tests (one
compares the migrated schema with the records).
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Engine


class UnknownRevision(Exception):
    """The database carries a revision that this release does not know."""


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Bring the schema to `revision`, by default this release's. Raises `UnknownRevision` and SQLAlchemy's errors."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, revision)
        except CommandError as error:
            raise UnknownRevision(str(error)) from error
