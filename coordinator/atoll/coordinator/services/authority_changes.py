"""Replacement of the certificate authority while the coordinator serves: introduce, wait for the members, retire.

`authorities.py` has the rules of files. After a change, the servers adopt it in a handshake that the coordinator itself
makes, before members are told: as few handshakes as possible may happen during a change of gRPC's configuration
(`ca.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from atoll.coordinator.ca import CoordinatorKeys
from atoll.coordinator.controller import Controller
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import Node
from atoll.core import log
from atoll.core.certs import LEAF_LIFETIME, not_after
from atoll.core.errors import AtollError, InvalidRequest, InvalidTransition
from atoll.v1 import admin_pb2 as wire

CHECK_SECONDS = 5.0  # between checks whether an overlap has ended
MAX_OVERLAP_SECONDS = 366 * 24 * 3600
MAX_NAMED = 20
_log = log.get("authorities")


class AuthorityChanges:
    """Rotates and retires the certificate authority of a coordinator."""

    def __init__(self, controller: Controller, keys: CoordinatorKeys, take_over: Callable[[], Awaitable[None]]) -> None:
        """`take_over` makes the servers and the admin credential use the current authorities."""
        self._controller = controller
        self._keys = keys
        self._take_over = take_over
        self._changing = asyncio.Lock()
        self._begun: set[asyncio.Task[None]] = set()

    async def rotate(self, overlap_seconds: int) -> wire.AuthoritiesView:
        """Introduce a new authority in addition to the current one. Raises `InvalidTransition`, `InvalidRequest`."""
        if not 1 <= overlap_seconds <= MAX_OVERLAP_SECONDS:
            raise InvalidRequest(f"overlap_seconds is {overlap_seconds}; must be 1 to {MAX_OVERLAP_SECONDS}")
        await self._to_its_end(self._rotate(overlap_seconds))
        return self.view()

    async def retire(self, *, force: bool) -> wire.AuthoritiesView:
        """End trust in the old authority. Raises `InvalidTransition` if members need it, unless `force` is set."""
        await self._to_its_end(self._retire_unless_needed(force=force))
        return self.view()

    async def run(self) -> None:
        """Retire the old authority when its overlap ends, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            until_ms = self._keys.authorities.now.until_ms
            if until_ms and self._controller.moment().unix_ms >= until_ms and not self._changing.locked():
                try:
                    async with self._changing:
                        await self._retire()
                except (AtollError, OSError) as error:  # for example a full disk: tried again
                    _log.error("cannot retire the old certificate authority", error=str(error))

    def view(self) -> wire.AuthoritiesView:
        """The trusted authorities and the members of each."""
        trusted, state = self._keys.authorities.now, self._controller.state
        newest = trusted.issuing.sha256
        nodes = [node for node in state.present_nodes() if self._may_return(state, node)]
        first = () if trusted.number else ("",)  # of rows without an authority, while there was only one
        others = sorted(node.name for node in nodes if node.authority not in (newest, *first))
        waiting = others if trusted.until_ms else []  # after the overlap they need tokens
        members = {trusted.serving.sha256: len(waiting), newest: len(nodes) - len(others)}
        views = [
            wire.AuthorityView(
                sha256=it.sha256, expires_unix_ms=int(1000 * not_after(it.pem)), members=members[it.sha256]
            )
            for it in trusted.all
        ]
        return wire.AuthoritiesView(trusted=views, until_unix_ms=trusted.until_ms, waiting=waiting[:MAX_NAMED])

    async def _to_its_end(self, change: Coroutine[Any, Any, None]) -> None:
        """Complete a change even if its caller disconnects, because members must follow the files on disk."""
        task = asyncio.create_task(change)
        self._begun.add(task)  # the event loop keeps only weak references
        task.add_done_callback(self._begun.discard)
        await asyncio.shield(task)

    async def _rotate(self, overlap_seconds: int) -> None:
        async with self._changing:
            now = self._controller.clock.unix()
            until_ms = int(1000 * (now + overlap_seconds))
            await asyncio.to_thread(self._keys.authorities.rotate, now, until_ms)
            sha256 = self._keys.authorities.now.issuing.sha256
            await self._announce("ca.rotated", f"members move to the certificate authority {sha256}")

    async def _retire_unless_needed(self, *, force: bool) -> None:
        async with self._changing:
            waiting = self.view().waiting
            if waiting and not force:
                raise InvalidTransition(
                    f"members still have certificates of the old authority only: {', '.join(waiting)}",
                    "wait until they were here, or retire it with --force: each of them then needs a new token",
                )
            await self._retire()

    async def _retire(self) -> None:
        old = self._keys.authorities.now.serving.sha256
        await asyncio.to_thread(self._keys.authorities.retire, self._controller.clock.unix())
        await self._announce("ca.retired", f"certificates of the authority {old} are refused from now on")

    async def _announce(self, kind: str, message: str) -> None:
        """Make servers, operator and members follow the change that is already on disk."""
        await self._take_over()
        self._keys.announce()

        def log_event(state: State, now: StepTime) -> Step[None]:
            draft = Draft(state, now)
            draft.event(kind, "", "", message)
            return draft.done(None)

        try:
            await self._controller.do(log_event)
        except AtollError as error:  # the change is on disk and in force
            _log.error("an event is not in the log", kind=kind, message=message, error=str(error))

    def _may_return(self, state: State, node: Node) -> bool:
        """True unless the node is banned or its certificate has expired while it was away."""
        live = state.live.get(node.peer_id)
        contact_ms = max(node.enrolled_ms, node.last_seen_ms)
        since_ms = self._controller.moment().unix_ms - contact_ms
        connected = live is not None and live.connected
        return not node.banned and (connected or since_ms < 1000 * LEAF_LIFETIME.total_seconds())
