"""Keeps the inner optimiser's state from a stop of this node to its next start. Failures are logged only."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Protocol

from atoll.core import log
from atoll.core.errors import AtollError, ChildDied

OPTIMIZER = "optimizer.state"  # in the run's folder

_log = log.get("session")


class OptimizerTrainer(Protocol):
    """The methods of a trainer that are needed here."""

    async def keep_optimizer(self, path: Path, *, timeout: timedelta) -> None: ...

    async def restore_optimizer(self, path: Path) -> None: ...


class KeptOptimizer:
    """The optimiser's file of one run."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / OPTIMIZER

    async def keep(self, trainer: OptimizerTrainer, timeout: timedelta) -> None:
        """Write the state of `trainer`. A trainer that needs longer than `timeout` is killed."""
        try:
            await trainer.keep_optimizer(self._path, timeout=timeout)
        except AtollError as error:
            _log.info("optimiser's state not kept", reason=str(error))
            self._forget_unfinished()

    async def restore(self, trainer: OptimizerTrainer) -> None:
        """Restore the state into `trainer`, once. Raises `ChildDied`; the next trainer then starts without it."""
        self._forget_unfinished()  # left by a process that was killed during the write
        if not self._path.exists():
            return
        try:
            await trainer.restore_optimizer(self._path)
            _log.info("optimiser's state restored")
        except ChildDied:
            self._path.unlink(missing_ok=True)  # the file may be why the trainer died
            raise
        except AtollError as error:
            _log.warning("optimiser's state not restored", reason=str(error))
        self._path.unlink(missing_ok=True)

    def _forget_unfinished(self) -> None:
        self._path.with_name(f".{self._path.name}.tmp").unlink(missing_ok=True)
