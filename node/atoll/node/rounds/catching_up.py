"""Fetches the head that the other members agree on, for a node that is behind. Runs between rounds."""

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

_LOOK_AHEAD_SECONDS = 30.0  # without a commit before a node asks others; at least this and two maximal rounds
_PAUSE_SECONDS = 1.0  # after a failed catch-up

_log = log.get("rounds")


class CatchingUp:
    """Checks whether others are ahead.

    Fetches their head as an order to the trainer, so no snapshot is taken meanwhile.
    """

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
        """`arrived` is called with the fetched head once its state is installed."""
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
        """Restart the time after which this node looks for newer heads."""
        self._lookout.head_moved()

    def look_if_quiet(self) -> None:
        """Check whether others are ahead, if no round was committed for long."""
        if self._lookout.quiet_seconds >= max(_LOOK_AHEAD_SECONDS, 2 * self._machine.policy.round_max.total_seconds()):
            self.look("nothing was committed for long")

    def look(self, reason: str) -> None:
        """Ask other members for their heads, because a message says that they are ahead."""
        if not self.active:
            self._lookout.look(reason, self._machine.plan)

    def begin(self, reason: str, share: CountedShare | None = None) -> None:
        """Fetch the head that the others agree on. `share`: what the round after ours counts of this node, if known."""
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
                await asyncio.sleep(_PAUSE_SECONDS)  # the next message from a member ahead starts another catch-up
                return
            await self._installed.move(head, state.load_fetched, fetched)
            self._results.forget()
            await self._progress.keep(before, head, share)
            self.active = False  # a newer round may start another catch-up at once
            self._arrived(head)
        finally:
            self.active = False

    async def _share_after(self, before: Head, head: Head) -> CountedShare:
        """What the round after `before` counts of this node. Only that round can contain its snapshot.

        The machine may have committed that round after the catch-up began, and then no longer has the snapshot's
        record.
        """
        after = head if head.round == before.round + 1 else await self._lookout.round_after(self._machine.plan, before)
        share = self._progress.accounted_after(before)
        if share is not None:
            return share
        if after is None or after.manifest.previous_hash != before.hash:
            return CountedShare(rt.Counted.UNKNOWN)
        return CountedShare.of(self._member.peer_id, after.manifest, self._machine.counted(after.manifest))
