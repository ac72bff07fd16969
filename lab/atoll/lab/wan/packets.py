"""What a TUN device hands over: a virtio header, then an IPv4 packet that may stand for up to 64 KB of TCP segments.

The kernel leaves segmenting to its network card, which here is us. Such a packet goes on whole; the link counts what
its segments would weigh. Only where some of its segments are lost is it cut into packets of the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

VNET_HEADER = struct.Struct("<BBHHHH")  # flags, kind of offload, header length, segment size, checksum start and offset
VNET_BYTES = VNET_HEADER.size
NEEDS_CHECKSUM = 1  # flag: the field holds the pseudo-header's sum; who receives it fills in the rest
NO_OFFLOAD, TCP4_OFFLOAD = 0, 1

ICMP, TCP, UDP = 1, 6, 17
_SYN, _ACK = 0x02, 0x10
_FIN_PSH, _CWR = 0x09, 0x80  # TCP flags that belong to the last segment, and to the first
_IP = VNET_BYTES  # where the IPv4 header begins


class Flow(NamedTuple):
    """The five-tuple; for ICMP both ports are the identifier of the echo."""

    protocol: int
    source: bytes
    source_port: int
    target: bytes
    target_port: int

    def reversed(self) -> Flow:
        return Flow(self.protocol, self.target, self.target_port, self.source, self.source_port)


@dataclass(frozen=True, slots=True)
class Packet:
    """Bytes as read from the device, and what they weigh on a wire of 1500-byte packets."""

    data: bytes
    segments: int
    wire_bytes: int  # IP bytes of all segments
    first_bytes: int  # IP bytes of the first segment: a link passes it on before the last has come


def read_packet(data: bytes) -> Packet | None:
    """None for what is not IPv4 (the kernel's own IPv6 chatter) or is cut short."""
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
    """The packet's source address, four bytes."""
    return data[_IP + 12 : _IP + 16]


def target_of(data: bytes) -> bytes:
    """The packet's target address, four bytes."""
    return data[_IP + 16 : _IP + 20]


def flow_of(data: bytes) -> Flow | None:
    """None where there are no ports: later fragments, ICMP that is no echo, other protocols, packets cut short."""
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
    """Whether it is TCP's first packet (SYN without ACK); only for packets that have a flow."""
    tcp = _IP + (data[_IP] & 15) * 4
    return data[_IP + 9] == TCP and len(data) > tcp + 13 and data[tcp + 13] & (_SYN | _ACK) == _SYN


def without_segments(packet: Packet, lost: frozenset[int]) -> Iterator[Packet]:
    """The packets that are left when these segments (numbered from 0) do not arrive, in order."""
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
    """Segments `first` to `end` (excluded) as a packet of their own: lengths, sequence number, flags, checksums."""
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
    struct.pack_into(">H", cut, tcp + 16, _sum(pseudo))  # the rest is for whoever receives it: NEEDS_CHECKSUM
    shortened = read_packet(bytes(cut) + payload)
    assert shortened is not None
    return shortened


def _header_bytes(data: bytes) -> int:
    """Of IPv4 and TCP together. The virtio header's own length field is only a hint."""
    ip = (data[_IP] & 15) * 4
    return ip + (data[_IP + ip + 12] >> 4) * 4


def _put_checksum(packet: bytearray, place: int, header: bytes | bytearray) -> None:
    clean = bytearray(header)
    clean[place - _IP : place - _IP + 2] = b"\0\0"
    struct.pack_into(">H", packet, place, ~_sum(clean) & 0xFFFF)


def _sum(data: bytes | bytearray) -> int:
    """The internet checksum's sum (RFC 1071), not complemented."""
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return int(total)
