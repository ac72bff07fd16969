"""Bad input made from good: messages with wrong fields, wrong bytes, and too many of either.

A valid message is changed in one to four places, first by field (extremes, unknown numbers, floods, what is missing),
then in its bytes (cut, repeated, flipped, wrong wire types, unknown fields, lengths that lie). Everything follows from
what hypothesis draws, so a failure shrinks and is replayed.
"""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any, TypeVar

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from atoll.core.frames import PREFIX, Frame, FrameKind

M = TypeVar("M", bound=Message)

CASES = [
    pytest.param(250, id="short"),
    pytest.param(10_000, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
]
FLOOD = 2_000  # entries: what a careless loop would notice


def cases(examples: int) -> settings:
    """That many cases, however long each takes."""
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)


seeds = st.integers(0, 2**32 - 1)


class Mutator:
    """Changes messages and bytes; all that it does follows from its seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def message(self, valid: M) -> bytes:
        """The bytes of `valid` after some changes; at times of no message at all."""
        changed = type(valid)()
        changed.CopyFrom(valid)
        for _ in range(self.rng.choice((0, 1, 1, 1, 2, 4))):
            self.field(changed)
        return self.bytes(changed.SerializeToString()) if self.rng.random() < 0.35 else changed.SerializeToString()

    def field(self, message: Message) -> None:
        """Change one field, anywhere inside; a field that is not set may become so."""
        places = list(_places(message))
        parent, field = self.rng.choice(places)
        if field.is_repeated:
            self._list(parent, field)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            if self.rng.random() < 0.5:
                parent.ClearField(field.name)
            else:
                getattr(parent, field.name).SetInParent()
        else:
            setattr(parent, field.name, self._scalar(field, getattr(parent, field.name)))

    def _list(self, parent: Message, field: FieldDescriptor) -> None:
        items = list(getattr(parent, field.name))
        change = self.rng.randrange(6)
        if change == 0:
            items = []
        elif change == 1:
            items = items[:-1]
        elif change == 2:
            items = items[::-1]
        elif change == 3 and items:
            items = items + [self.rng.choice(items)] * self.rng.choice((1, 2, 50, FLOOD))
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            items += [GetMessageClass(field.message_type)()] * self.rng.choice((1, 50))
        else:
            value = self._scalar(field, items[0] if items else _EMPTY.get(field.type, 0))
            items = [*items[1:], value] if self.rng.random() < 0.5 else [value] * self.rng.choice((1, 3, FLOOD))
        parent.ClearField(field.name)
        getattr(parent, field.name).extend(items)

    def _scalar(self, field: FieldDescriptor, now: Any) -> Any:
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return not now
            case FieldDescriptor.CPPTYPE_ENUM:
                return self.rng.choice((0, 1, 99, 2**31 - 1, -1))
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return self.rng.choice((0.0, -1.0, 1e300, float("inf"), float("nan")))
            case FieldDescriptor.CPPTYPE_STRING:
                return self._text(now) if field.type == FieldDescriptor.TYPE_STRING else self.bytes(now)
        low, high = _BOUNDS[field.cpp_type]
        near = (now - 1, now + 1, now * 2, 0, 1, low, high, high // 2, self.rng.randrange(0, 300))
        return min(high, max(low, self.rng.choice(near)))

    def _text(self, now: str) -> str:
        return self.rng.choice(("", now[:-1], now + "x", now * 40, "\0", "\u202e" * 30, "../" * 20, "q" * 3_000))

    def bytes(self, valid: bytes) -> bytes:
        """Some other bytes."""
        at = self.rng.randrange(len(valid) + 1)
        match self.rng.randrange(9):
            case 0:
                return valid[:at]
            case 1:
                return valid + valid
            case 2:
                return valid[:at] + bytes([self.rng.randrange(256)]) + valid[at + 1 :]
            case 3:
                return valid + b"\xf8\x7f\x01" * self.rng.choice((1, 100))  # field 2047: unknown
            case 4:
                return valid[:at] + b"\xff" * 11 + valid[at:]  # a number that never ends
            case 5:
                return bytes([self.rng.randrange(1, 12) << 3 | self.rng.randrange(8)]) + valid  # another wire type
            case 6:
                return valid + b"\x0a\xff\xff\xff\xff\x0f"  # a length beyond the end
            case 7:
                return b"\x0b" * self.rng.choice((1, 90, 5_000))  # groups in groups
        return self.rng.randbytes(self.rng.choice((0, 1, 2, 30, 500)))

    def frame(self, valid: Frame, message: type[Message] | None = None) -> Frame:
        """Another frame in the place of `valid`, whose header is a `message`."""
        kind, header, body = valid.kind, valid.header, bytes(valid.body)
        what = self.rng.randrange(10)
        if what == 0:
            kind = self.rng.choice(list(FrameKind))
        elif what == 1:
            header = self.bytes(header)
        elif what == 2 or (what < 6 and body):
            body = self.values(body)
        elif message is not None:
            header = self.message(message.FromString(header))
        return Frame(kind, header, body)

    def values(self, valid: bytes) -> bytes:
        """Another body: damaged numbers, numbers that are none, numbers that are too large, more, fewer."""
        size = len(valid)
        number = self.rng.choice((float("nan"), float("inf"), -float("inf"), 1e30, 3e38, 1e-45))
        match self.rng.randrange(5):
            case 0:
                return (struct.pack("<f", number) * (size // 4 + 1))[:size]
            case 1:
                return b"\xff" * size
            case 2 if size:
                at = self.rng.randrange(size)
                return valid[:at] + bytes([valid[at] ^ 1 << self.rng.randrange(8)]) + valid[at + 1 :]
        return self.bytes(valid)

    def wire(self, frame: Frame, *, checksum_body: bool = True) -> bytes:
        """A frame's bytes on a stream, at times with a prefix that lies about them."""
        data = bytearray(on_wire(frame, checksum_body=checksum_body))
        match self.rng.randrange(8):
            case 0:
                data[self.rng.randrange(16)] ^= 1 << self.rng.randrange(8)
            case 1:
                struct.pack_into(">I", data, 4, self.rng.choice((0, 1, 2**31, 2**32 - 1)))
            case 2:
                struct.pack_into(">I", data, 8, self.rng.choice((1, 2**20, 2**32 - 1)))
            case 3:
                return bytes(data[: self.rng.randrange(len(data))])
            case 4:
                return self.rng.randbytes(self.rng.choice((1, 16, 17, 400)))
        return bytes(data)


