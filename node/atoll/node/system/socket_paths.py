"""Sockets in a directory of any depth: the kernel bounds a socket's path (107 bytes on Linux, 103 on macOS).

Where a path is longer than that, it leads by way of a descriptor of the directory under `/proc/self/fd`. The same
path holds in a child to which the descriptor is passed, as that keeps its number there.
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
    """`path` leads to the directory until `close`; `descriptors` are what a child needs to follow it."""

    path: Path
    descriptors: tuple[int, ...] = ()

    @classmethod
    def open(cls, directory: Path, longest_name: str) -> SocketDirectory:
        """A way to the sockets in `directory`. Raises `OSError`, and `ConfigError` where there is no `/proc`."""
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
        """Let go of the descriptor. Calling twice is fine."""
        held, self.descriptors = self.descriptors, ()
        for descriptor in held:
            os.close(descriptor)
