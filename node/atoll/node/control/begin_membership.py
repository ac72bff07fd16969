"""Start of a membership in a run: files that must exist before this node takes part in the run."""

from __future__ import annotations

import shutil
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.files import data_dir_unusable, make_private_dir
from atoll.node.control.credentials import Credentials
from atoll.node.control.run_directories import put_in_place, record_created
from atoll.node.state.vote_store import VoteStore


def begin_membership(data_dir: Path, credentials: Credentials) -> None:
    """Write the credentials for a run, which the next start of this node uses. Raises `DataDirUnusable`.

    State of another run of the same name is set aside: its plans, promises and checkpoints must not be used in this
    run.
    """
    run_dir, created = data_dir / "runs" / credentials.run_id, credentials.run_created_unix_ms
    put_in_place(run_dir, created)
    try:
        is_new = not run_dir.exists() or not any(run_dir.iterdir())  # empty: an earlier call was interrupted
    except OSError as error:
        raise data_dir_unusable(run_dir, error) from error
    if is_new:  # a new member has cast no vote; without a record that says so, it would abstain
        try:
            VoteStore(make_private_dir(run_dir)).begin()
        except AtollError:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
    record_created(run_dir, created)
    credentials.save(data_dir)
