"""Begin of a membership in a run: what must be on disk before this node takes part in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.files import data_dir_unusable, make_private_dir, write_private
from atoll.node.control.credentials import Credentials
from atoll.node.state.vote_store import VoteStore

_CREATED = "created"  # when the coordinator created the run, in a file of the run's directory
_DELETED = ".deleted"  # ends the name of a deleted run's directory


def begin_membership(data_dir: Path, credentials: Credentials) -> None:
    """Write the credentials for a run, which the next start of this node uses. Raises `DataDirUnusable`.

    State of a deleted run of the same name is set aside: its plans, promises and checkpoints do not count here. Of each
    name, one such directory is kept.
    """
    run_dir, created = data_dir / "runs" / credentials.run_id, credentials.run_created_unix_ms
    try:
        if created and _created(run_dir) not in (0, created):
            aside = run_dir.with_name(run_dir.name + _DELETED)
            shutil.rmtree(aside, ignore_errors=True)
            run_dir.rename(aside)
        is_new = not run_dir.exists() or not any(run_dir.iterdir())  # empty: this was interrupted
    except OSError as error:
        raise data_dir_unusable(run_dir, error) from error
    if is_new:  # a new member has no earlier vote; without a record of that it would abstain
        try:
            VoteStore(make_private_dir(run_dir)).begin()
        except AtollError:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
    if created:
        write_private(run_dir / _CREATED, b"%d" % created)
    credentials.save(data_dir)


def _created(run_dir: Path) -> int:
    """When the run in this directory was created; 0: not known."""
    try:
        return int((run_dir / _CREATED).read_bytes())
    except (FileNotFoundError, ValueError):
        return 0
