"""Rows of JSONL, Parquet and Hugging Face data sets become documents: text, prompts with completions, conversations.

Rows with null and empty values are counted and left out, in all formats. Rows of another form are errors, or only
counted with `strict=False`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.core.errors import CorpusError
from atoll.node.data.chat_template import MARKERS, Message
from atoll.node.data.source_report import SourceReport

_SCALARS: dict[type, str] = {
    bool: "true or false",
    int: "a number",
    float: "a number",
    list: "a list",
    dict: "an object",
}
_REMOVED = str.maketrans(dict.fromkeys("\0" + MARKERS))
_MAX_DEPTH = 64
_MESSAGES_REMEDY = "leave that row out, or put a list of objects with role and content there"


class Row(NamedTuple):
    """The values of the requested columns, and a function that names the row in messages."""

    values: tuple[object, ...]
    place: Callable[[], str]


class Bad(NamedTuple):
    """A line or row that violates the format, for the message "{place} {why}"."""

    place: str
    why: str
    remedy: str


@dataclass(frozen=True)
class Pair:
    """A prompt, and the completion to learn."""

    prompt: str
    completion: str
    place: Callable[[], str]


@dataclass(frozen=True)
class Conversation:
    """Messages with role and content; training learns those of the assistant."""

    messages: tuple[Message, ...]
    place: Callable[[], str]


def text_of(row: Row, field: str, report: SourceReport, strict: bool) -> Iterator[bytes]:
    """Yield the row's value if it is text that is not empty."""
    (value,) = row.values
    if value is None:
        report.skipped_rows += 1
    elif not isinstance(value, str):
        why = f"holds {plain_name(value)} under {field!r}, not text"
        refuse(report, strict, lambda: Bad(row.place(), why, "leave that row out, or put text there"))
    # byte 0 separates documents; JSON may contain lone surrogates, which have no UTF-8
    elif data := value.replace("\0", "").encode("utf-8", errors="replace"):
        report.documents += 1
        yield data
    else:
        report.skipped_rows += 1


def pair_of(row: Row, fields: tuple[str, ...], report: SourceReport, strict: bool) -> Iterator[Pair]:
    """Yield the row's prompt and completion, also if the completion is empty: the encoder counts those."""
    wrong = [(field, value) for field, value in zip(fields, row.values, strict=True) if not isinstance(value, str)]
    if any(value is None for _, value in wrong):
        report.skipped_rows += 1
    elif wrong:
        field, value = wrong[0]
        why = f"holds {plain_name(value)} under {field!r}, not text"
        refuse(report, strict, lambda: Bad(row.place(), why, "leave that row out, or put text there"))
    else:
        prompt, completion = (_clean_text(str(value)) for value in row.values)
        yield Pair(prompt, completion, row.place)


def conversation_of(row: Row, field: str, report: SourceReport, strict: bool) -> Iterator[Conversation]:
    """Yield the row's conversation."""
    (value,) = row.values
    if value is None or value == []:
        report.skipped_rows += 1
        return
    why = f"holds {plain_name(value)} under {field!r}, not a list of messages"
    if isinstance(value, list):
        try:
            yield Conversation(tuple(_message(each, number + 1) for number, each in enumerate(value)), row.place)
            return
        except ValueError as error:
            why = str(error)
    refuse(report, strict, lambda: Bad(row.place(), why, _MESSAGES_REMEDY))


def _message(value: object, number: int) -> Message:
    """Check a message. Keys without a value are left out: Parquet gives every row all keys."""
    message = _clean(value)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"].strip():
        raise ValueError(f"has no role in message {number}")
    message.setdefault("content", None)
    content = message["content"]
    if not isinstance(content, str | list) and (content is not None or len(message) == 2):
        raise ValueError(f"holds {plain_name(content)} as content of message {number}, not text")
    return message


def _clean(value: object, depth: int = 0) -> Any:
    if isinstance(value, str):
        return _clean_text(value)
    if depth > _MAX_DEPTH:
        raise ValueError("is nested too deeply")
    if isinstance(value, dict):
        return {_clean_text(str(key)): _clean(each, depth + 1) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_clean(each, depth + 1) for each in value]
    if value is not None and not isinstance(value, bool | int | float):
        raise ValueError(f"holds a value of the type {type(value).__name__}")
    return value


def _clean_text(text: str) -> str:
    """Remove byte 0, which separates documents, and markers of chat templates; replace lone surrogates from JSON."""
    return text.translate(_REMOVED).encode("utf-8", errors="replace").decode()


def plain_name(value: object) -> str:
    """Name a JSON value in plain English."""
    return _SCALARS.get(type(value), "null" if value is None else "text" if isinstance(value, str) else "another value")


def refuse(report: SourceReport, strict: bool, describe: Callable[[], Bad]) -> None:
    """Raise the error of a bad line, or count it. Only the first bad line of a report is described."""
    if not strict and report.bad_lines:
        report.bad_lines += 1
        return
    bad = describe()
    if strict:
        raise CorpusError(f"{bad.place} {bad.why}", bad.remedy)
    report.bad_line(bad.place, bad.why)
