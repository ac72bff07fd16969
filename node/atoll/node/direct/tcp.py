"""TCP socket options: tuning, pacing rate and TCP_INFO of one connection. Pacing and TCP_INFO exist on Linux only."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

PACING_SUPPORTED = sys.platform == "linux"
USER_TIMEOUT_MS = 20_000  # without an acknowledgement, the kernel closes the connection
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_COUNT = 30, 10, 3
UNSENT_BYTES = 4 * 1024 * 1024  # unsent data that the kernel buffers; bounds memory and the delay at the end
_SO_MAX_PACING_RATE = 47
_UNPACED = -1
_MAX_PACE = 2**31 - 1  # bytes per second that fit the option; a faster rate is set as unpaced
# struct tcp_info of linux/tcp.h: snd_mss, notsent_bytes, min_rtt, rwnd_limited, delivered
_INFO = struct.Struct("@16xI124xII24xQ8xI")
_SEGMENTS = 2**32  # the kernel's counter of delivered segments wraps here


class SocketOptions(Protocol):
    """The part of a socket's interface that is used here; asyncio's transport sockets have it as well."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """TCP_INFO of one connection, since it began."""

    delivered_segments: int  # acknowledged, also out of order; wraps at 2^32
    segment_bytes: int
    unsent_bytes: int  # in the kernel's send buffer

    min_rtt_seconds: float
    receiver_limited_seconds: float  # time in which the peer's receive window stopped the sender

    def delivered_since(self, before: TcpInfo) -> int:
        """Bytes delivered since `before`, about: the segment size may have changed."""
        return (self.delivered_segments - before.delivered_segments) % _SEGMENTS * self.segment_bytes


def tune(sock: SocketOptions) -> None:
    """Send small frames at once, detect dead peers, keep little data in the kernel."""
    options = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_SECONDS),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_SECONDS),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
        ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS),
        ("TCP_NOTSENT_LOWAT", UNSENT_BYTES),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            options.append((socket.IPPROTO_TCP, option, value))
    for level, option, value in options:
        with suppress(OSError):  # the option is missing in this kernel: continue without it
            sock.setsockopt(level, option, value)


def set_pacing_rate(sock: SocketOptions, bytes_per_second: float) -> None:
    """Limit the sending rate; infinity removes the limit. No effect on a closed socket or without pacing support."""
    if PACING_SUPPORTED:
        rate = _UNPACED if bytes_per_second > _MAX_PACE else int(bytes_per_second)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


def info(sock: SocketOptions) -> TcpInfo | None:
    """Read TCP_INFO; None if the kernel does not provide it or the socket is closed."""
    if not PACING_SUPPORTED:
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # closed in the meantime, or no TCP_INFO
        return None
    if len(data) < _INFO.size:
        return None
    segment, unsent, min_rtt, limited, delivered = _INFO.unpack(data)
    return TcpInfo(delivered, segment, unsent, min_rtt / 1e6, limited / 1e6)
