"""Packets of TUN devices: size on the wire, flows, and the packets that remain when segments are lost."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.lab.wan.packets import (
    NEEDS_CHECKSUM,
    TCP,
    TCP4_OFFLOAD,
    VNET_BYTES,
    VNET_HEADER,
    Flow,
    flow_of,
    opens_connection,
    read_packet,
    without_segments,
)

A, B = bytes([11, 0, 0, 1]), bytes([11, 0, 0, 2])
FIN, PSH, ACK, CWR = 1, 8, 16, 128


def internet_sum(data: bytes) -> int:
    data += b"\0" * (len(data) % 2)
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def tcp(payload: bytes, segment=0, sequence=1000, flags=ACK, options=12) -> bytes:
    header = 20 + options
    head = struct.pack(">HHIIBBHHH", 4000, 80, sequence, 7, header // 4 << 4, flags, 500, 0, 0) + b"\1" * options
    length = 20 + header + len(payload)
    ip = struct.pack(">BBHHHBBH4s4s", 0x45, 0, length, 0xFFFE, 0x4000, 64, TCP, 0, A, B)
    ip = ip[:10] + struct.pack(">H", ~internet_sum(ip) & 0xFFFF) + ip[12:]
    kind = TCP4_OFFLOAD if segment else 0
    return VNET_HEADER.pack(NEEDS_CHECKSUM, kind, 20 + header, segment, 20, 16) + ip + head + payload


def segments_of(data: bytes):
    """(sequence, payload, flags) of each segment that a receiver would see; checks both checksums on the way."""
    _, kind, _, size, _, _ = VNET_HEADER.unpack_from(data)
    ip = data[VNET_BYTES:]
    assert internet_sum(ip[:20]) == 0xFFFF, "the IP header's checksum"
    assert struct.unpack_from(">H", ip, 2)[0] == len(ip)
    pseudo = ip[12:20] + struct.pack(">BBH", 0, TCP, len(ip) - 20)
    header = (ip[32] >> 4) * 4
    payload, sequence, flags = ip[20 + header :], struct.unpack_from(">I", ip, 24)[0], ip[33]
    yield_size = size if kind else max(1, len(payload))
    if kind or size:
        assert kind
        assert len(payload) > size, "one segment needs no offload"
    starts = range(0, max(1, len(payload)), yield_size)
    return (
        pseudo,
        ip,
        [
            (
                (sequence + start) & 0xFFFFFFFF,
                payload[start : start + yield_size],
                flags & ~(0 if start == starts[-1] else FIN | PSH) & ~(CWR if start else 0),
            )
            for start in starts
        ],
    )


def test_the_wire_size_of_a_packet():
    small = read_packet(tcp(b"x" * 100))
    assert (small.segments, small.wire_bytes, small.first_bytes) == (1, 152, 152)
    large = read_packet(tcp(b"x" * 10_000, segment=1448))
    assert large.segments == 7
    assert large.wire_bytes == 10_000 + 7 * 52
    assert large.first_bytes == 1500


@pytest.mark.parametrize("data", [b"", bytes(VNET_BYTES), bytes(VNET_BYTES) + b"\x60" + bytes(60), bytes(25)])
def test_other_packets_than_ipv4_are_ignored(data):
    assert read_packet(data) is None


@given(st.integers(1, 20_000), st.sampled_from([500, 1448]), st.sets(st.integers(0, 45)), st.integers(0, 2**32 - 1))
def test_exactly_the_segments_that_are_lost_are_missing(size, segment, lost, sequence):
    payload = bytes(number * 7 % 251 for number in range(size))
    whole = read_packet(tcp(payload, segment if size > segment else 0, sequence, flags=ACK | PSH | FIN | CWR))
    _, _, before = segments_of(whole.data)
    after = []
    for piece in without_segments(whole, frozenset(lost)):
        pseudo, ip, segments = segments_of(piece.data)
        assert piece == read_packet(piece.data)
        if piece is not whole:  # the kernel completes the sum from here
            assert struct.unpack_from(">H", ip, 36)[0] == internet_sum(pseudo)
        after += segments
    assert after == [item for number, item in enumerate(before) if number not in lost]


@pytest.mark.parametrize(("flags", "opens"), [(2, True), (2 | ACK, False), (ACK, False), (2 | CWR | 64, True)])
def test_only_a_syn_without_ack_opens_a_connection(flags, opens):
    assert opens_connection(tcp(b"", flags=flags)) is opens


def test_a_packet_without_ports_has_no_flow():
    assert flow_of(tcp(b"x")) == Flow(TCP, A, 4000, B, 80)
    fragment = bytearray(tcp(b"x"))
    fragment[VNET_BYTES + 7] = 3
    assert flow_of(bytes(fragment)) is None
    assert flow_of(tcp(b"")[: VNET_BYTES + 24]) is None
