"""Output of commands: data on stdout (text for people, versioned JSON for programs), prose on stderr."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, TextIO, TypeVar

import typer

from atoll.core.errors import UsageError

JSON_VERSION = 1

Answer = TypeVar("Answer")


class Output(StrEnum):
    """Format of a command's result."""

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
OutputOption = Annotated[Output, typer.Option("--output", "-o", help="result format: text, or JSON for programs")]


def print_json(document: Mapping[str, object]) -> None:
    """Print a versioned object on stdout. `version` increases if a key changes its meaning, not for a new key."""
    print(json.dumps({"version": JSON_VERSION, **document}, indent=2, ensure_ascii=False))


def print_json_line(document: Mapping[str, object]) -> None:
    """Print one versioned object on one line, for streams."""
    print(json.dumps({"version": JSON_VERSION, **document}, ensure_ascii=False), flush=True)


def print_json_rows(document: Mapping[str, object], key: str, rows: Iterable[Mapping[str, object]]) -> None:
    """Print one versioned object whose last key is a list, one row per line, as the rows come."""
    head = json.dumps({"version": JSON_VERSION, **document, key: []}, ensure_ascii=False)
    print(head.removesuffix("]}"), end="")
    for index, row in enumerate(rows):
        print(",\n" if index else "\n", json.dumps(row, ensure_ascii=False), sep="", end="")
    print("\n]}")


def ask_interactively(question: Callable[[], Answer]) -> Answer:
    """Return the answer to one of typer's questions. Ctrl-C ends the command as it does elsewhere.

    Raises `UsageError` if standard input is not a terminal.
    """
    try:
        return question()
    except typer.Abort:
        if sys.stdin.isatty():
            raise KeyboardInterrupt from None
    raise UsageError(
        "this command needs an answer, and standard input is not a terminal: nothing was changed",
        "answer by an option of the command: see --help",
    )


def print_to_stderr(text: str) -> None:
    """Print prose on stderr, so that stdout contains data only."""
    print(wrap_for_terminal(text, sys.stderr), file=sys.stderr)


def wrap_for_terminal(text: str, stream: TextIO) -> str:
    """Break lines between words at the terminal's width. Return text for a pipe or file unchanged."""
    if not stream.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(line if len(line) <= width else _broken(line, width) for line in text.split("\n"))


def _broken(line: str, width: int) -> str:
    return textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
