"""Measures the held-out loss of committed anchors: one member measures it after every turn of the fragments."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, ChildDied
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import membership_pb2 as mb

_TIMEOUT = timedelta(seconds=10)  # over a route: until all its stages have installed the same round
_LAST_TIMEOUT = timedelta(seconds=60)
_AGAIN_SECONDS = 0.5
MAX_SOURCES = 64  # in a report

_log = log.get("rounds")


class Evaluation:
    """Measures anchors on this node when it is this node's turn."""

    def __init__(
        self,
        me: str,
        trainer: Trainer,
        clock: Clock,
        background: BackgroundTasks,
        current: Callable[[], Head],
        report: Callable[[mb.EvaluationReport], None],
    ) -> None:
        """`current` returns the head whose anchor the trainer has."""
        self._me = me
        self._trainer = trainer
        self._clock = clock
        self._background = background
        self._current = current
        self._report = report

    async def end_turn(self, head: Head, plan: Plan, *, opened_here: bool, holds_all: bool, last: bool) -> None:
        """Evaluate the installed round `head` if this node must.

        `holds_all`: it has the whole model; `last`: the run is over.
        """
        last_of_turn = head.manifest.round.fragment == head.manifest.fragments - 1
        if not (last_of_turn or last) or not self._is_due(head, plan, opened_here):
            return
        if holds_all:
            await self._evaluate(head)
        elif last:
            await self._evaluate_route(head, _LAST_TIMEOUT)
        else:
            self._background.begin(self._evaluate_route(head, _TIMEOUT))

    def _is_due(self, head: Head, plan: Plan, opened_here: bool) -> bool:
        """Whether this node evaluates: the opener if all hold the model, else the first replica or driver."""
        if not plan.cuts:
            return opened_here
        there = RoundId.from_proto(head.manifest.round).order(sorted(head.present))
        whole = [peer for peer in there if plan.is_replica(peer)]
        able = whole or [peer for peer in there if peer in plan.drivers]
        return able[:1] == [self._me]

    async def _evaluate_route(self, head: Head, timeout: timedelta) -> None:
        """Evaluate over a route, and retry until all stages have installed the round. Stop if a newer round comes."""
        deadline = self._clock.monotonic() + timeout.total_seconds()
        while self._current() is head:
            try:
                await self._evaluate(head)
                return
            except ChildDied:
                raise
            except AtollError as error:
                if self._clock.monotonic() >= deadline:
                    _log.info("not evaluated", round=head.round, reason=str(error))
                    return
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _evaluate(self, head: Head) -> None:
        self._report(await evaluation_report(self._trainer, head))


async def evaluation_report(trainer: Trainer, head: Head) -> mb.EvaluationReport:
    """Measure the anchor of `head`, which the trainer has. The report also has the tokens trained of each source."""
    loss = await trainer.evaluate()
    progress = trainer.facts.mixture_progress if loss.sources else None
    trained = {row.name: row.tokens for row in progress.at(head.data)} if progress is not None else {}
    return mb.EvaluationReport(
        round=head.round,
        loss=loss.value,
        committed_tokens=head.committed_tokens,
        sources=[
            mb.SourceLoss(name=name, loss=value, windows=windows, tokens=trained.get(name, 0))
            for name, value, windows in loss.sources[:MAX_SOURCES]
        ],
    )
