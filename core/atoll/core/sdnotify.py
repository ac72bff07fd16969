"""Tell systemd how a `Type=notify` service fares: one datagram to the socket that it named, nothing else.

Outside systemd the address is empty and every call does nothing. See sd_notify(3).
"""

from __future__ import annotations

import atexit
import socket
from collections.abc import Mapping
from functools import cache


def notify(address: str, message: str) -> bool:
    """Send `READY=1`, `STOPPING=1`, `WATCHDOG=1`, … to `address` (`$NOTIFY_SOCKET`); whether it was sent."""
    if not address:
        return False
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        _channel().sendto(message.encode(), target)
    except OSError:  # systemd is gone or its queue is full: it will notice by itself
        return False
    return True


@cache
def _channel() -> socket.socket:
    """Open for as long as the process: the watchdog is to be fed when no descriptors are left, too."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    channel.setblocking(False)
    atexit.register(channel.close)
    return channel


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """How often to send `WATCHDOG=1`: half of what systemd allows (`$WATCHDOG_USEC`); None when it does not ask."""
    text = environment.get("WATCHDOG_USEC", "")
    return int(text) / 2e6 if text.isdigit() and int(text) > 0 else None
