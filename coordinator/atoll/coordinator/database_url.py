"""The database's URL: its sources, and its printable form, because it may contain a password.

A setting is the URL itself, or `file:PATH` of a file whose first line is the URL. A command line must not hold a
password: every user of the machine can read it.
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
    """The URL for a setting. Raises `ConfigError` for an unreadable file."""
    if not setting.startswith(FILE):
        return setting
    path = Path(setting.removeprefix(FILE)).expanduser()
    try:
        return path.read_text().split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read the database's URL from {path}: {reason}", "see --database") from error


def refuse_password(argument: str) -> None:
    """Raise `ConfigError` for a command-line argument that holds a password."""
    url = _parsed(argument)
    if url is not None and (url.password is not None or "password" in url.query):
        raise ConfigError(
            "the database URL on the command line holds a password, which every user of this machine can read",
            f"write the URL to a file and pass --database {FILE}PATH, or set {VARIABLE}",
        )


def printable(setting: str) -> str:
    """A setting in printable form: passwords are hidden, and text that is not a URL is hidden as a whole."""
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
