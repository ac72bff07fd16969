"""How commands print: data on stdout (text for people, versioned JSON for programs), prose on stderr."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, TextIO, TypeVar

import typer

from atoll.core.errors import UsageError

JSON_VERSION = 1

Answer = TypeVar("Answer")


class Output(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"atoll {version('atoll')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text for people, json for programs")]


def print_json(document: Mapping[str, object]) -> None:
    """One versioned object on stdout. `version` grows when a key changes its meaning; new keys may come any time."""
    print(json.dumps({"version": JSON_VERSION, **document}, indent=2, ensure_ascii=False))


def print_json_line(document: Mapping[str, object]) -> None:
    """The same on one line, for streams."""
    print(json.dumps({"version": JSON_VERSION, **document}, ensure_ascii=False), flush=True)


def ask_interactively(question: Callable[[], Answer]) -> Answer:
    """What a person answers to one of typer's questions. Ctrl-C there ends a command as it does anywhere else.

    Raises `UsageError` where there is nobody to ask.
    """
    try:
        return question()
    except typer.Abort:
        if sys.stdin.isatty():
            raise KeyboardInterrupt from None
    raise UsageError("nothing was done: there is nobody here to ask", "--help says how to answer beforehand")


def print_to_stderr(text: str) -> None:
    """Prose for people, on stderr, so that stdout stays data."""
    print(wrap_for_terminal(text, sys.stderr), file=sys.stderr)


def wrap_for_terminal(text: str, stream: TextIO) -> str:
    """As a terminal shows it best: lines broken between words. For other programs, as it is."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
