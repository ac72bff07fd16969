"""Sends this node's round messages, plans for members that have an older one, and pledges.

A pledge is written to disk before it is sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, MessageTooLarge
from atoll.node.rounds import types as rt
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.state.vote_store import VoteStore
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp

_PLAN_AGAIN_SECONDS = 5.0  # to a member that still reports an older plan

_log = log.get("rounds")


class Outbox:
    """Sends over `links`, which the engine sets before it runs. Messages to this node itself become events."""

    links: RoundLinks

    def __init__(
        self,
        me: str,
        votes: VoteStore,
        clock: Clock,
        plan_newer_than: Callable[[int], pb.Signed | None],
        post_event: Callable[[rt.Event], None],
    ) -> None:
        self._me = me
        self._votes = votes
        self._clock = clock
        self._plan_newer_than = plan_newer_than
        self._post_event = post_event
        self._pledges: asyncio.Queue[rt.Pledge] = asyncio.Queue()
        self._plans_sent: dict[str, float] = {}  # peer → when our plan was sent to it
        self._unsent: dp.RoundMessage | None = None  # the last message that was too large

    def send(self, peer: str, message: dp.RoundMessage) -> None:
        """Queue a message to a member."""
        try:
            self.links.send(peer, message)
        except MessageTooLarge as error:
            if message is not self._unsent:  # the same message goes to every member; log it once
                _log.error("message not sent", reason=str(error))
                self._post_event(rt.SendFailed(message, str(error)))
            self._unsent = message

    def share_plan(self, peer: str, version: int) -> None:
        """Send the plan of `version` or a newer one, at most once in a few seconds to each peer."""
        now = self._clock.monotonic()
        sealed = self._plan_newer_than(version - 1)
        if sealed is not None and now - self._plans_sent.get(peer, float("-inf")) >= _PLAN_AGAIN_SECONDS:
            self._plans_sent[peer] = now
            self.send(peer, dp.RoundMessage(plan=sealed))

    def pledge(self, pledge: rt.Pledge) -> None:
        """Queue a promise or a vote, which is sent once it is on disk."""
        self._pledges.put_nowait(pledge)

    async def carry_out_pledges(self) -> None:
        """Save and send pledges one after another, until cancelled."""
        while True:
            pledge = await self._pledges.get()
            try:
                await asyncio.to_thread(self._votes.save, pledge.record)
            except AtollError as error:  # a full disk
                _log.error("cannot vote", reason=str(error))
                self._post_event(rt.PledgeFailed(pledge.message))
                continue
            if pledge.peer == self._me:
                self._post_event(rt.Received(self._me, pledge.message))
            else:
                self.send(pledge.peer, pledge.message)
