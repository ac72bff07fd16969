"""Begin of a membership in a run: what must be on disk before this node takes part in it."""

from __future__ import annotations

import shutil
from pathlib import Path

from atoll.core.errors import AtollError
from atoll.core.files import make_private_dir
from atoll.node.control.credentials import Credentials
from atoll.node.state.vote_store import VoteStore


def begin_membership(data_dir: Path, credentials: Credentials) -> None:
    """Write the credentials for a run, which the next start of this node uses. Raises `DataDirUnusable`."""
    run_dir = data_dir / "runs" / credentials.run_id
    is_new = not run_dir.exists() or not any(run_dir.iterdir())  # empty: this was interrupted
    if is_new:  # a new member has no earlier vote; without a record of that it would abstain
        try:
            VoteStore(make_private_dir(run_dir)).begin()
        except AtollError:
            shutil.rmtree(run_dir, ignore_errors=True)
            raise
    credentials.save(data_dir)
