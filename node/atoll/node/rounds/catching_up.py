"""Brings a node that is behind to the head that the others agree on, between its rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.core import log
from atoll.core.errors import AtollError
from atoll.core.manifest import Head
from atoll.node.rounds import types as rt
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.lookout import Lookout
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.own_progress import OwnProgress
from atoll.node.rounds.run_member import RunMember
from atoll.node.rounds.snapshot_ledger import CountedShare
from atoll.node.rounds.staged_results import RoundResults
from atoll.node.rounds.trainer_orders import TrainerOrders
from atoll.node.state.catchup import catch_up
from atoll.node.system.background_tasks import BackgroundTasks

_LOOK_AHEAD_SECONDS = 30.0  # at least, and two maximal rounds, without a commit
_PAUSE_SECONDS = 1.0  # after one that failed

_log = log.get("rounds")


class CatchingUp:
    """Looks whether others are ahead, and fetches their head by an order to the trainer: nothing moves meanwhile."""

    def __init__(
        self,
        member: RunMember,
        machine: RoundMachine,
        installed: InstalledState,
        results: RoundResults,
        progress: OwnProgress,
        orders: TrainerOrders,
        background: BackgroundTasks,
        arrived: Callable[[Head], None],
    ) -> None:
        """`arrived` is told the head, when this node stands there."""
        self._member = member
        self._machine = machine
        self._installed = installed
        self._results = results
        self._progress = progress
        self._orders = orders
        self._arrived = arrived
        self._lookout = Lookout(member, background, lambda: installed.head, self.begin)
        self.active = False

    def head_moved(self, head: Head) -> None:
        """This node has another head: there is no need to look for a while."""
        self._lookout.head_moved()

    def look_if_quiet(self) -> None:
        """Look whether others are ahead, if nothing was committed for long."""
        if self._lookout.quiet_seconds >= max(_LOOK_AHEAD_SECONDS, 2 * self._machine.policy.round_max.total_seconds()):
            self.look("nothing was committed for long")

    def look(self, reason: str) -> None:
        """A member says that others are ahead: ask them."""
        if not self.active:
            self._lookout.look(reason, self._machine.plan)

    def begin(self, reason: str, share: CountedShare | None = None) -> None:
        """Fetch the head that the others agree on. `share` is of the round after ours, where that is known."""
        if self.active:
            return
        self.active = True
        _log.warning("behind", reason=reason)
        self._orders.put(lambda: self._catch_up(share))

    async def _catch_up(self, share: CountedShare | None) -> None:
        plan, before, state, member = self._machine.plan, self._installed.head, self._installed.state, self._member
        await self._progress.audits.stop()
        try:
            try:
                fetched = await catch_up(member.network, plan, state, before, operator_key=member.operator_key)
                if fetched is None:
                    return
                head = fetched.head
                share = share or await self._share_after(before, head)
                await self._installed.record(head)
            except AtollError as error:
                _log.warning("catch-up failed", reason=str(error))
                await asyncio.sleep(_PAUSE_SECONDS)  # the next message from ahead tries again
                return
            await self._installed.move(head, state.load_fetched, fetched)
            self._results.forget()
            await self._progress.keep(before, head, share)
            self.active = False  # it may not be the end of it
            self._arrived(head)
        finally:
            self.active = False

    async def _share_after(self, before: Head, head: Head) -> CountedShare:
        """What the round after `before`, on the way to `head`, holds of ours: only that one can.

        The machine may have committed that round itself since we began to catch up, and forgotten what it brought.
        """
        after = head if head.round == before.round + 1 else await self._lookout.round_after(self._machine.plan, before)
        share = self._progress.accounted_after(before)
        if share is not None:
            return share
        if after is None or after.manifest.previous_hash != before.hash:
            return CountedShare(rt.Counted.UNKNOWN)
        return CountedShare.of(self._member.peer_id, after.manifest, self._machine.counted(after.manifest))
