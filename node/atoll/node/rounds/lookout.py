"""Checks, in the background, whether other members are ahead of this node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from atoll.core import log
from atoll.core.errors import AtollError
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.node.rounds.run_member import RunMember
from atoll.node.state.catchup import fetch_manifest, newest_round
from atoll.node.state.heads import is_valid_successor
from atoll.node.system.background_tasks import BackgroundTasks

_TIMEOUT = timedelta(seconds=90)  # a long history may have to be fetched
_PAUSE_SECONDS = 1.0

_log = log.get("rounds")


class Lookout:
    """Asks other members for their heads, one query at a time."""

    def __init__(
        self,
        member: RunMember,
        background: BackgroundTasks,
        current: Callable[[], Head],
        behind: Callable[[str], None],
    ) -> None:
        """`current` returns this node's head. `behind` is called with the reason for a catch-up."""
        self._member = member
        self._background = background
        self._current = current
        self._behind = behind
        self._looking = False
        self._looked_at = member.clock.monotonic()

    @property
    def quiet_seconds(self) -> float:
        """Seconds since the last look, or the last change of the head."""
        return self._member.clock.monotonic() - self._looked_at

    def head_moved(self) -> None:
        """Restart the quiet time, because this node has a new head."""
        self._looked_at = self._member.clock.monotonic()

    def look(self, reason: str, plan: Plan) -> None:
        """Ask the other members for their heads, because one member claims that others are ahead."""
        if not self._looking:
            self._looking = True
            self._background.begin(self._look(reason, plan))

    async def _look(self, reason: str, plan: Plan) -> None:
        self.head_moved()
        try:
            async with asyncio.timeout(_TIMEOUT.total_seconds()):
                ahead = await newest_round(
                    self._member.network, plan, self._current(), operator_key=self._member.operator_key
                )
            head = self._current()  # our head may have moved meanwhile
            if ahead > head.round or not plan.accepts(head):
                self._behind(reason)
            else:
                await asyncio.sleep(_PAUSE_SECONDS)  # before the next claim is checked
        except (TimeoutError, AtollError) as error:
            _log.info("could not look ahead", reason=str(error))
        finally:
            self._looking = False

    async def round_after(self, plan: Plan, before: Head) -> Head | None:
        """The round after `before`, with a valid quorum of votes, from any member that has it."""

        async def one(peer: str) -> Head | None:
            try:
                after = await fetch_manifest(self._member.network, peer, plan.run_id, before.round + 1)
            except AtollError:
                return None
            return after if is_valid_successor(plan, self._member.operator_key, before, after) else None

        others = [peer for peer in plan.members if peer != self._member.network.peer_id]
        answers = await asyncio.gather(*map(one, others))
        return next((after for after in answers if after is not None), None)
