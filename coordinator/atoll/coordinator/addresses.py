"""Addresses and ports: whether we can have them, what they are called, and where others find us."""

from __future__ import annotations

import errno
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError, PortInUse
from atoll.core.files import write_atomic

WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 - names of what "everywhere" looks like, not a bind
_DOCUMENTATION_ADDRESS = ("192.0.2.1", 9)  # RFC 5737: nobody's


@dataclass(frozen=True)
class Endpoints:
    """Where this coordinator listens, as written to `endpoints.json` for launchers and people."""

    enrolment: str  # host:port
    local: str  # of the membership and admin services
    http: str
    public: str  # stands in tokens

    def write(self, path: Path) -> None:
        """Replace the file, once everything listens."""
        content = {
            "version": 1,
            "pid": os.getpid(),
            "enrolment": self.enrolment,
            "membership": self.local,
            "http": f"http://{self.http}/",
            "public": self.public,
        }
        write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())


def bind(host: str, port: int, flag: str) -> socket.socket:
    """A bound, listening TCP socket. Raises `PortInUse`, `ConfigError` for a host that is not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            taken = "is in use" if error.errno == errno.EADDRINUSE else "needs privileges that we do not have"
            raise PortInUse(
                f"port {port} on {host} {taken}", f"stop what listens there, or choose another port with {flag}"
            ) from error
        raise ConfigError(
            f"cannot listen on {host}: {error.strerror or error}", "see --listen and --http-host"
        ) from error
    return listener


def check_free(host: str, port: int, flag: str) -> None:
    """Raise what `bind` would. gRPC itself only says that it failed."""
    if port:
        bind(host, port, flag).close()


def address(host: str, port: int) -> str:
    """`host:port`, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dialable(host: str) -> str:
    """Where programs on this machine reach a server that listens on `host`."""
    return "127.0.0.1" if host in WILDCARDS else host


def outward_address(host: str) -> str:
    """What others probably reach us by: `host`, or the address that routes outward when it means everywhere.

    Connecting a UDP socket sends nothing; it only asks the kernel which address it would use.
    """
    if host not in WILDCARDS:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_DOCUMENTATION_ADDRESS)
            return str(probe.getsockname()[0])
        except OSError:  # no route: a machine by itself
            return "127.0.0.1"
