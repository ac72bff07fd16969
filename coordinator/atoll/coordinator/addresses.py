"""Addresses and ports: bind checks, formatting, and the address that others can reach."""

from __future__ import annotations

import errno
import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError, PortInUse
from atoll.core.files import write_atomic

WILDCARDS = ("0.0.0.0", "::", "")  # noqa: S104 - names for "all interfaces", not a bind
_DOCUMENTATION_ADDRESS = ("192.0.2.1", 9)  # RFC 5737: reserved for documentation


@dataclass(frozen=True)
class Endpoints:
    """Endpoints of this coordinator, written to `endpoints.json` for launchers and people."""

    enrolment: str  # host:port
    local: str  # of the membership and admin services
    http: str
    public: str  # host:port in join tokens

    def write(self, path: Path) -> None:
        """Replace the file. Called once all ports are bound."""
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
    """A bound, listening TCP socket. Raises `PortInUse`, and `ConfigError` if the host is not this machine's."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise _cannot_listen(error, host, port, flag) from error
    return listener


def _cannot_listen(error: OSError, host: str, port: int, flag: str) -> PortInUse | ConfigError:
    if error.errno not in (errno.EADDRINUSE, errno.EACCES):
        return ConfigError(f"cannot listen on {host}: {error.strerror or error}", "see --listen and --http-host")
    taken = "is in use" if error.errno == errno.EADDRINUSE else "needs privileges that this process does not have"
    remedy = f"stop the program that listens there, or choose another port with {flag}"
    return PortInUse(f"port {port} on {host} {taken}", remedy)


def check_free(host: str, port: int, flag: str) -> None:
    """Raise the error that `bind` would raise: gRPC itself only reports that binding failed."""
    if port:
        bind(host, port, flag).close()


def address(host: str, port: int) -> str:
    """Format `host:port`, with IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dialable(host: str) -> str:
    """Host under which local programs reach a server that listens on `host`."""
    return "127.0.0.1" if host in WILDCARDS else host


def outward_address(host: str) -> str:
    """Address under which others can probably reach this machine: `host`, or for a wildcard the default route's.

    Connecting a UDP socket sends nothing; it only asks the kernel which address it would use.
    """
    if host not in WILDCARDS:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_DOCUMENTATION_ADDRESS)
            return str(probe.getsockname()[0])
        except OSError:  # no route: an isolated machine
            return "127.0.0.1"
