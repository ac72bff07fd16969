"""What we ask of the kernel for one TCP connection, and what it tells. Pacing and figures on Linux only."""

from __future__ import annotations

import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

PACING_SUPPORTED = sys.platform == "linux"
USER_TIMEOUT_MS = 20_000  # without an acknowledgement: the other side is gone
KEEPALIVE_IDLE_SECONDS, KEEPALIVE_INTERVAL_SECONDS, KEEPALIVE_COUNT = 30, 10, 3
UNSENT_BYTES = 4 * 1024 * 1024  # what the kernel takes beyond what is under way; keeps memory low and ends prompt
_SO_MAX_PACING_RATE = 47
_UNPACED = -1
_MAX_PACE = 2**31 - 1  # bytes per second that fit the option; faster is as good as unpaced
# snd_mss, rtt, total_retrans, notsent, min_rtt, rwnd_limited, delivered
_INFO = struct.Struct("@16xI48xI28xI40xII24xQ8xI")
_SEGMENTS = 2**32  # where the kernel's counter of delivered ones begins again


class SocketOptions(Protocol):
    """The part of a socket that is used here; asyncio's own has it too."""

    def setsockopt(self, level: int, option: int, value: int, /) -> None: ...

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class TcpInfo:
    """Figures of one connection since it began."""

    delivered_segments: int  # acknowledged, also out of order; begins again at 2^32
    segment_bytes: int
    unsent_bytes: int  # in the kernel
    retransmitted_segments: int
    rtt_seconds: float
    min_rtt_seconds: float
    receiver_limited_seconds: float  # in which the other side's window was what stopped us

    def delivered_since(self, before: TcpInfo) -> int:
        """Bytes, about; a path may have changed what a segment holds."""
        return (self.delivered_segments - before.delivered_segments) % _SEGMENTS * self.segment_bytes


def tune(sock: SocketOptions) -> None:
    """Small frames at once, dead peers noticed, little waiting in the kernel."""
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
        with suppress(OSError):  # a kernel without it does without
            sock.setsockopt(level, option, value)


def set_pacing_rate(sock: SocketOptions, bytes_per_second: float) -> None:
    """Send no faster; infinity lifts it. Nothing happens where there is no pacing, or on a closed socket."""
    if PACING_SUPPORTED:
        rate = _UNPACED if bytes_per_second > _MAX_PACE else int(bytes_per_second)
        with suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, rate)


def info(sock: SocketOptions) -> TcpInfo | None:
    """What the kernel knows; None where it does not tell."""
    if not PACING_SUPPORTED:
        return None
    try:
        data = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    except OSError:  # closed meanwhile, or no such figures
        return None
    if len(data) < _INFO.size:
        return None
    segment, rtt, retransmitted, unsent, min_rtt, limited, delivered = _INFO.unpack(data)
    return TcpInfo(delivered, segment, unsent, retransmitted, rtt / 1e6, min_rtt / 1e6, limited / 1e6)
