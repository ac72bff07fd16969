"""Preload of the first trainer: it loads while the daemon joins the swarm.

A restarted node knows its last plan, which nearly always gives it the layers that it will hold. Its trainer can read
corpus and model before the daemon has joined.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from atoll.core.plan import Plan
from atoll.node.trainer.trainer import OnProgress, Trainer, TrainerConfig, no_progress_callback
from atoll.node.trainer.trainer_process import TrainerProcess


def span_to_hold(plan: Plan | None, wanted: range) -> tuple[int, int] | None:
    """First and last layer that the trainer will hold; None for the whole model, or if no plan gives it layers."""
    return (wanted.start, wanted.stop - 1) if plan is not None and 0 < len(wanted) < plan.layers else None


class TrainerPreload:
    """A child that starts to load at once. Its owner later calls either `take` or `abandon`, once."""

    def __init__(
        self,
        child: TrainerProcess,
        config: TrainerConfig,
        timeout: timedelta,
        on_progress: OnProgress = no_progress_callback,
    ) -> None:
        self._child, self._span, self._taken = child, config.span, False
        taking = Trainer.take(child, config, timeout=timeout, on_progress=on_progress)
        self._taking = asyncio.create_task(taking, name="trainer-preload")

    async def take(self, span: tuple[int, int] | None) -> Trainer | None:
        """Return the trainer, or raise its error.

        If it loads another span than `span`, end the child and return None.
        """
        if span != self._span:
            await self.abandon()
            return None
        await asyncio.wait([self._taking])
        self._taken = True
        return self._taking.result()

    async def abandon(self) -> None:
        """End the child unless `take` has returned its trainer. May be called twice."""
        if self._taken:
            return
        self._taken = True
        self._taking.cancel()
        await asyncio.wait([self._taking])
        if not self._taking.cancelled() and self._taking.exception() is None:
            await self._taking.result().stop(timedelta(0))
        await self._child.end()  # a task cancelled before it ran has not taken the child
