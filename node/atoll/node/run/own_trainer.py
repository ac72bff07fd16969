"""A session's trainer: starts it with a span, applies the owner's limits, watches it and stops it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from atoll.core.errors import ChildDied
from atoll.node.run.kept_optimizer import KeptOptimizer
from atoll.node.run.node_context import NodeContext
from atoll.node.trainer.preload import TrainerPreload
from atoll.node.trainer.trainer import Trainer, TrainerConfig
from atoll.node.trainer.trainer_process import LOG_NAME, TrainerProcess

LOAD_TIMEOUT = timedelta(minutes=10)  # between two signs of progress of a loading trainer
_STOP_TIMEOUT = timedelta(seconds=5)

T = TypeVar("T")


class OwnTrainer:
    """One trainer at a time; `current` is None while there is none."""

    def __init__(self, context: NodeContext) -> None:
        self.current: Trainer | None = None
        self._context = context
        self._config = context.trainer_config
        self._preload: TrainerPreload | None = context.preload
        self._kept_optimizer = KeptOptimizer(context.run_dir)

    async def start(self, span: tuple[int, int] | None) -> Trainer:
        """Start a trainer with these layers and the corpus loaded; use the preloaded trainer if it has these layers."""
        context = self._context
        loaded_with = context.trainer_config
        preload, self._preload = self._preload, None
        trainer = await preload.take(span) if preload is not None else None
        if trainer is None:
            loaded_with = self._config
            layer_times = context.status.facts.layer_times if context.status.facts is not None else ()
            config = replace(loaded_with, span=span, layer_times=layer_times)
            child = await TrainerProcess.start(context.run_dir / LOG_NAME)
            trainer = await Trainer.take(
                child, config, timeout=LOAD_TIMEOUT, on_progress=context.status.show_loading_progress
            )
        self.current = trainer
        if self._config != loaded_with:  # `atoll set` changed the limits meanwhile
            await trainer.limit(self._config)
        context.status.facts, context.status.trainer = trainer.facts, trainer
        return trainer

    async def limit(self, config: TrainerConfig) -> None:
        """Apply limits to this trainer and later ones. Raises `ModelTooLarge` without changing anything."""
        if self.current is not None:
            with contextlib.suppress(ChildDied):  # the next trainer starts with them
                await self.current.limit(config)
        self._config = config

    async def stop(self) -> None:
        """End the trainer process, if there is one."""
        if self.current is not None:
            trainer, self.current = self.current, None
            await trainer.stop(_STOP_TIMEOUT)

    async def keep_optimizer(self, timeout: timedelta) -> None:
        """Write the inner optimiser's state for the next start of this node."""
        if self.current is not None and not self.current.died.done():
            await self._kept_optimizer.keep(self.current, timeout)

    async def restore_optimizer(self, trainer: Trainer) -> None:
        """Restore the state that an earlier process wrote into `trainer`."""
        await self._kept_optimizer.restore(trainer)


async def unless_trainer_dies(trainer: Trainer, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`. Raises `ChildDied` if the trainer ends first."""
    task = asyncio.ensure_future(work)
    await wait_any_or_trainer_death(trainer, task)
    return task.result()


async def wait_any_or_trainer_death(trainer: Trainer, *tasks: asyncio.Future[Any]) -> None:
    """Wait until one of the tasks ends, and raise its error; raise `ChildDied` if the trainer ends first."""
    try:
        waiting: list[asyncio.Future[Any]] = [*tasks, trainer.died]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if trainer.died.done():
            raise trainer.died.result().error()
        for task in tasks:
            if task.done():
                task.result()
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
