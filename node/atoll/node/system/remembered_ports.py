"""The listening port of a member whose owner set none: kept in a file, so that peers find it after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.files import write_atomic

PORT_FILE = "port"  # for the port of libp2p
DIRECT_PORT_FILE = "direct-port"


def remembered_port(data_dir: Path, name: str = PORT_FILE) -> list[int]:
    """Return a list of the port on which this member last listened; empty if none is known."""
    try:
        port = int((data_dir / name).read_text())
    except (OSError, ValueError):
        return []
    return [port] if 0 < port < 65536 else []


def remember_port(data_dir: Path, port: int | None, name: str = PORT_FILE) -> None:
    """Save the port, if there is one, for the next start. A failed write is ignored: the node can run without it."""
    if port:
        with suppress(AtollError):
            write_atomic(data_dir / name, str(port).encode())


def port_in(multiaddrs: Iterable[str]) -> int | None:
    """The TCP port of the first multiaddr that has one."""
    ports = [words[words.index("tcp") + 1] for words in (text.split("/") for text in multiaddrs) if "tcp" in words]
    return int(ports[0]) if ports else None
