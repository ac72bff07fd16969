"""The first trainer of a daemon, loading while the daemon joins the swarm.

A node that starts again knows its last plan, and so, nearly always, which layers it will hold: its trainer need not
wait for the swarm to read corpus and model.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta

from atoll.core.plan import Plan
from atoll.node.trainer.trainer import OnProgress, Trainer, TrainerConfig, no_progress_callback
from atoll.node.trainer.trainer_process import TrainerProcess


def span_to_hold(plan: Plan | None, wanted: range) -> tuple[int, int] | None:
    """What a trainer is told to hold, both layers included; None: the whole model, or nobody says."""
    return (wanted.start, wanted.stop - 1) if plan is not None and 0 < len(wanted) < plan.layers else None


class TrainerPreload:
    """Has a child load at once; then one `take`, or `abandon`."""

    def __init__(
        self,
        child: TrainerProcess,
        config: TrainerConfig,
        timeout: timedelta,
        on_progress: OnProgress = no_progress_callback,
    ) -> None:
        self._child, self._span, self._taken = child, config.span, False
        taking = Trainer.take(child, config, timeout=timeout, on_progress=on_progress)
        self._taking = asyncio.create_task(taking, name="loading-ahead")

    async def take(self, span: tuple[int, int] | None) -> Trainer | None:
        """The trainer, or what it raised. None, and the child is gone, when it loads other layers than these."""
        if span != self._span:
            await self.abandon()
            return None
        await asyncio.wait([self._taking])
        self._taken = True
        return self._taking.result()

    async def abandon(self) -> None:
        """End the child, whatever it does; nothing when the trainer was taken. Twice is fine."""
        if self._taken:
            return
        self._taken = True
        self._taking.cancel()
        await asyncio.wait([self._taking])
        if not self._taking.cancelled() and self._taking.exception() is None:
            await self._taking.result().stop(timedelta(0))
        await self._child.end()  # a task that is cancelled at once takes nothing
