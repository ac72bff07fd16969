"""Answers to the coordinator's requests for committed rounds: manifests from this node's disk.

The coordinator asks one node at a time for rounds that no opener reported to it. The manifests are on disk, so a
restart of the node or of the coordinator loses none. The coordinator repeats a request whose answer is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.core import log
from atoll.core.errors import DataDirUnusable
from atoll.node.state.manifests import ManifestStore
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.v1 import membership_pb2 as mb

MAX_MANIFESTS = 32  # in one answer
MAX_ANSWER_BYTES = 1 << 20

_log = log.get("coordinator")


class ManifestAnswers:
    """Reads manifests for the coordinator; the next heartbeat carries the answer."""

    def __init__(self, store: ManifestStore, send_heartbeat_now: Callable[[], None]) -> None:
        self._store = store
        self._send_heartbeat_now = send_heartbeat_now
        self._answer: mb.ManifestAnswer | None = None
        self._tasks = BackgroundTasks()

    def ask(self, request: mb.ManifestRequest) -> None:
        """Begin to read; a new request replaces an earlier one."""
        self._tasks.begin(self._read(request))

    def take(self) -> mb.ManifestAnswer | None:
        """Return the finished answer, once; None if there is none."""
        answer, self._answer = self._answer, None
        return answer

    async def close(self) -> None:
        """Stop reading."""
        await self._tasks.stop()

    async def _read(self, request: mb.ManifestRequest) -> None:
        count, answer = min(request.count, MAX_MANIFESTS), mb.ManifestAnswer(first=request.first)
        try:
            found = await asyncio.to_thread(self._store.consecutive, request.first, count, MAX_ANSWER_BYTES)
            answer.manifests.extend(found)
        except DataDirUnusable as error:  # the empty answer lets the coordinator ask another node at once
            _log.warning("manifests not sent", first=request.first, reason=str(error))
        self._answer = answer
        self._send_heartbeat_now()
