"""P2pdSockets: gives the pacer access to the TCP connections of p2pd, so that it paces them, too.

Unpaced connections that share an uplink reach half of its rate (`direct/rates.py`). Linux (5.6) lets a parent copy a
file descriptor of its child (`pidfd_getfd`). Each copy lives for one call only, because it would keep a connection open
that p2pd closes. Where this is not allowed (another system, seccomp, `ptrace_scope` above 1), p2pd is not paced.
"""

from __future__ import annotations

import asyncio
import ctypes
import ipaddress
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

import psutil

from atoll.core import log
from atoll.node.direct import tcp
from atoll.node.direct.pacer import Pacer

SCAN_SECONDS = 2.0  # between two scans of p2pd's connections, while this node sends bulk data
BULK_BYTES_PER_SCAN = 256 * 1024  # a connection that sent more than this between two scans is paced from then on
_PIDFD_GETFD = 438  # the system call, on every architecture
_SO_COOKIE = 57

_libc = ctypes.CDLL(None, use_errno=True)
_log = log.get("direct")


class BorrowedSocket:
    """One TCP connection of p2pd: a `tcp.SocketOptions` that copies the descriptor for each call."""

    def __init__(self, process: int, descriptor: int, address: str) -> None:
        """`process` is a pidfd. Raises `OSError` if the kernel does not allow the copy."""
        self.peer_id = address  # the IP address, because this node does not know the peer of the connection
        self.sock = self
        self._process, self._descriptor = process, descriptor
        self._cookie = b""
        self._seen: tcp.TcpInfo | None = None
        with self._borrowed() as sock:
            self._cookie = sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8)

    def is_open(self) -> bool:
        """Return whether the descriptor still refers to this connection."""
        return tcp.info(self) is not None

    def sends_bulk(self) -> bool:
        """Return whether the connection has sent bulk data since the last call."""
        before, self._seen = self._seen, tcp.info(self)
        if self._seen is None:
            return False
        return self._seen.unsent_bytes > 0 or (
            before is not None and self._seen.delivered_since(before) > BULK_BYTES_PER_SCAN
        )

    def setsockopt(self, level: int, option: int, value: int, /) -> None:
        with self._borrowed() as sock:
            sock.setsockopt(level, option, value)

    def getsockopt(self, level: int, option: int, size: int, /) -> bytes:
        with self._borrowed() as sock:
            return sock.getsockopt(level, option, size)

    @contextmanager
    def _borrowed(self) -> Iterator[socket.socket]:
        copy = _pidfd_getfd(self._process, self._descriptor)
        try:
            sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fileno=copy)
        except OSError:  # the descriptor is no longer a socket
            os.close(copy)
            raise
        with sock:
            if self._cookie and sock.getsockopt(socket.SOL_SOCKET, _SO_COOKIE, 8) != self._cookie:
                raise ConnectionResetError("p2pd uses the descriptor for another connection now")
            yield sock


class P2pdSockets:
    """Adds p2pd's connections to the pacer and removes them. Call `close` before p2pd ends."""

    def __init__(self, pid: int, pacer: Pacer, *, loopback: bool = False) -> None:
        """`loopback`: also pace connections within this machine."""
        self._pid, self._pacer, self._loopback = pid, pacer, loopback
        self._borrowed_sockets: dict[int, BorrowedSocket] = {}  # by descriptor
        self._paced: set[int] = set()  # descriptors that the pacer watches
        self._sending = asyncio.Event()
        self._process = -1
        with suppress(OSError, AttributeError):  # p2pd has ended, or this is not Linux
            self._process = os.pidfd_open(pid)
        self._task = asyncio.create_task(self._run()) if tcp.PACING_SUPPORTED and self._process >= 0 else None

    def wake(self) -> None:
        """Scan again, because this node sends bulk data and connections may be new."""
        self._sending.set()

    async def close(self) -> None:
        """Stop scanning and unpace all connections."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._forget_all()
        if self._process >= 0:
            os.close(self._process)
            self._process = -1

    async def _run(self) -> None:
        while True:
            await self._sending.wait()
            self._sending.clear()
            try:
                self._scan(await asyncio.to_thread(_connections, self._pid, loopback=self._loopback))
            except (PermissionError, psutil.AccessDenied) as error:
                _log.info("libp2p connections not paced", reason=str(error))
                self._forget_all()
                return
            except (OSError, psutil.Error) as error:  # p2pd has ended
                _log.debug("p2pd scan failed", reason=str(error))
            await asyncio.sleep(SCAN_SECONDS)

    def _scan(self, far_ends: Mapping[int, str]) -> None:
        for descriptor, borrowed in tuple(self._borrowed_sockets.items()):
            if descriptor not in far_ends or not borrowed.is_open():
                self._forget(descriptor)
        for descriptor in far_ends.keys() - self._borrowed_sockets.keys():
            try:
                self._borrowed_sockets[descriptor] = BorrowedSocket(self._process, descriptor, far_ends[descriptor])
            except PermissionError:
                raise
            except OSError:
                continue  # closed in the meantime
        for descriptor, borrowed in self._borrowed_sockets.items():
            if descriptor not in self._paced and borrowed.sends_bulk():
                self._paced.add(descriptor)
                self._pacer.add(borrowed)
        self._pacer.wake()

    def _forget_all(self) -> None:
        for descriptor in tuple(self._borrowed_sockets):
            self._forget(descriptor)

    def _forget(self, descriptor: int) -> None:
        borrowed = self._borrowed_sockets.pop(descriptor)
        if descriptor in self._paced:
            self._paced.discard(descriptor)
            self._pacer.remove(borrowed)
            tcp.set_pacing_rate(borrowed, math.inf)


def _connections(pid: int, *, loopback: bool) -> dict[int, str]:
    """Map the descriptor of every TCP connection of a process to its remote IP address.

    Raises `psutil.Error`, `OSError`.
    """
    far_ends = {}
    for connection in psutil.Process(pid).net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            address = ipaddress.ip_address(connection.raddr.ip)
            address = getattr(address, "ipv4_mapped", None) or address
            if loopback or not address.is_loopback:
                far_ends[connection.fd] = str(address)
    return far_ends


def _pidfd_getfd(process: int, descriptor: int) -> int:
    copy: int = _libc.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return copy
