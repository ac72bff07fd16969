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
from atoll.node.state.fetch_scheduler import Ledger
from atoll.node.state.pieces import Piece, Workspace
from atoll.node.state.state_client import Conversation
from atoll.node.wire.transport import Network

_log = log.get("catchup")


@dataclass(frozen=True)
class FetchPolicy:
    """How a fetch treats its donors. A donor that delivers less than a chunk per `answer` is given up."""

    chunk_elements: int = 1 << 16  # 256 KiB of fp32
    pipelined: int = 32  # questions on the wire to one donor, at most
    patience: timedelta = timedelta(seconds=3)  # then others take over what a silent donor was asked for
    answer: timedelta = timedelta(seconds=15)  # for every answer
    failures: int = 8  # in a row and without a chunk between them; a deadline that passed counts three times
    pause: timedelta = timedelta(milliseconds=50)  # after the first failure; doubles up to a second
    rest: timedelta | None = timedelta(minutes=1)  # for what is missing once half of the donors went on; None: no end
    restarts: int = 6  # in a row when the donors' head moved on meanwhile, and no more is here than before


@dataclass(frozen=True)
class Wanted:
    """A state by the hash of its manifest's payload."""

    run_id: str
    hash: bytes
    pieces: tuple[Piece, ...]


class StateMoved(NotFound):
    """The donors that are left do not hold that state any more: they went on to another."""


async def fetch_state(
    network: Network,
    donors: Sequence[str],
    wanted: Wanted,
    workspace: Workspace,
    policy: FetchPolicy,
    begun: dict[str, Conversation] | None = None,
    held: Mapping[str, tuple[range, ...]] | None = None,
) -> None:
    """Fill `workspace` with the true bytes of every wanted piece that it does not have.

    `held` are the layers of those donors that do not hold all. Conversations that were `begun` with donors are taken
    out and gone on with: a new connection takes some round trips and starts slowly. Ends by itself: every answer has a
    deadline, a donor that lied or failed too often is not asked again, and once the head moved on for some and no more
    than half of the donors are left, these have `policy.rest`. Raises `StateMoved`, or `Unreachable` naming what became
    of each donor; pieces that were verified stay in `workspace`.
    """
    await _Fetch(network, donors, wanted, workspace, policy, {} if begun is None else begun, held or {}).run()


class _Fetch:
    def __init__(
        self,
        network: Network,
        donors: Sequence[str],
        wanted: Wanted,
        workspace: Workspace,
        policy: FetchPolicy,
        begun: dict[str, Conversation],
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
            workspace.forget(piece)  # of another head: who goes back to that one must not find half of this
        self._ledger = Ledger(self._pieces, policy.chunk_elements, donors, held)
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        self._checks: set[asyncio.Task[None]] = set()
        self._moved = False
        self._deadline = math.inf  # set once few donors are left because the head moved on

    async def run(self) -> None:
        workers = [asyncio.create_task(self._ask_while_useful(donor)) for donor in self._donors]
        try:
            while not self._ledger.finished:
                nobody = all(worker.done() for worker in workers) or self._ledger.is_short
                if (nobody or self._loop.time() >= self._deadline) and not self._checks:
                    break
                await self._hear(self._policy.patience / 4)
                if self._ledger.release_slow(self._loop.time(), self._policy.patience.total_seconds()):
                    self._tell()
        finally:
            for task in [*workers, *self._checks]:
                task.cancel()
            results = await asyncio.gather(*workers, *self._checks, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result
        if self._ledger.finished:
            return
        became = dict.fromkeys(self._donors, "still asked") | self._ledger.reasons
        reasons = "; ".join(f"{donor}: {reason}" for donor, reason in sorted(became.items()))
        error = StateMoved if self._moved or self._ledger.is_short else Unreachable
        raise error(f"nobody gave the whole state with its true digests ({reasons or 'no donor'})")

    # --- one donor -------------------------------------------------------------------------------------

    async def _ask_while_useful(self, donor: str) -> None:
        failures = 0
        while self._ledger.asks(donor):
            before = self._ledger.delivered(donor)
            try:
                await self._converse(donor)
            except NotFound as error:
                self._moved = True
                self._ledger.give_up(donor, str(error))
            except (Unreachable, Busy) as error:
                self._ledger.left(donor)
                failures = 0 if self._ledger.delivered(donor) > before else failures
                failures += 3 if isinstance(error, DeadlineExceeded) else 1
                if failures >= self._policy.failures:
                    self._ledger.give_up(donor, str(error))
            except AtollError as error:  # it answered with something else than it was asked for, or refused
                self._ledger.give_up(donor, str(error))
            self._limit_the_rest()
            self._tell()
            if self._ledger.asks(donor):
                await asyncio.sleep(min(1.0, self._policy.pause.total_seconds() * 2**failures))
        _log.warning("donor given up", peer=donor, reason=self._ledger.reasons[donor])

    def _limit_the_rest(self) -> None:
        """Who is left when the others went on may drip for days, while all of them would give the new head."""
        left = sum(self._ledger.asks(donor) for donor in self._donors)
        rest = self._policy.rest
        if self._moved and rest is not None and 2 * left <= len(self._donors):
            self._deadline = min(self._deadline, self._loop.time() + rest.total_seconds())

    async def _converse(self, donor: str) -> None:
        """Ask for chunk after chunk; returns when the donor is found out to lie."""
        ledger, policy = self._ledger, self._policy
        conversation = self._begun.pop(donor, None)
        if conversation is None:
            conversation = await Conversation.begin(self._network, donor, self._wanted.run_id, policy.answer)
        conversation.timeout = policy.answer
        try:
            ledger.join(donor)
            while ledger.asks(donor):
                while ledger.may_ask(donor, policy.pipelined):
                    chunk = ledger.take(donor, self._loop.time())
                    if chunk is None:
                        break
                    kind = self._pieces[chunk.piece].kind
                    await conversation.ask(kind, self._wanted.hash, chunk.start, chunk.end)
                expected = ledger.expected(donor)
                if expected is None:
                    await self._hear(policy.patience)
                    continue
                body = await conversation.answer(expected.end - expected.start)
                if ledger.asks(donor) and ledger.arrived(donor, self._loop.time()):
                    kind = self._pieces[expected.piece].kind
                    self._workspace.bytes_of(kind, expected.start, expected.end)[:] = body
                    self._check_if_whole(expected.piece)
                self._tell()
        finally:
            await conversation.close()

    # --- pieces ------------------------------------------------------------------------------------------

    def _check_if_whole(self, number: int) -> None:
        if self._ledger.to_check(number):
            task = asyncio.create_task(self._check(number))
            self._checks.add(task)
            task.add_done_callback(self._checks.discard)

    async def _check(self, number: int) -> None:
        piece = self._pieces[number]
        true = await asyncio.to_thread(self._workspace.digest_of, piece.kind, piece.start, piece.end) == piece.digest
        chunks = self._ledger.chunks_to_hash(number, true)
        digests = [
            await asyncio.to_thread(self._workspace.digest_of, piece.kind, chunk.start, chunk.end) for chunk in chunks
        ]
        if true:
            self._workspace.confirm(piece)
        self._ledger.checked(number, true, digests)
        self._tell()

    # --- small words -------------------------------------------------------------------------------------

    def _tell(self) -> None:
        """Wake everybody who waits for something to change."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _hear(self, timeout: timedelta) -> None:
        news = self._news
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                await news.wait()
