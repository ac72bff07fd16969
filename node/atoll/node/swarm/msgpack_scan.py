"""check_msgpack: a structural check of msgpack bytes before any deserialiser reads them.

hivemind's serialiser calls itself for every extension payload: 936 bytes that nest 200 deep kill the process that loads
them. This walker allocates no memory that a peer controls. It checks that lengths fit the available bytes, that
containers (extension payloads included) nest at most eight deep, that only the two extension types of the DHT occur,
and that no bytes follow the value. Format: https://github.com/msgpack/msgpack/blob/master/spec.md
"""

from __future__ import annotations

from atoll.core.errors import PeerMisbehaved

MAX_DEPTH = 8
TUPLE_EXTENSION = 0x40  # hivemind's tuple: the payload is a msgpack array
DICTIONARY_EXTENSION = 0x50  # hivemind's dictionary value: the payload is msgpack, too

_SCALAR_BYTES = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8}  # nil, false, true, float 32, float 64
_SCALAR_BYTES |= {0xCC + i: 1 << i for i in range(4)} | {0xD0 + i: 1 << i for i in range(4)}  # integers
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}  # bin, str: size of the length field in bytes
_EXTENSION = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXED_EXTENSION = {0xD4 + i: 1 << i for i in range(5)}
_CONTAINER = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}  # array, map: length field, values per entry


def check_msgpack(data: bytes) -> None:
    """Raise `PeerMisbehaved` unless `data` is exactly one msgpack value within the limits."""
    scan = _Scan(data)
    if scan.value(0, len(data), MAX_DEPTH) != len(data):
        raise PeerMisbehaved("bytes follow a msgpack value")


class _Scan:
    """A walk over positions; the remaining depth bounds the recursion."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def value(self, at: int, end: int, depth: int) -> int:
        """Check the value that starts at `at` and return the position after it. It must not reach beyond `end`."""
        tag = self._number(at, end, 1)
        at += 1
        if tag <= 0x7F or tag >= 0xE0:
            return at
        if tag <= 0x8F:
            return self._entries(at, end, 2 * (tag & 0x0F), depth)
        if tag <= 0x9F:
            return self._entries(at, end, tag & 0x0F, depth)
        if tag <= 0xBF:
            return self._skip(at, end, tag & 0x1F)
        return self._tagged(tag, at, end, depth)

    def _tagged(self, tag: int, at: int, end: int, depth: int) -> int:
        if tag in _SCALAR_BYTES:
            return self._skip(at, end, _SCALAR_BYTES[tag])
        if tag in _SIZED:
            width = _SIZED[tag]
            return self._skip(at + width, end, self._number(at, end, width))
        if tag in _CONTAINER:
            width, values = _CONTAINER[tag]
            return self._entries(at + width, end, values * self._number(at, end, width), depth)
        if tag in _FIXED_EXTENSION:
            return self._extension(at, end, _FIXED_EXTENSION[tag], depth)
        if tag in _EXTENSION:
            width = _EXTENSION[tag]
            return self._extension(at + width, end, self._number(at, end, width), depth)
        raise PeerMisbehaved(f"a msgpack value cannot start with byte 0x{tag:02x}")

    def _entries(self, at: int, end: int, count: int, depth: int) -> int:
        if depth == 0:
            raise PeerMisbehaved(f"msgpack nests deeper than {MAX_DEPTH}")
        if count > end - at:
            raise PeerMisbehaved(f"a msgpack container announces {count} values in {end - at} bytes")
        for _ in range(count):
            at = self.value(at, end, depth - 1)
        return at

    def _extension(self, at: int, end: int, size: int, depth: int) -> int:
        kind = self._number(at, end, 1)
        start, stop = at + 1, self._skip(at + 1, end, size)
        if kind not in (TUPLE_EXTENSION, DICTIONARY_EXTENSION):
            raise PeerMisbehaved(f"msgpack extension 0x{kind:02x} is not allowed in the DHT")
        if self._entries(start, stop, 1, depth) != stop:
            raise PeerMisbehaved("bytes follow the payload of a msgpack extension")
        return stop

    def _skip(self, at: int, end: int, size: int) -> int:
        if size > end - at:
            raise PeerMisbehaved(f"a msgpack value announces {size} bytes; {max(0, end - at)} are left")
        return at + size

    def _number(self, at: int, end: int, width: int) -> int:
        self._skip(at, end, width)
        return int.from_bytes(self._data[at : at + width], "big")
