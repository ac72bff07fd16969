"""A real build, with processes, that kills itself at a certain file operation of any of its processes, or never ends.

python -c "from support.killed_build import main; main()" INPUT CORPUS OPERATION NAME
python -c "from support.killed_build import held; held()" data build …
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from support.corpora import SMALL, small_spec

from atoll.core.disk import File, OsDisk
from atoll.lab.cli.main import main as atoll
from atoll.node.data import build
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


@dataclass
class HoldingDisk(OsDisk):
    """The operating system's disk, on which no worker gets beyond the beginning of a unit."""

    def create(self, path: Path, mode: int = 0o644) -> File:
        while str(path).endswith(".spill.tmp"):
            signal.pause()
        return super().create(path, mode)


def held() -> None:
    """`atoll`, with builds that last until they are ended."""
    build.build_corpus = partial(build_corpus, disk=HoldingDisk())  # type: ignore[assignment]
    atoll()
