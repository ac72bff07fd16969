"""How commands print: data on stdout (text for people, versioned JSON for programs), prose on stderr."""

from __future__ import annotations

import json
import sys
from enum import StrEnum
from typing import Annotated, Any

import typer

JSON_VERSION = 1


class Output(StrEnum):
    """How a command prints its result."""

    TEXT = "text"
    JSON = "json"


OutputOption = Annotated[Output, typer.Option("--output", "-o", help="text for people, json for programs")]


def print_json(kind: str, value: Any) -> None:
    """One JSON object on stdout: `{"version": 1, <kind>: value}`."""
    print(json.dumps({"version": JSON_VERSION, kind: value}, indent=2))


def say(text: str) -> None:
    """Prose for people, on stderr, so that stdout stays data."""
    print(text, file=sys.stderr)
