"""The optimiser's state between two processes of a node: it is used once, and costs at most one trainer."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest

from atoll.core.errors import AtollError, CheckpointCorrupt, ChildDied
from atoll.node.run.kept_optimizer import OPTIMIZER, KeptOptimizer


class FakeTrainer:
    """Writes a file beside the state, as `optimizer_file` does, and then perhaps fails."""

    def __init__(self, error: AtollError | None = None) -> None:
        self.error, self.restored = error, 0

    async def keep_optimizer(self, path: Path, *, timeout: timedelta) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_bytes(b"state")
        if self.error is not None:
            raise self.error
        temporary.replace(path)

    async def restore_optimizer(self, path: Path) -> None:
        if self.error is not None:
            raise self.error
        assert OPTIMIZER in os.listdir(path.parent)
        self.restored += 1


async def kept(folder: Path) -> KeptOptimizer:
    found = KeptOptimizer(folder)
    await found.keep(FakeTrainer(), timedelta(seconds=1))
    assert os.listdir(folder) == [OPTIMIZER]
    return found


async def test_a_state_is_used_once(tmp_path: Path) -> None:
    found, trainer = await kept(tmp_path), FakeTrainer()
    await found.restore(trainer)
    await found.restore(trainer)
    assert (trainer.restored, os.listdir(tmp_path)) == (1, [])


async def test_a_state_of_something_else_is_left(tmp_path: Path) -> None:
    found = await kept(tmp_path)
    await found.restore(FakeTrainer(CheckpointCorrupt("of something else")))
    assert os.listdir(tmp_path) == []


async def test_a_state_that_kills_its_trainer_does_not_kill_the_next(tmp_path: Path) -> None:
    found = await kept(tmp_path)
    with pytest.raises(ChildDied):
        await found.restore(FakeTrainer(ChildDied("out of memory")))
    await found.restore(FakeTrainer(ChildDied("out of memory")))
    assert os.listdir(tmp_path) == []


async def test_a_trainer_that_is_killed_while_it_writes_leaves_nothing(tmp_path: Path) -> None:
    await KeptOptimizer(tmp_path).keep(FakeTrainer(ChildDied("it was killed")), timedelta(seconds=1))
    assert os.listdir(tmp_path) == []
