"""Notifications to systemd from a `Type=notify` service, one datagram each. See sd_notify(3).

Outside systemd the socket address is empty and a call does nothing.
"""

from __future__ import annotations

import atexit
import socket
from collections.abc import Mapping
from functools import cache


def notify(address: str, message: str) -> bool:
    """Send `READY=1`, `STOPPING=1`, `WATCHDOG=1`, … to `address` (`$NOTIFY_SOCKET`). Return whether it was sent."""
    if not address:
        return False
    target = "\0" + address[1:] if address.startswith("@") else address
    try:
        _channel().sendto(message.encode(), target)
    except OSError:  # systemd is gone or its queue is full: nothing to do
        return False
    return True


@cache
def _channel() -> socket.socket:
    """Return the process's socket. It stays open so that the watchdog works when no descriptors are left."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    channel.setblocking(False)
    atexit.register(channel.close)
    return channel


def watchdog_seconds(environment: Mapping[str, str]) -> float | None:
    """Return the interval of `WATCHDOG=1`: half of `$WATCHDOG_USEC`; None without a watchdog."""
    text = environment.get("WATCHDOG_USEC", "")
    return int(text) / 2e6 if text.isdigit() and int(text) > 0 else None
