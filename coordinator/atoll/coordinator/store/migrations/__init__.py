"""Schema migrations, applied by code at every start: the server only calls `upgrade(engine)`.

To change a table: change its class in `store/records.py`, add `versions/NNNN_what.py`, and run the tests. One test
compares the migrated schema with the records.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.util.exc import CommandError
from sqlalchemy import Engine


class UnknownRevision(Exception):
    """The database has a revision that this release does not know."""


def upgrade(engine: Engine, revision: str = "head") -> None:
    """Migrate the schema to the newest revision, or to another. Raises `UnknownRevision` and SQLAlchemy's errors."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, revision)
        except CommandError as error:
            raise UnknownRevision(str(error)) from error
