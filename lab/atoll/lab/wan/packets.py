"""Packets of a TUN device: a virtio header, then an IPv4 packet that may contain up to 64 KB of TCP segments.

The kernel leaves segmentation to the network card, whose part the hub plays. The hub forwards such a packet whole, and
the link counts the bytes of its segments. Only if some segments are lost is the packet split into the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

VNET_HEADER = struct.Struct("<BBHHHH")  # flags, kind of offload, header length, segment size, checksum start and offset
VNET_BYTES = VNET_HEADER.size
NEEDS_CHECKSUM = 1  # flag: the checksum field has the pseudo-header's sum; the receiver completes it
NO_OFFLOAD, TCP4_OFFLOAD = 0, 1

ICMP, TCP, UDP = 1, 6, 17
_SYN, _ACK = 0x02, 0x10
_FIN_PSH, _CWR = 0x09, 0x80  # TCP flags of the last segment, and of the first
_IP = VNET_BYTES  # offset of the IPv4 header


class Flow(NamedTuple):
    """Five-tuple of a packet. For ICMP both ports are the echo's identifier."""

    protocol: int
    source: bytes
    source_port: int
    target: bytes
    target_port: int

    def reversed(self) -> Flow:
        return Flow(self.protocol, self.target, self.target_port, self.source, self.source_port)


@dataclass(frozen=True, slots=True)
class Packet:
    """Bytes as read from the device, and their size on a wire with packets of 1500 bytes."""

    data: bytes
    segments: int
    wire_bytes: int  # IP bytes of all segments
    first_bytes: int  # IP bytes of the first segment, which a link forwards before the last has arrived


def read_packet(data: bytes) -> Packet | None:
    """Parse a packet; None if it is truncated or not IPv4 (the kernel sends some IPv6)."""
    size = len(data) - _IP
    if size < 20 or data[_IP] >> 4 != 4:
        return None
    _, kind, _, segment_bytes, _, _ = VNET_HEADER.unpack_from(data)
    if not kind or not segment_bytes:
        return Packet(data, 1, size, size)
    headers = _header_bytes(data)
    segments = max(1, -(-(size - headers) // segment_bytes))
    return Packet(data, segments, size + (segments - 1) * headers, min(size, headers + segment_bytes))


def source_of(data: bytes) -> bytes:
    """Return the packet's source address, four bytes."""
    return data[_IP + 12 : _IP + 16]


def target_of(data: bytes) -> bytes:
    """Return the packet's target address, four bytes."""
    return data[_IP + 16 : _IP + 20]


def flow_of(data: bytes) -> Flow | None:
    """Return the packet's flow; None for later fragments, ICMP other than echo, other protocols, truncated packets."""
    protocol, start = data[_IP + 9], _IP + (data[_IP] & 15) * 4
    if (data[_IP + 6] & 0x1F or data[_IP + 7]) or len(data) < start + 8:
        return None
    if protocol in (TCP, UDP):
        ports = struct.unpack_from(">HH", data, start)
    elif protocol == ICMP and data[start] in (0, 8):
        ports = (int.from_bytes(data[start + 4 : start + 6]),) * 2
    else:
        return None
    return Flow(protocol, source_of(data), ports[0], target_of(data), ports[1])


def opens_connection(data: bytes) -> bool:
    """Return whether it is a TCP SYN without ACK. Only for packets that have a flow."""
    tcp = _IP + (data[_IP] & 15) * 4
    return data[_IP + 9] == TCP and len(data) > tcp + 13 and data[tcp + 13] & (_SYN | _ACK) == _SYN


def without_segments(packet: Packet, lost: frozenset[int]) -> Iterator[Packet]:
    """Yield, in order, the packets that remain if these segments (numbered from 0) are lost."""
    if packet.segments == 1:
        if 0 not in lost:
            yield packet
        return
    run: list[int] = []
    for number in range(packet.segments + 1):
        if number < packet.segments and number not in lost:
            run.append(number)
        elif run:
            yield _cut(packet, run[0], run[-1] + 1)
            run = []


def _cut(packet: Packet, first: int, end: int) -> Packet:
    """Return segments [first, end) as a packet with its own lengths, sequence number, flags and checksums."""
    if (first, end) == (0, packet.segments):
        return packet
    data = packet.data
    headers = _header_bytes(data)
    flags, kind, header_length, segment_bytes, checksum_start, checksum_offset = VNET_HEADER.unpack_from(data)
    payload = data[_IP + headers + first * segment_bytes : _IP + headers + end * segment_bytes]
    cut = bytearray(data[: _IP + headers])
    single = end - first == 1
    VNET_HEADER.pack_into(
        cut, 0, flags, NO_OFFLOAD if single else kind, header_length, 0 if single else segment_bytes,
        checksum_start, checksum_offset,
    )  # fmt: skip
    tcp = _IP + (data[_IP] & 15) * 4
    identity, sequence = struct.unpack_from(">H", data, _IP + 4)[0], struct.unpack_from(">I", data, tcp + 4)[0]
    total = headers + len(payload)
    struct.pack_into(">HH", cut, _IP + 2, total, (identity + first) & 0xFFFF)
    struct.pack_into(">I", cut, tcp + 4, (sequence + first * segment_bytes) & 0xFFFFFFFF)
    if end < packet.segments:
        cut[tcp + 13] &= ~_FIN_PSH & 0xFF
    if first:
        cut[tcp + 13] &= ~_CWR & 0xFF
    _put_checksum(cut, _IP + 10, cut[_IP:tcp])
    tcp_bytes = total - (tcp - _IP)
    pseudo = bytes(cut[_IP + 12 : _IP + 20]) + struct.pack(">BBH", 0, TCP, tcp_bytes)
    struct.pack_into(">H", cut, tcp + 16, _sum(pseudo))  # the receiver completes it: NEEDS_CHECKSUM
    shortened = read_packet(bytes(cut) + payload)
    assert shortened is not None
    return shortened


def _header_bytes(data: bytes) -> int:
    """Return the bytes of IPv4 and TCP headers. The virtio header's length field is only a hint."""
    ip = (data[_IP] & 15) * 4
    return ip + (data[_IP + ip + 12] >> 4) * 4


def _put_checksum(packet: bytearray, place: int, header: bytes | bytearray) -> None:
    clean = bytearray(header)
    clean[place - _IP : place - _IP + 2] = b"\0\0"
    struct.pack_into(">H", packet, place, ~_sum(clean) & 0xFFFF)


def _sum(data: bytes | bytearray) -> int:
    """Return the internet checksum's sum (RFC 1071), not complemented."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(total)
