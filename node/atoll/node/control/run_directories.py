"""Directories of runs in the data directory: `runs/RUN` has the state of one run.

The name of a deleted run may be used again, and two coordinators may use one name. The file `created` tells such runs
apart. State of another run of that name is set aside as `runs/RUN.CREATED`; it is moved back when this node takes part
in that run again.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from atoll.core.files import data_dir_unusable, write_private

KEPT_ASIDE = 2  # states set aside for each name

_CREATED = "created"  # when the coordinator created the run, milliseconds since 1970
_LATEST_MS = 2**53
_RUN_NAME = re.compile(r"[a-z0-9-]+")  # names of directories that are set aside contain a dot


def run_directories(data_dir: Path) -> list[Path]:
    """Directories of runs, by name, without those that are set aside."""
    return sorted(path for path in data_dir.glob("runs/*") if _RUN_NAME.fullmatch(path.name))


def put_in_place(run_dir: Path, created: int) -> None:
    """Move the state of the run that was created at `created` to `run_dir`; 0: not known, which changes nothing.

    State without a recorded time counts as that run's, unless the run's is set aside. Raises `DataDirUnusable`.
    """
    if created <= 0:
        return
    try:
        present, wanted = _created(run_dir), _aside(run_dir, created)
        comes_back = present != created and wanted.is_dir()
        if run_dir.exists() and (comes_back or present not in (0, created)):
            os.utime(run_dir)  # for `_drop_oldest`
            run_dir.rename(_aside(run_dir, present))
        if comes_back:
            wanted.rename(run_dir)
        _drop_oldest(run_dir)
    except OSError as error:
        raise data_dir_unusable(run_dir, error) from error


def record_created(run_dir: Path, created: int) -> None:
    """Record when the run was created, unless it is recorded. Raises `DataDirUnusable`."""
    try:
        if 0 < created <= _LATEST_MS and not _created(run_dir):
            write_private(run_dir / _CREATED, b"%d" % created)
    except OSError as error:
        raise data_dir_unusable(run_dir, error) from error


def _created(run_dir: Path) -> int:
    """When the run in this directory was created; 0: not known."""
    try:
        return max(0, int((run_dir / _CREATED).read_bytes()))
    except (FileNotFoundError, ValueError):
        return 0


def _aside(run_dir: Path, created: int) -> Path:
    return run_dir.with_name(f"{run_dir.name}.{created}")


def _drop_oldest(run_dir: Path) -> None:
    """Remove the oldest states that were set aside under this name."""
    found = [path for path in run_dir.parent.glob(f"{run_dir.name}.*") if path.suffix[1:].isdecimal()]
    found.sort(key=lambda path: (path.stat().st_mtime_ns, int(path.suffix[1:])))
    for path in found[:-KEPT_ASIDE]:
        shutil.rmtree(path, ignore_errors=True)
