"""Frames: the units of every stream between peers.

    0      2        3      4              8            12         16
    +------+--------+------+--------------+------------+----------+--------+------+
    | "AT" | 1      | kind | header bytes | body bytes | CRC-32   | header | body |
    +------+--------+------+--------------+------------+----------+--------+------+

Big-endian. The header is a protobuf message; the body is raw bytes (a part, a slice of state). Lengths are checked
before anything is allocated. libp2p or TLS already authenticates and encrypts. The checksum over header and body
detects bugs and truncated streams; we observed truncated streams that ended without an error. On a direct TLS
connection the checksum covers the header only: no other program handles the bytes there, and a checksum of a body costs
as much as its decryption.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

from atoll.core.errors import FrameInvalid

MAX_FRAME_BYTES = 8 * 1024 * 1024  # header and body together
MAX_HEADER_BYTES = 1024 * 1024  # a parsed message of empty entries takes thirty times its wire size
PREFIX = struct.Struct(">2sBBIII")
_MAGIC = b"AT"
_VERSION = 1

Buffer = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    """Content of a frame. The stream's protocol defines which message the header is."""

    MESSAGE = 1  # header: a protobuf message of that protocol; no body
    PART = 2  # header: PartHeader; body: the encoded part
    BODY = 3  # header empty; body: bytes of a reply
    REFUSAL = 4  # header: Refusal; the sender closes the stream after it
    END = 5  # empty; ends one conversation on a connection that carries several in succession


@dataclass(frozen=True, slots=True)
class Frame:
    """One received frame."""

    kind: FrameKind
    header: bytes
    body: bytes | memoryview = b""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The parsed and checked first 16 bytes of a frame."""

    kind: FrameKind
    header_bytes: int
    body_bytes: int
    checksum: int


def pack_prefix(kind: FrameKind, header: Buffer, body: Buffer = b"", *, checksum_body: bool = True) -> bytes:
    """Return the 16 bytes that precede `header` and `body`. Raises `FrameInvalid` above a limit."""
    if len(header) > MAX_HEADER_BYTES:
        raise FrameInvalid(f"a message has {len(header)} bytes; the limit is {MAX_HEADER_BYTES}")
    if len(header) + len(body) > MAX_FRAME_BYTES:
        raise FrameInvalid(f"a frame has {len(header) + len(body)} bytes; the limit is {MAX_FRAME_BYTES}")
    checksum = _checksum(header, body if checksum_body else b"")
    return PREFIX.pack(_MAGIC, _VERSION, kind, len(header), len(body), checksum)


def unpack_prefix(data: Buffer, max_bytes: int = MAX_FRAME_BYTES) -> Prefix:
    """Parse 16 bytes from a peer. Raises `FrameInvalid` before anything is allocated."""
    magic, version, kind, header_bytes, body_bytes, checksum = PREFIX.unpack(data)
    if magic != _MAGIC or version != _VERSION:
        raise FrameInvalid("the stream does not carry atoll frames of version 1")
    if header_bytes > MAX_HEADER_BYTES:
        raise FrameInvalid(f"a peer announced a message of {header_bytes} bytes; the limit is {MAX_HEADER_BYTES}")
    if header_bytes + body_bytes > max_bytes:
        raise FrameInvalid(f"a peer announced a frame of {header_bytes + body_bytes} bytes; the limit is {max_bytes}")
    try:
        return Prefix(FrameKind(kind), header_bytes, body_bytes, checksum)
    except ValueError as error:
        raise FrameInvalid(f"frame kind {kind} is unknown") from error


def check_frame(prefix: Prefix, header: bytes, body: bytes | memoryview, *, checksum_body: bool = True) -> Frame:
    """Compare the checksum and return the frame. Raises `FrameInvalid`."""
    if _checksum(header, body if checksum_body else b"") != prefix.checksum:
        raise FrameInvalid("a frame arrived damaged: its checksum does not match")
    return Frame(prefix.kind, header, body)


def _checksum(header: Buffer, body: Buffer) -> int:
    return zlib.crc32(body, zlib.crc32(header))
