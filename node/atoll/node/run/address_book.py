"""Addresses in the DHT: publishes this node's address and looks up the addresses of the plan's members."""

from __future__ import annotations

import asyncio
import contextlib
from datetime import timedelta

from atoll.core import log
from atoll.core.errors import AtollError, DeadlineExceeded, Unreachable
from atoll.node.control.directives import Directives
from atoll.node.swarm.host import SwarmHost

ADDRESS_LIFETIME = timedelta(seconds=300)
ADDRESS_REFRESH = timedelta(seconds=60)
ADDRESS_RETRY = timedelta(seconds=5)
ADDRESS_CHECK_INTERVAL = timedelta(seconds=3)  # a node behind NAT discovers only later that it needs a relay
FIRST_LOOKUP_INTERVAL = timedelta(seconds=2)  # while a member of the plan has no record; doubles up to the refresh

_log = log.get("daemon")


class AddressBook:
    """Keeps this node's DHT record current, and keeps the addresses of the plan's members known."""

    def __init__(self, host: SwarmHost, directives: Directives, peer_id: str) -> None:
        self._host = host
        self._directives = directives
        self._me = peer_id

    async def publish(self) -> None:
        """Publish this node's addresses until cancelled: on every change, and long before the record expires."""
        while True:
            pause = ADDRESS_REFRESH
            try:
                await self._host.publish_address(ADDRESS_LIFETIME)
            except AtollError as error:
                _log.warning("could not publish in the DHT", reason=str(error))
                pause = ADDRESS_RETRY
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause.total_seconds()):
                    await self._until_address_changes()

    async def look_up(self) -> None:
        """Look up the members of the plan until all can be dialled, and again for each plan, until cancelled."""
        missing: set[str] = set()  # members of the plan without a known record
        version, pause = 0, FIRST_LOOKUP_INTERVAL
        while True:
            plan = self._directives.plan
            if plan is not None:
                if plan.version != version:
                    missing, version, pause = set(), plan.version, FIRST_LOOKUP_INTERVAL
                asked = missing if pause < ADDRESS_REFRESH else set()
                try:
                    known = await self._host.lookup_addresses(asked)
                    missing = (asked or set(plan.members)) - set(known) - {self._me}
                except AtollError as error:
                    _log.warning("DHT lookup failed", reason=str(error))
                    missing = asked or set(plan.members) - {self._me}
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout((pause if missing else ADDRESS_REFRESH).total_seconds()):
                    await self._until_plan_after(version)
            pause = min(2 * pause, ADDRESS_REFRESH)

    async def _until_address_changes(self) -> None:
        while True:
            await asyncio.sleep(ADDRESS_CHECK_INTERVAL.total_seconds())
            with contextlib.suppress(Unreachable, DeadlineExceeded):
                if await self._host.address_changed():
                    return

    async def _until_plan_after(self, version: int) -> None:
        directives = self._directives
        await directives.until(lambda: directives.plan is not None and directives.plan.version > version)
