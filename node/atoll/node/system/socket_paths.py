"""Unix sockets in directories of any depth.

The kernel limits a socket's path to 107 bytes on Linux and 103 on macOS. A longer path goes through a descriptor of the
directory, under `/proc/self/fd`. A child that inherits the descriptor can use the same path, because the descriptor
keeps its number.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from atoll.core.errors import ConfigError

_MAX_SOCKET_PATH_BYTES = 100
_PROC_DESCRIPTORS = Path("/proc/self/fd")


@dataclass
class SocketDirectory:
    """A short path to a directory, valid until `close`; a child must inherit `descriptors` to use it."""

    path: Path
    descriptors: tuple[int, ...] = ()

    @classmethod
    def open(cls, directory: Path, longest_name: str) -> SocketDirectory:
        """Open a path to the sockets in `directory`. Raises `OSError`; `ConfigError` on a system without `/proc`."""
        if len(os.fsencode(directory / longest_name)) <= _MAX_SOCKET_PATH_BYTES:
            return cls(directory)
        if not _PROC_DESCRIPTORS.is_dir():
            raise ConfigError(
                f"the path {directory / longest_name} is too long for a socket",
                "choose a data directory with a shorter path",
            )
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        return cls(_PROC_DESCRIPTORS / str(descriptor), (descriptor,))

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        held, self.descriptors = self.descriptors, ()
        for descriptor in held:
            os.close(descriptor)
