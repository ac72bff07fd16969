"""Results on stdout: a table for people, or one versioned JSON object.

JSON keys are the wire's field names, enums are short lower-case words, bytes are hex, times are milliseconds
since the Unix epoch. `version` grows when a key changes its meaning; new keys may come at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.coordinator.sanitize import clean, enum_word
from atoll.core.output import Output, print_json, wrap_for_terminal

JsonObject = dict[str, object]
_MAX_LINE_CHARACTERS = 4096


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, the key of its value, and how it stands."""

    heading: str
    key: str = ""
    align_right: bool = False
    prose: bool = False  # it is what gives way on a narrow terminal
    drop_order: int = 0  # where that is not enough, columns go: 1 first, and so on; 0 never does


def show(output: Output, document: Mapping[str, object], columns: Sequence[Column], rows: Sequence[JsonObject]) -> None:
    """Print `document` as JSON, or `rows` as a table."""
    if output is Output.JSON:
        print_json(document)
        return
    left = sorted({column.drop_order for column in columns if column.drop_order})
    table, endless = _table(columns, rows), Console(width=10_000)  # one that is narrow measures no more than that
    while left and endless.measure(table).maximum > _console().width:
        del left[0]
        columns = [column for column in columns if not column.drop_order or column.drop_order in left]
        table = _table(columns, rows)
    _print(table)


def print_sentences(sentences: Iterable[str]) -> None:
    """Below a table, a line each; where a terminal is narrower, broken between words."""
    for sentence in map(clean, sentences):
        print(wrap_for_terminal(sentence, sys.stdout))


def show_facts(output: Output, document: Mapping[str, object], facts: Sequence[tuple[str, object]]) -> None:
    """Print `document` as JSON, or facts one a line."""
    if output is Output.JSON:
        print_json(document)
        return
    table = Table(box=None, pad_edge=False, show_header=False, show_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, _plain_text(value))
    _print(table)


def message_dict(message: Message) -> JsonObject:
    """A message as a dictionary of plain values, every field present."""
    return {field.name: _value(field, getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(field: Any, value: Any) -> object:
    if field.is_repeated:
        return [_single(field, item) for item in value]
    return _single(field, value)


def _single(field: Any, value: object) -> object:
    if isinstance(value, Message):
        return message_dict(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None and isinstance(value, int):
        return enum_word(field.enum_type, value)
    return value


def _plain_text(value: object) -> Text:
    """Never markup: brackets are what they are. Line by line, because a run spec has lines."""
    return Text("\n".join(clean(line, _MAX_LINE_CHARACTERS) for line in str(value).split("\n")))


def _table(columns: Sequence[Column], rows: Sequence[JsonObject]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_edge=False)
    for column in columns:
        table.add_column(
            column.heading.upper(), justify="right" if column.align_right else "left", no_wrap=not column.prose
        )
    for row in rows:
        table.add_row(*(_plain_text(row[column.key or column.heading]) for column in columns))
    return table


def _console() -> Console:
    """As wide as the terminal; without one, wide enough never to cut a line."""
    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def _print(table: Table) -> None:
    """No spaces at the ends of lines."""
    console = _console()
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
