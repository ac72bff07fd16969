"""Checkpoints of this node's former runs. They stay on disk when the node moves, and a fork can begin with one.

The functions here block.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.core.errors import AtollError
from atoll.core.run_spec import ForkSection
from atoll.node.state.checkpoint import describe, rounds_in
from atoll.node.state.checkpoint_files import MANIFEST
from atoll.v1 import membership_pb2 as mb

_RUN_NAME = re.compile(r"[a-z0-9-]{1,63}")  # names of directories that are set aside contain a dot
MAX_FORMER_CHECKPOINTS = 64  # reported; the coordinator accepts no more


def checkpoint_directory(runs: Path, run_id: str, round_number: int) -> Path:
    """The directory of a round's checkpoint, whether or not it exists."""
    return runs / run_id / "checkpoints" / f"{round_number:09d}"


def former_checkpoints(runs: Path, present: str, fork: ForkSection | None) -> tuple[mb.FormerCheckpoint, ...]:
    """Describe the checkpoints below `runs`, except those of run `present`: the fork's source first, then the newest.

    Reads manifests and headers, not the vectors. Omits unreadable checkpoints.
    """
    source = checkpoint_directory(runs, fork.run, fork.round) if fork is not None else None
    newest = sorted(_directories(runs, present), key=lambda it: (it[1] == source, it[0]), reverse=True)
    found = []
    for _, directory in newest[:MAX_FORMER_CHECKPOINTS]:
        with contextlib.suppress(AtollError, DecodeError, OSError):
            described = describe(directory)
            found.append(mb.FormerCheckpoint(run_id=directory.parents[1].name, checkpoint=described))
    return tuple(found)


def _directories(runs: Path, present: str) -> Iterator[tuple[int, Path]]:
    """Directories of checkpoints, each with the modification time of its manifest."""
    try:
        names = [path.name for path in runs.iterdir() if path.name != present]
    except OSError:
        return
    for name in filter(_RUN_NAME.fullmatch, names):
        for directory in rounds_in(runs / name / "checkpoints"):
            with contextlib.suppress(OSError):
                yield (directory / MANIFEST).stat().st_mtime_ns, directory
