"""A real build, with processes, that kills itself at a certain file operation of any of its processes.

python -c "from support.killed_build import main; main()" INPUT CORPUS OPERATION NAME
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from support.corpora import SMALL, small_spec

from atoll.core.disk import File, OsDisk
from atoll.node.data.build import build_corpus
from atoll.node.data.build_spec import read_build_spec


@dataclass
class KillingDisk(OsDisk):
    """The operating system's disk; the build dies by SIGKILL before `operation` on the file `name`."""

    operation: str  # create | rename
    name: str  # the end of the path
    build: int  # its process

    def create(self, path: Path, mode: int = 0o644) -> File:
        self._die("create", path)
        return super().create(path, mode)

    def rename(self, old: Path, new: Path) -> None:
        self._die("rename", new)
        super().rename(old, new)

    def _die(self, operation: str, path: Path) -> None:
        if operation == self.operation and str(path).endswith(self.name):
            os.kill(self.build, signal.SIGKILL)
            signal.pause()  # a worker waits for the death of its parent to kill it


def main() -> None:
    path, corpus, operation, name = sys.argv[1:]
    disk = KillingDisk(operation, name, os.getpid())
    spec = small_spec(Path(path))
    if path.endswith(".toml"):
        spec = read_build_spec(Path(path)).model_copy(update={"shard_bytes": 512})
    print(build_corpus(spec, Path(corpus), workers=2, limits=SMALL, disk=disk).digest)
