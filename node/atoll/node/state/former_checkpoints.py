"""Checkpoints of this node's former runs: they stay on its disk when it moves, and a fork can begin with one.

Functions here block.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError

from atoll.core.errors import AtollError
from atoll.core.run_spec import ForkSection
from atoll.node.state.checkpoint import describe, rounds_in
from atoll.v1 import membership_pb2 as mb

MAX_FORMER_CHECKPOINTS = 64  # reported; the coordinator takes no more


def checkpoint_directory(runs: Path, run_id: str, round_number: int) -> Path:
    """Where a node has the checkpoint of that round; it need not exist."""
    return runs / run_id / "checkpoints" / f"{round_number:09d}"


def former_checkpoints(runs: Path, present: str, fork: ForkSection | None) -> tuple[mb.FormerCheckpoint, ...]:
    """Describe checkpoints of all runs below `runs` but the `present` one: the fork's source, then the newest written.

    Reads manifests and headers, not the vectors. What cannot be read is left out.
    """
    found = []
    for directory in _directories(runs):
        run_id = directory.parents[1].name
        if run_id == present:
            continue
        try:
            found.append(mb.FormerCheckpoint(run_id=run_id, checkpoint=describe(directory)))
        except (AtollError, DecodeError, OSError):
            continue
    found.sort(key=lambda item: -item.checkpoint.written_unix_ms)
    if fork is not None:
        found.sort(key=lambda item: (item.run_id, item.checkpoint.round) != (fork.run, fork.round))
    return tuple(found[:MAX_FORMER_CHECKPOINTS])


def _directories(runs: Path) -> list[Path]:
    found: list[Path] = []
    try:
        folders = [path / "checkpoints" for path in runs.iterdir()]
    except OSError:
        return found
    for folder in folders:
        found += rounds_in(folder)
    return found
