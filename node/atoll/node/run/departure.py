"""How a node leaves its run: it drains after an order or a signal, then stops or moves to another run.

The first signal drains within a deadline; a second signal stops at once.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import Any, TypeVar

from atoll.core import log, sdnotify
from atoll.core.clock import Clock
from atoll.core.errors import Busy, Unreachable
from atoll.node.config import NodeConfig
from atoll.node.control.begin_membership import begin_membership
from atoll.node.control.coordinator_link import CoordinatorLink
from atoll.node.control.directives import Directives
from atoll.node.run.status import LiveStatus
from atoll.v1 import membership_pb2 as mb

DRAIN_TIMEOUT = timedelta(seconds=30)
STOP_TIMEOUT = timedelta(seconds=105)  # service managers kill the node after 120 s (deploy/)
DRAINED_STAGE_LINGER = timedelta(seconds=20)  # for which a drained stage serves its layers before it leaves
_FLUSH_TIMEOUT = timedelta(seconds=5)
_MOVE_PAUSES = tuple(timedelta(seconds=2**power) for power in range(5))  # after each failed attempt to move
_ORDERS_TO_LEAVE = (mb.ORDER_DRAIN, mb.ORDER_MOVE)

T = TypeVar("T")

_log = log.get("daemon")


class Departure:
    """Whether, why and how this node leaves."""

    def __init__(
        self, config: NodeConfig, status: LiveStatus, directives: Directives, link: CoordinatorLink, clock: Clock
    ) -> None:
        self.stop_asked = False  # by a signal, the owner or the operator: the node joins no further run
        self.stop_by = math.inf  # monotonic
        self._config = config
        self._status = status
        self._directives = directives
        self._link = link
        self._clock = clock
        self._told = asyncio.Event()
        self._reason, self._why = "left", mb.NODE_REASON_STOPPED
        self._moves = False  # the node leaves this run for another one
        self._drain_timeout = DRAIN_TIMEOUT

    @property
    def goes_on(self) -> bool:
        """Whether the node leaves for another run and does not stop."""
        return self._moves and not self.stop_asked

    def leave(self, reason: str, why: mb.NodeReason = mb.NODE_REASON_STOPPED) -> None:
        """Begin to drain and stop."""
        self._reason, self._why = reason, why
        self._told.set()

    def stop(self, reason: str, *, drain: bool = True) -> None:
        """Stop for good, as the owner wants. With `drain`, the node first finishes the round."""
        self.stop_asked = True
        if not drain:
            self._drain_timeout = timedelta(0)
        self.leave(reason)

    async def told(self) -> None:
        """Wait until the node is ordered to leave."""
        await self._told.wait()

    async def unless_told(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Await `work`. If the node is told to leave before `work` ends, cancel `work` and return None."""
        working, leaving = asyncio.create_task(work), asyncio.create_task(self._told.wait())
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    def catch_signals(self) -> None:
        """Leave on SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()

        def on_signal(number: signal.Signals) -> None:
            first, self.stop_asked = not self.stop_asked, True
            if self._moves and first:
                _log.info("stopping instead of moving to another run", signal=number.name)
                return
            if self._told.is_set():
                _log.warning("second signal: stopping at once")
                os._exit(128 + number)  # children die with us
            self.leave(f"stopped by {number.name}")

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)

    async def leave_when_ordered(self, *, trains: bool) -> None:
        """Wait for the coordinator to order a drain or a move, or to end the run if this node `trains`."""
        directives = self._directives

        def must_leave() -> bool:
            if directives.order == mb.ORDER_MOVE and self._config.stay_in_run:
                # the node has moved already, and the answer was lost
                return directives.run_state == mb.RUN_STATE_UNSPECIFIED
            stopped = trains and directives.run_state == mb.RUN_STATE_STOPPED
            return stopped or directives.order in _ORDERS_TO_LEAVE

        await directives.until(must_leave)
        if self._told.is_set():
            return
        self._moves = directives.order == mb.ORDER_MOVE
        if self._moves:
            self.leave("moved to another run by the operator", mb.NODE_REASON_DRAINED)
        elif directives.order == mb.ORDER_DRAIN:
            self.leave("drained by the operator", mb.NODE_REASON_DRAINED)
        else:
            self.leave("the operator stopped the run", mb.NODE_REASON_RUN_STOPPED)

    async def drain(self, me: str, finish_round: Callable[[timedelta], Awaitable[object]] | None) -> None:
        """Finish the round if it ends in time, send the last reports, then announce the leave or move.

        `finish_round` receives its time limit; None: this node takes part in no rounds.
        """
        if not self._moves:
            sdnotify.notify(os.environ.get("NOTIFY_SOCKET", ""), "STOPPING=1")
        self.stop_by = self._clock.monotonic() + STOP_TIMEOUT.total_seconds()
        if finish_round is not None:
            self._status.detail = "finishing the round, then leaving"  # the node stays in the plan until then
            _log.info(
                "finishing the round, then leaving; a second signal stops at once",
                most_seconds=self._drain_timeout.total_seconds(),
            )
            await finish_round(self._drain_timeout)
        plan, ordered = self._directives.plan, self._directives.order in _ORDERS_TO_LEAVE
        if ordered and plan is not None and me in plan.former:
            self._status.detail = "serving layers to other nodes, then leaving"
            await asyncio.sleep(DRAINED_STAGE_LINGER.total_seconds())
        self._status.enter(mb.NODE_STATE_DRAINING, "leaving", self._why)
        self._link.send_heartbeat_now()
        if self._link.connected:
            await self._link.flush(_FLUSH_TIMEOUT)
        if self.goes_on:
            await self._move()
        else:
            await self._link.leave(self._reason, self._why)
            _log.info("left", reason=self._reason)

    async def _move(self) -> None:
        """Become a member of the run that this node is assigned to.

        If the coordinator is unreachable, the next daemon starts in the old run and receives the order again. Raises
        other errors.
        """
        for pause in _MOVE_PAUSES:
            try:
                credentials = await self._link.move_to_run()
            except (Unreachable, Busy) as error:
                _log.warning("not moved to another run yet", reason=str(error))
                await asyncio.sleep(pause.total_seconds())
            else:
                begin_membership(self._config.data_dir, credentials)
                _log.info("moved", run=credentials.run_id)
                return
