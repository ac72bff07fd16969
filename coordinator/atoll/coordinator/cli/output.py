"""Results on stdout: a table for people, or one versioned JSON object.

JSON keys are the field names of the protobuf messages. Enums become short lower-case words, bytes become hex,
and times are milliseconds since the Unix epoch. `version` grows when a key changes its meaning; new keys may
appear at any time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.coordinator.sanitize import clean, enum_word
from atoll.core.output import Output, print_json, wrap_for_terminal

JsonObject = dict[str, object]
M = TypeVar("M", bound=Message)
_MAX_LINE_CHARACTERS = 4096


@dataclass(frozen=True)
class Column:
    """A column of a table: its heading, the key of its value, and its layout."""

    heading: str
    key: str = ""
    align_right: bool = False
    prose: bool = False  # wraps on a narrow terminal
    drop_order: int = 0  # columns dropped if the table is still too wide: 1 first; 0: never


def show(output: Output, document: Mapping[str, object], columns: Sequence[Column], rows: Sequence[JsonObject]) -> None:
    """Print `document` as JSON, or `rows` as a table."""
    if output is Output.JSON:
        print_json(document)
        return
    droppable = sorted({column.drop_order for column in columns if column.drop_order})
    table, wide_console = _table(columns, rows), Console(width=10_000)  # measures do not exceed the width
    while droppable and wide_console.measure(table).maximum > _console().width:
        del droppable[0]
        columns = [column for column in columns if not column.drop_order or column.drop_order in droppable]
        table = _table(columns, rows)
    _print(table)


def show_messages(
    output: Output,
    key: str,
    messages: Sequence[M],
    columns: Sequence[Column],
    row: Callable[[M], JsonObject],
) -> None:
    """Print messages as JSON under `key`, or as a table with one row each."""
    show(output, {key: [message_dict(item) for item in messages]}, columns, [row(item) for item in messages])


def print_sentences(sentences: Iterable[str]) -> None:
    """Print sentences below a table, one a line, wrapped between words on a narrow terminal."""
    for sentence in map(clean, sentences):
        print(wrap_for_terminal(sentence, sys.stdout))


def show_facts(output: Output, document: Mapping[str, object], facts: Sequence[tuple[str, object]]) -> None:
    """Print `document` as JSON, or `facts` one a line."""
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
    """Convert a protobuf message to a dictionary of plain values, with every field present; absent numbers are None."""
    return {field.name: _of(message, field) for field in message.DESCRIPTOR.fields}


def _of(message: Message, field: Any) -> object:
    if field.message_type is None and field.has_presence and not message.HasField(field.name):
        return None
    return _value(field, getattr(message, field.name))


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
    """Text without markup: brackets are printed as they are. Keeps line breaks, because a run spec has lines."""
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
    """Console as wide as the terminal; without a terminal, wide enough never to cut a line."""
    return Console(width=None if sys.stdout.isatty() else 240, highlight=False)


def _print(table: Table) -> None:
    """Print without spaces at the ends of lines."""
    console = _console()
    with console.capture() as captured:
        console.print(table)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))
