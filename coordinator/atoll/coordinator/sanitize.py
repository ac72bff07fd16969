"""Sanitizing of foreign text for logs, terminals and tables.

Nodes name their devices and give reasons for leaving. Printed unchanged, such text could control the terminal: control
characters move the cursor and set colours, bidirectional overrides reorder lines, and length alone can bury other
output. Text is cleaned on arrival, and once more on output, because a database outlives a release.
"""

from __future__ import annotations

import math
import unicodedata
from typing import Any, TypeVar

from google.protobuf.message import Message

MAX_NAME_CHARACTERS = 256
MAX_REASON_CHARACTERS = 200
_SIGNED = ("clock_offset_seconds",)  # fields that may be negative
MAX_SENTENCE_CHARACTERS = 500
_M = TypeVar("_M", bound=Message)
_BREAKS = {"Zl", "Zp"}  # line and paragraph separators
_UNPRINTABLE = {"Cc", "Cf", "Cs", "Co", "Cn"}  # control, format, surrogate, private, unassigned


def clean(text: str, limit: int = MAX_SENTENCE_CHARACTERS) -> str:
    """One line of printable characters, at most `limit` of them."""
    kept = []
    for character in text[: 4 * limit]:
        kind = unicodedata.category(character)
        if character in "\t\n\r" or kind in _BREAKS:
            kept.append(" ")
        elif kind not in _UNPRINTABLE:
            kept.append(character)
    return "".join(kept)[:limit]


def sanitized_message(message: _M, limit: int = MAX_NAME_CHARACTERS) -> _M:
    """A copy with known fields and enum values only, clean strings, and finite numbers of at least 0.

    Nested messages are treated in the same way; lists are not changed.
    """
    kept = type(message)()
    kept.CopyFrom(message)
    kept.DiscardUnknownFields()
    for field, value in message.ListFields():
        if isinstance(value, str):
            setattr(kept, field.name, clean(value, limit))
        elif isinstance(value, float) and not (math.isfinite(value) and (value >= 0 or field.name in _SIGNED)):
            kept.ClearField(field.name)
        elif field.enum_type is not None and value not in field.enum_type.values_by_number:
            setattr(kept, field.name, 0)
        elif isinstance(value, Message):
            getattr(kept, field.name).CopyFrom(sanitized_message(value, limit))
    return kept


def enum_word(kind: Any, number: int) -> str:
    """Short word for an enum value: `NODE_STATE_CATCHING_UP` → "catching_up". An unknown number stays a number.

    `kind` is the enum's descriptor.
    """
    value = kind.values_by_number.get(number)
    if value is None:
        return str(number)
    prefix = kind.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return str(value.name).removeprefix(prefix).lower()
