"""Bounds on the number of entries in a serialised message, checked before it is parsed.

An empty message inside another one takes two bytes on the wire and some hundred in memory. So a message within its byte
limit can still take a hundred times as much memory, and seconds to parse. `parse_bounded` counts the fields on the
wire, including nested messages, and parses the message only if there are few. A message too short for too many fields
is parsed at once.
"""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from atoll.core.errors import PeerMisbehaved

MIN_FIELD_BYTES = 2  # a tag and a value, or a tag and a length
MAX_DEPTH = 32  # of nested messages; ours nest six deep
_MAX_VARINT_BYTES = 10
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}
_M = TypeVar("_M", bound=Message)


def parse_bounded(kind: type[_M], data: bytes, max_entries: int) -> _M:
    """Parse a message that has at most `max_entries` fields in all. Raises `PeerMisbehaved`.

    Packed lists count one entry per byte.
    """
    if len(data) > MIN_FIELD_BYTES * max_entries:
        _Scan(data, max_entries, str(kind.DESCRIPTOR.name)).check(kind.DESCRIPTOR)
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise PeerMisbehaved(f"a {kind.DESCRIPTOR.name} does not parse") from error


def message_class(from_string: Any) -> type[Message] | None:
    """Return the class whose bound method `FromString` this is; None for any other function."""
    owner = getattr(from_string, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, Message) else None


class _Scan:
    def __init__(self, data: bytes, max_entries: int, name: str) -> None:
        self._data = data
        self._max_entries = max_entries
        self._name = name
        self._entries = 0

    def check(self, descriptor: Any) -> None:
        pending: list[tuple[int, int, Any, int]] = [(0, len(self._data), descriptor, 0)]
        while pending:
            start, end, inside, depth = pending.pop()
            if depth > MAX_DEPTH:
                raise PeerMisbehaved(f"a {self._name} is nested more than {MAX_DEPTH} deep")
            fields = inside.fields_by_number
            while start < end:
                tag, start = self._varint(start, end)
                self._add(1)
                wire_type = tag & 7
                if wire_type == _VARINT:
                    _, start = self._varint(start, end)
                elif wire_type == _LENGTH:
                    length, start = self._varint(start, end)
                    if length > end - start:
                        raise PeerMisbehaved(f"a {self._name} does not parse")
                    self._look_into(fields.get(tag >> 3), (start, length, depth), pending)
                    start += length
                elif wire_type in _FIXED_BYTES:
                    start += _FIXED_BYTES[wire_type]
                else:
                    raise PeerMisbehaved(f"a {self._name} has a field of wire type {wire_type}")

    def _look_into(
        self,
        field: Any,
        place: tuple[int, int, int],
        pending: list[tuple[int, int, Any, int]],
    ) -> None:
        start, length, depth = place
        if field is None or field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            return
        if field.message_type is None:  # packed numbers
            self._add(length)
        elif length:
            pending.append((start, start + length, field.message_type, depth + 1))

    def _add(self, entries: int) -> None:
        self._entries += entries
        if self._entries > self._max_entries:
            raise PeerMisbehaved(f"a {self._name} has more than {self._max_entries} entries")

    def _varint(self, start: int, end: int) -> tuple[int, int]:
        value = 0
        for index in range(start, min(end, start + _MAX_VARINT_BYTES)):
            byte = self._data[index]
            value |= (byte & 0x7F) << 7 * (index - start)
            if byte < 0x80:
                return value, index + 1
        raise PeerMisbehaved(f"a {self._name} does not parse")
