"""The port that a member listens on when its owner named none: the same at every start, because others remember it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.files import write_atomic

PORT_FILE = "port"


def remembered_port(data_dir: Path) -> list[int]:
    """The port that this member listened on last, or nothing."""
    try:
        port = int((data_dir / PORT_FILE).read_text())
    except (OSError, ValueError):
        return []
    return [port] if 0 < port < 65536 else []


def remember_port(data_dir: Path, multiaddrs: Iterable[str]) -> None:
    """Keep the port for the next start. A disk that does not take it is no reason not to run."""
    ports = [words[words.index("tcp") + 1] for words in (text.split("/") for text in multiaddrs) if "tcp" in words]
    if ports:
        with suppress(AtollError):
            write_atomic(data_dir / PORT_FILE, ports[0].encode())
