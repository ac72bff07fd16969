"""Where the database's URL comes from, and how it is shown: it may hold a password.

A setting is the URL itself or `file:PATH`, whose first line is the URL. What every user of the machine can read, a
command line, must not hold a password.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from atoll.core.errors import ConfigError

FILE = "file:"
VARIABLE = "ATOLL_COORDINATOR_DATABASE"
_HIDDEN = "hidden"


def resolve(setting: str) -> str:
    """The URL that a setting means. Raises `ConfigError` for a file that cannot be read."""
    if not setting.startswith(FILE):
        return setting
    path = Path(setting.removeprefix(FILE)).expanduser()
    try:
        return path.read_text().split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the database's URL from {path}: {why}", "see --database") from error


def refuse_password(argument: str) -> None:
    """Raise `ConfigError` for a command-line argument that holds one."""
    url = _parsed(argument)
    if url is not None and (url.password is not None or "password" in url.query):
        raise ConfigError(
            "the database's password must not stand on the command line, where every user of this machine can read it",
            f"put the URL into a file and name it with --database {FILE}PATH, or set {VARIABLE}",
        )


def printable(setting: str) -> str:
    """For people and logs: a password is hidden, and so is what cannot be read as a URL."""
    if not setting or setting.startswith(FILE):
        return setting
    url = _parsed(setting)
    if url is None:
        return "that --database names"
    if "password" in url.query:
        url = url.update_query_dict({"password": _HIDDEN})
    return url.render_as_string(hide_password=True)


def _parsed(text: str) -> URL | None:
    try:
        return make_url(text)
    except (ArgumentError, ValueError):
        return None
