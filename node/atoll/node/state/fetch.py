"""Fetch state from many donors at once and verify every piece.

One task per donor keeps requests in flight on a `StateClient` stream and writes the answers into a `Workspace`.
`FetchScheduler` decides what to request from which donor. A complete piece is hashed in a thread: if its digest
matches, it is verified. Otherwise the scheduler fetches it again and finds the donor that sent wrong bytes.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

from atoll.core import log
from atoll.core.errors import AtollError, Busy, DeadlineExceeded, NotFound, Unreachable
from atoll.node.state.fetch_scheduler import FetchScheduler
from atoll.node.state.pieces import Piece, Workspace
from atoll.node.state.state_client import StateClient
from atoll.node.wire.transport import Network

_log = log.get("catchup")


@dataclass(frozen=True)
class FetchPolicy:
    """Limits and timeouts of a fetch."""

    chunk_elements: int = 1 << 16  # of one request: 256 KiB of fp32
    max_requests_in_flight: int = 32  # per donor
    slow_after: timedelta = timedelta(seconds=3)  # after which other donors take over the requests of a silent donor
    answer_timeout: timedelta = timedelta(seconds=15)  # timeout of each answer
    max_failures: int = 8  # in a row without a chunk, before the donor is dropped; a timeout counts as three
    pause: timedelta = timedelta(milliseconds=50)  # after the first failure; doubles up to a second
    # for the missing pieces, once half of the donors are gone and some have moved on; None: unlimited
    stragglers_timeout: timedelta | None = timedelta(minutes=1)
    max_restarts: int = 6  # in a row because the head moved on, without progress between them


@dataclass(frozen=True)
class FetchTarget:
    """The pieces to fetch of one state."""

    run_id: str
    hash: bytes  # of the payload of the state's manifest
    pieces: tuple[Piece, ...]


class StateMoved(NotFound):
    """The remaining donors no longer hold the wanted state: they moved on to another head."""


async def fetch_state(
    network: Network,
    donors: Sequence[str],
    wanted: FetchTarget,
    workspace: Workspace,
    policy: FetchPolicy,
    begun: dict[str, StateClient] | None = None,
    held: Mapping[str, tuple[range, ...]] | None = None,
) -> None:
    """Fill `workspace` with verified bytes of every wanted piece that it lacks.

    `held` maps a donor to its layers; a donor that is not in the mapping holds all. `begun`: donor → open client. These
    clients are removed and reused, because a new connection costs round trips and starts slowly.

    The fetch always ends. Every answer has a deadline. A donor that sent wrong bytes or failed too often is dropped.
    Once a donor has moved to another head and at most half of the donors remain, the fetch ends after
    `policy.stragglers_timeout`. Raises `StateMoved`, or `Unreachable` with a reason per donor; verified pieces stay in
    `workspace`.
    """
    await _Fetch(network, donors, wanted, workspace, policy, {} if begun is None else begun, held or {}).run()


class _Fetch:
    def __init__(
        self,
        network: Network,
        donors: Sequence[str],
        wanted: FetchTarget,
        workspace: Workspace,
        policy: FetchPolicy,
        begun: dict[str, StateClient],
        held: Mapping[str, tuple[range, ...]],
    ) -> None:
        self._network = network
        self._donors = donors
        self._wanted = wanted
        self._workspace = workspace
        self._policy = policy
        self._begun = begun
        self._pieces = [piece for piece in wanted.pieces if not workspace.has(piece)]
        for piece in self._pieces:
            # the workspace may have this piece of another head: a fetch that returns to it must not reuse mixed bytes
            workspace.mark_unverified(piece)
        self._scheduler = FetchScheduler(self._pieces, policy.chunk_elements, donors, held)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()  # replaced by `_notify_change`
        self._checks: set[asyncio.Task[None]] = set()
        self._moved = False
        self._deadline = math.inf  # set by `_limit_stragglers`

    async def run(self) -> None:
        workers = [asyncio.create_task(self._run_donor(donor)) for donor in self._donors]
        try:
            while not self._scheduler.finished:
                stuck = all(worker.done() for worker in workers) or self._scheduler.lacks_holders
                if (stuck or self._loop.time() >= self._deadline) and not self._checks:
                    break
                await self._wait_for_change(self._policy.slow_after / 4)
                if self._scheduler.release_slow(self._loop.time(), self._policy.slow_after.total_seconds()):
                    self._notify_change()
        finally:
            for task in [*workers, *self._checks]:
                task.cancel()
            results = await asyncio.gather(*workers, *self._checks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if self._scheduler.finished:
            return
        outcomes = dict.fromkeys(self._donors, "still connected") | self._scheduler.reasons
        reasons = "; ".join(f"{donor}: {reason}" for donor, reason in sorted(outcomes.items()))
        error = StateMoved if self._moved or self._scheduler.lacks_holders else Unreachable
        raise error(f"no donor sent the complete state with matching digests ({reasons or 'no donors'})")

    # --- one donor -------------------------------------------------------------------------------------

    async def _run_donor(self, donor: str) -> None:
        failures = 0
        while self._scheduler.is_active(donor):
            before = self._scheduler.delivered(donor)
            try:
                await self._fetch_from(donor)
            except NotFound as error:
                self._moved = True
                self._scheduler.give_up(donor, str(error))
            except (Unreachable, Busy) as error:
                self._scheduler.disconnected(donor)
                failures = 0 if self._scheduler.delivered(donor) > before else failures
                failures += 3 if isinstance(error, DeadlineExceeded) else 1
                if failures >= self._policy.max_failures:
                    self._scheduler.give_up(donor, str(error))
            except AtollError as error:  # it refused, or its answer did not fit the request
                self._scheduler.give_up(donor, str(error))
            self._limit_stragglers()
            self._notify_change()
            if self._scheduler.is_active(donor):
                await asyncio.sleep(min(1.0, self._policy.pause.total_seconds() * 2**failures))
        _log.warning("donor dropped", peer=donor, reason=self._scheduler.reasons[donor])

    def _limit_stragglers(self) -> None:
        """Set a deadline once most donors have a newer head: the others may be very slow, and the new head is there."""
        left = sum(self._scheduler.is_active(donor) for donor in self._donors)
        stragglers_timeout = self._policy.stragglers_timeout
        if self._moved and stragglers_timeout is not None and 2 * left <= len(self._donors):
            self._deadline = min(self._deadline, self._loop.time() + stragglers_timeout.total_seconds())

    async def _fetch_from(self, donor: str) -> None:
        """Request chunk after chunk; returns once the scheduler drops the donor."""
        scheduler, policy = self._scheduler, self._policy
        client = self._begun.pop(donor, None)
        if client is None:
            client = await StateClient.connect(self._network, donor, self._wanted.run_id, policy.answer_timeout)
        client.timeout = policy.answer_timeout
        try:
            scheduler.connected(donor)
            while scheduler.is_active(donor):
                while scheduler.may_ask(donor, policy.max_requests_in_flight):
                    chunk = scheduler.next_chunk(donor, self._loop.time())
                    if chunk is None:
                        break
                    kind = self._pieces[chunk.piece].kind
                    await client.request_slice(kind, self._wanted.hash, chunk.start, chunk.end)
                expected = scheduler.expected(donor)
                if expected is None:
                    await self._wait_for_change(policy.slow_after)
                    continue
                body = await client.receive_slice(expected.end - expected.start)
                if scheduler.is_active(donor) and scheduler.on_answer(donor, self._loop.time()):
                    kind = self._pieces[expected.piece].kind
                    self._workspace.bytes_of(kind, expected.start, expected.end)[:] = body
                    self._check_if_complete(expected.piece)
                self._notify_change()
        finally:
            await client.close()

    # --- pieces ------------------------------------------------------------------------------------------

    def _check_if_complete(self, number: int) -> None:
        if self._scheduler.is_complete(number):
            task = asyncio.create_task(self._check(number))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def _check(self, number: int) -> None:
        piece = self._pieces[number]
        digest = await asyncio.to_thread(self._workspace.digest_of, piece.kind, piece.start, piece.end)
        valid = digest == piece.digest
        chunks = self._scheduler.chunks_to_hash(number, valid)
        digests = [
            await asyncio.to_thread(self._workspace.digest_of, piece.kind, chunk.start, chunk.end) for chunk in chunks
        ]
        if valid:
            self._workspace.mark_verified(piece)
        self._scheduler.on_checked(number, valid, digests)
        self._notify_change()

    # --- waiting -----------------------------------------------------------------------------------------

    def _notify_change(self) -> None:
        """Wake all tasks in `_wait_for_change`."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _wait_for_change(self, timeout: timedelta) -> None:
        changed = self._changed
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await changed.wait()
