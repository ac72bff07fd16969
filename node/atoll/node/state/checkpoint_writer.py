"""Decide when to write checkpoints: once per interval, when the operator orders it, and when the node leaves.

The commit time in the manifest decides which rounds are due, so all nodes write the same rounds. Checkpoints of nodes
that each hold some layers then fit together. A wrong clock changes little: no node writes more than four times in an
interval, or less than once in two intervals. A state with the only copy of some layers is due at every round, because
it would be lost with this process. The store keeps the newest two of such extra rounds.

Rounds never wait for the disk. A due state is copied and written in a thread. If a commit changes the state during the
copy, the digests do not match; the write is skipped and the next round is offered. A failing disk logs a warning; the
write is tried again later.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, CheckpointCorrupt, DeadlineExceeded
from atoll.core.manifest import Head
from atoll.node.state.checkpoint import Checkpoint, CheckpointState, CheckpointStore
from atoll.node.state.tensor_file import LayerLayout
from atoll.v1 import membership_pb2 as mb

MAX_REPORTED_CHECKPOINTS = 64  # the coordinator accepts no more per node

_log = log.get("checkpoint")


class CheckpointWriter:
    """Writes the states that a session offers, one at a time."""

    def __init__(
        self,
        store: CheckpointStore,
        interval: timedelta,
        clock: Clock,
        kept_rounds: Callable[[], Collection[int]] = tuple,
    ) -> None:
        """`kept_rounds` returns old rounds that must stay on disk, because forks of the run begin with them."""
        self.store = store
        self._kept_rounds = kept_rounds
        self.problem = ""  # why the last write failed, shown to the operator; empty: it succeeded
        self._interval = interval
        self._clock = clock
        self._held: tuple[mb.CheckpointInfo, ...] = ()
        self._written_at = -math.inf  # when the last interval's write began, by the monotonic clock
        self._slot = -1  # of the last round written for its interval, as a number of intervals since 1970
        self._interval_round = 0  # that round
        self._background: asyncio.Task[None] | None = None
        self._writing = 0  # the round that is being written; 0: none
        self._waiting: CheckpointState | None = None  # written next, after the current write
        self._extra_rounds: set[int] = set()  # written because no other node has them, or by order
        self._ordered = 0  # the operator wants a checkpoint of this round or a newer one; 0: no order
        self._tried = (0, 0)  # the last order that was tried, and the round of the state that was used

    def held(self) -> tuple[mb.CheckpointInfo, ...]:
        """The newest checkpoints on disk, newest first; a new object after every change."""
        return self._held

    async def restore(self, layers: LayerLayout) -> Checkpoint | None:
        """Remove unfinished writes, then read the newest checkpoint of this model. Raises `DataDirUnusable`."""
        await asyncio.to_thread(self.store.sweep)
        found = await asyncio.to_thread(self.store.newest, layers)
        self._held = await self._newest_held()
        if found is not None:
            _log.info("checkpoint read", round=found.head.round, path=str(self.store.path(found.head.round)))
        return found

    async def of_round(self, number: int, layers: LayerLayout) -> Checkpoint | None:
        """Read the checkpoint of one round, if it is on disk. Raises `DataDirUnusable`."""
        found = await asyncio.to_thread(self.store.of_round, number, layers)
        if found is None:
            self._held = await self._newest_held()  # the store may have set it aside
        return found

    def offer(self, state: CheckpointState, *, only_copy: bool = False) -> None:
        """Offer the state of a committed round. Starts a write if one is due and none is running; returns at once.

        A state that is the `only_copy` of some layers is always due, and so is one that fulfils an order. During
        another write it waits. Every later offer replaces the waiting state, because the later state also has the
        layers that changed before.
        """
        needed = only_copy or self._is_ordered(state.head)
        if self._background is not None:
            self._waiting = state if needed or self._waiting is not None else None
        elif needed or self._is_due(state.head):
            self._begin(state.head)
            self._background = asyncio.create_task(self._write_in_background(state))

    def order(self, number: int, state: CheckpointState | None) -> None:
        """Follow the operator's order for a checkpoint of round `number` or a newer one; 0: there is no order.

        Writes `state` at once if it is of such a round, otherwise the first such state that is offered. May be called
        repeatedly: each state is tried once.
        """
        self._ordered = number
        if state is not None and self._is_ordered(state.head):
            self.offer(state)

    def _is_ordered(self, head: Head) -> bool:
        """Whether the current order needs a checkpoint of `head` that was not tried yet.

        Checkpoints of rounds after `head` belong to a history that a recovery made void, so they do not fulfil the
        order.
        """
        written = {self._writing, *(item.round for item in self._held)}
        fulfilled = any(self._ordered <= number <= head.round for number in written)
        return 0 < self._ordered <= head.round and not fulfilled and self._tried != (self._ordered, head.round)

    def _begin(self, head: Head) -> None:
        """Record the write that begins, and whether it is its interval's write or an extra one."""
        if self._is_ordered(head):
            self._tried = (self._ordered, head.round)
        self._writing = head.round
        if self._is_due(head):
            self._slot, self._written_at = self._slot_of(head), self._clock.monotonic()
            self._interval_round = head.round
            self._extra_rounds.discard(head.round)
        elif head.round != self._interval_round:
            self._extra_rounds.add(head.round)

    def _is_due(self, head: Head) -> bool:
        """Whether `head` is the first round of an interval, by the commit time in its manifest."""
        seconds = self._interval.total_seconds()
        since = self._clock.monotonic() - self._written_at
        return since >= 2 * seconds or (self._slot_of(head) != self._slot and since >= seconds / 4)

    def _slot_of(self, head: Head) -> int:
        milliseconds = self._interval // timedelta(milliseconds=1)
        return head.manifest.committed_unix_ms // milliseconds if milliseconds else head.round

    async def flush(self, state: CheckpointState, timeout: timedelta) -> Path:
        """Write `state` durably, due or not; returns its directory.

        Raises `DeadlineExceeded`, `DataDirUnusable`, and `CheckpointCorrupt` when a round commits during the copy.
        """
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                if self._background is not None:
                    await asyncio.wait([self._background])
                return await self._write_copy(state)
        except TimeoutError as error:
            raise DeadlineExceeded(
                f"the checkpoint of round {state.head.round} was not written within {timeout.total_seconds():g} s"
            ) from error

    async def close(self) -> None:
        """Cancel the running write."""
        if self._background is not None:
            self._background.cancel()
            await asyncio.wait([self._background])

    async def _write_in_background(self, state: CheckpointState) -> None:
        try:
            await self._try_to_write(state)
            while (due := self._waiting) is not None:
                self._waiting, self._writing = None, 0
                self._begin(due.head)
                await self._try_to_write(due)
        finally:
            self._background, self._writing = None, 0

    async def _try_to_write(self, state: CheckpointState) -> None:
        try:
            await self._write_copy(state)
        except CheckpointCorrupt as error:
            self._slot, self._written_at = -1, -math.inf
            _log.warning("checkpoint skipped", reason=str(error))
        except AtollError as error:
            self.problem = str(error)
            _log.warning("checkpoint not written", reason=str(error), retry_seconds=self._interval.total_seconds())

    async def _newest_held(self) -> tuple[mb.CheckpointInfo, ...]:
        return (await asyncio.to_thread(self.store.held))[:MAX_REPORTED_CHECKPOINTS]

    async def _write_copy(self, state: CheckpointState) -> Path:
        # copy, because the next commit changes both vectors in place
        anchor_E = await asyncio.to_thread(state.anchor_E.clone)
        momentum_E = await asyncio.to_thread(state.momentum_E.clone)
        return await self._write(replace(state, anchor_E=anchor_E, momentum_E=momentum_E))

    async def _write(self, state: CheckpointState) -> Path:
        cancelled = threading.Event()
        try:
            path = await asyncio.to_thread(
                self.store.write,
                state,
                _raise_if_set(cancelled),
                frozenset(self._extra_rounds),
                frozenset(self._kept_rounds()),
            )
        except asyncio.CancelledError:
            cancelled.set()  # the thread stops before its next piece
            raise
        self.problem = ""
        self._held = await self._newest_held()
        self._extra_rounds &= {item.round for item in self._held}
        _log.info("checkpoint written", round=state.head.round, path=str(path))
        return path


def _raise_if_set(cancelled: threading.Event) -> Callable[[], None]:
    def check() -> None:
        if cancelled.is_set():
            raise DeadlineExceeded("the write was cancelled")

    return check
