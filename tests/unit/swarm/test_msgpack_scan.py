"""The msgpack walker agrees with msgpack on what is well formed, and refuses what kills a deserialiser."""

from __future__ import annotations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import PeerMisbehaved
from atoll.node.swarm.msgpack_scan import MAX_DEPTH, check_msgpack

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=20), max_leaves=30
)


def depth(value: object) -> int:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if children is None else 1 + max((depth(child) for child in children), default=0)


@given(values)
def test_accepts_what_msgpack_writes_up_to_the_depth(value: object) -> None:
    data = msgpack.packb(value)
    if depth(value) <= MAX_DEPTH:
        check_msgpack(data)
    else:
        with pytest.raises(PeerMisbehaved):
            check_msgpack(data)


@given(values, st.data())
def test_refuses_truncated_and_extended_bytes(value: object, data: st.DataObject) -> None:
    packed = msgpack.packb(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    for damaged in (packed[:cut], packed + b"\xc0"):
        with pytest.raises(PeerMisbehaved):
            check_msgpack(damaged)


@given(st.binary(max_size=200))
def test_arbitrary_bytes_pass_only_if_msgpack_reads_them(data: bytes) -> None:
    try:
        check_msgpack(data)
    except PeerMisbehaved:
        return
    list(msgpack.Unpacker(None, raw=True, strict_map_key=False).feed(data) or [])


def nested_extensions(levels: int) -> bytes:
    value = msgpack.packb([])
    for _ in range(levels):
        value = msgpack.packb([msgpack.ExtType(0x40, value)])
    return value


def test_nested_extensions_count_as_depth() -> None:
    check_msgpack(nested_extensions(3))
    with pytest.raises(PeerMisbehaved, match="deeper"):
        check_msgpack(nested_extensions(200))


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array that announces 2^32 entries
        b"\xdf\xff\xff\xff\xff\xc0",  # a map likewise
        b"\xc6\xff\xff\xff\xffx",  # a byte string likewise
        msgpack.packb(msgpack.ExtType(0x41, b"\xc0")),  # an extension that the DHT does not know
        msgpack.packb(msgpack.ExtType(0x50, b"\xc0\xc0")),  # bytes after the payload
        b"\xc1",
        b"",
    ],
)
def test_refuses(data: bytes) -> None:
    with pytest.raises(PeerMisbehaved):
        check_msgpack(data)
