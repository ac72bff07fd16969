"""Fetching state from many donors at once, every piece verified. The bookkeeping is in `ledger`."""

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
    """How a fetch treats its donors. A donor that delivers less than a chunk per `answer` is given up."""

    chunk_elements: int = 1 << 16  # 256 KiB of fp32
    max_requests_in_flight: int = 32  # questions on the wire to one donor, at most
    slow_after: timedelta = timedelta(seconds=3)  # then others take over what a silent donor was asked for
    answer: timedelta = timedelta(seconds=15)  # for every answer
    failures: int = 8  # in a row and without a chunk between them; a deadline that passed counts three times
    pause: timedelta = timedelta(milliseconds=50)  # after the first failure; doubles up to a second
    stragglers_timeout: timedelta | None = timedelta(
        minutes=1
    )  # for what is missing once half of the donors went on; None: no end
    restarts: int = 6  # in a row when the donors' head moved on meanwhile, and no more is here than before


@dataclass(frozen=True)
class FetchTarget:
    """A state by the hash of its manifest's payload."""

    run_id: str
    hash: bytes
    pieces: tuple[Piece, ...]


class StateMoved(NotFound):
    """The donors that are left do not hold that state any more: they went on to another."""


async def fetch_state(
    network: Network,
    donors: Sequence[str],
    wanted: FetchTarget,
    workspace: Workspace,
    policy: FetchPolicy,
    begun: dict[str, StateClient] | None = None,
    held: Mapping[str, tuple[range, ...]] | None = None,
) -> None:
    """Fill `workspace` with the true bytes of every wanted piece that it does not have.

    `held` are the layers of those donors that do not hold all. Conversations that were `begun` with donors are taken
    out and gone on with: a new connection takes some round trips and starts slowly. Ends by itself: every answer has a
    deadline, a donor that lied or failed too often is not asked again, and once the head moved on for some and no more
    than half of the donors are left, these have `policy.stragglers_timeout`. Raises `StateMoved`, or `Unreachable`
    naming what became of each donor; pieces that were verified stay in `workspace`.
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
            workspace.mark_unverified(piece)  # of another head: who goes back to that one must not find half of this
        self._scheduler = FetchScheduler(self._pieces, policy.chunk_elements, donors, held)
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._checks: set[asyncio.Task[None]] = set()
        self._moved = False
        self._deadline = math.inf  # set once few donors are left because the head moved on

    async def run(self) -> None:
        workers = [asyncio.create_task(self._run_donor(donor)) for donor in self._donors]
        try:
            while not self._scheduler.finished:
                nobody = all(worker.done() for worker in workers) or self._scheduler.lacks_holders
                if (nobody or self._loop.time() >= self._deadline) and not self._checks:
                    break
                await self._wait_for_change(self._policy.slow_after / 4)
                if self._scheduler.release_slow(self._loop.time(), self._policy.slow_after.total_seconds()):
                    self._tell()
        finally:
            for task in [*workers, *self._checks]:
                task.cancel()
            results = await asyncio.gather(*workers, *self._checks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if self._scheduler.finished:
            return
        became = dict.fromkeys(self._donors, "still asked") | self._scheduler.reasons
        reasons = "; ".join(f"{donor}: {reason}" for donor, reason in sorted(became.items()))
        error = StateMoved if self._moved or self._scheduler.lacks_holders else Unreachable
        raise error(f"nobody gave the whole state with its true digests ({reasons or 'no donor'})")

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
                self._scheduler.left(donor)
                failures = 0 if self._scheduler.delivered(donor) > before else failures
                failures += 3 if isinstance(error, DeadlineExceeded) else 1
                if failures >= self._policy.failures:
                    self._scheduler.give_up(donor, str(error))
            except AtollError as error:  # it answered with something else than it was asked for, or refused
                self._scheduler.give_up(donor, str(error))
            self._limit_stragglers()
            self._tell()
            if self._scheduler.is_active(donor):
                await asyncio.sleep(min(1.0, self._policy.pause.total_seconds() * 2**failures))
        _log.warning("donor given up", peer=donor, reason=self._scheduler.reasons[donor])

    def _limit_stragglers(self) -> None:
        """Who is left when the others went on may drip for days, while all of them would give the new head."""
        left = sum(self._scheduler.is_active(donor) for donor in self._donors)
        stragglers_timeout = self._policy.stragglers_timeout
        if self._moved and stragglers_timeout is not None and 2 * left <= len(self._donors):
            self._deadline = min(self._deadline, self._loop.time() + stragglers_timeout.total_seconds())

    async def _fetch_from(self, donor: str) -> None:
        """Ask for chunk after chunk; returns when the donor is found out to lie."""
        ledger, policy = self._scheduler, self._policy
        conversation = self._begun.pop(donor, None)
        if conversation is None:
            conversation = await StateClient.connect(self._network, donor, self._wanted.run_id, policy.answer)
        conversation.timeout = policy.answer
        try:
            ledger.join(donor)
            while ledger.is_active(donor):
                while ledger.may_ask(donor, policy.max_requests_in_flight):
                    chunk = ledger.next_chunk(donor, self._loop.time())
                    if chunk is None:
                        break
                    kind = self._pieces[chunk.piece].kind
                    await conversation.request_slice(kind, self._wanted.hash, chunk.start, chunk.end)
                expected = ledger.expected(donor)
                if expected is None:
                    await self._wait_for_change(policy.slow_after)
                    continue
                body = await conversation.answer(expected.end - expected.start)
                if ledger.is_active(donor) and ledger.on_answer(donor, self._loop.time()):
                    kind = self._pieces[expected.piece].kind
                    self._workspace.bytes_of(kind, expected.start, expected.end)[:] = body
                    self._check_if_whole(expected.piece)
                self._tell()
        finally:
            await conversation.close()

    # --- pieces ------------------------------------------------------------------------------------------

    def _check_if_whole(self, number: int) -> None:
        if self._scheduler.is_complete(number):
            task = asyncio.create_task(self._check(number))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def _check(self, number: int) -> None:
        piece = self._pieces[number]
        true = await asyncio.to_thread(self._workspace.digest_of, piece.kind, piece.start, piece.end) == piece.digest
        chunks = self._scheduler.chunks_to_hash(number, true)
        digests = [
            await asyncio.to_thread(self._workspace.digest_of, piece.kind, chunk.start, chunk.end) for chunk in chunks
        ]
        if true:
            self._workspace.mark_verified(piece)
        self._scheduler.on_checked(number, true, digests)
        self._tell()

    # --- small words -------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Wake everybody who waits for something to change."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _wait_for_change(self, timeout: timedelta) -> None:
        news = self._news
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await news.wait()