_EMPTY = {FieldDescriptor.TYPE_STRING: "", FieldDescriptor.TYPE_BYTES: b""}
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


def on_wire(frame: Frame, *, checksum_body: bool = True) -> bytes:
    """A frame's true bytes on a stream, also of one that no sender of ours would send."""
    body = bytes(frame.body)
    checksum = zlib.crc32(body if checksum_body else b"", zlib.crc32(frame.header))
    return PREFIX.pack(b"AT", 1, frame.kind, len(frame.header), len(body), checksum) + frame.header + body


def _places(message: Message) -> Iterator[tuple[Message, FieldDescriptor]]:
    """Every field of `message` and of the messages in it that are set."""
    for field in message.DESCRIPTOR.fields:
        yield message, field
        if field.type != FieldDescriptor.TYPE_MESSAGE:
            continue
        if field.is_repeated:
            for item in list(getattr(message, field.name))[:4]:
                yield from _places(item)
        elif message.HasField(field.name):
            yield from _places(getattr(message, field.name))


def never_changed(valid: Message, tries: int = 3_000) -> set[str]:
    """Names of the fields of `valid` that no mutation changes: for testing the tests."""
    left = {field.name for field in valid.DESCRIPTOR.fields}
    for seed in range(tries):
        try:
            changed = type(valid).FromString(Mutator(seed).message(valid))
        except DecodeError:
            continue
        left -= {name for name in left if getattr(changed, name) != getattr(valid, name)}
        if not left:
            break
    return left
