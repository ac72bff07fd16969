"""Our share of everyone's vector: take the parts of all contributors, sum, send the averages back to all.

Each contributor has an inlet; a part is summed when every inlet gave its values or is closed. An inlet closes when its
peer ends the stream, sends something that is no part, or is silent for `stall`, and the sums go on without it: the
weights are normalised over those that are there. So a dead contributor costs `stall` once, never the round. A frame
that waits in an inlet has arrived; while our own sums lag, nobody is called silent.

Somebody who drips one part per stall would still hold everyone up. From half-time on, a contributor for whom most
others' inlets are full and waiting is given up too. Where all are slow alike, nobody is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta

import torch
from torch import Tensor

from atoll.core import log
from atoll.core.errors import DeadlineExceeded, PartInvalid, Unreachable, first_error
from atoll.core.frames import Frame, FrameKind
from atoll.node.exchange.averaged_parts import Average
from atoll.node.exchange.codecs import CheckedPart
from atoll.node.exchange.partition import Part, ReducerShare
from atoll.node.exchange.peer_deadlines import WAIT_SLICES, next_frame, wait_for_event
from atoll.node.exchange.screening import Screen
from atoll.node.exchange.weighted_sum import PieceSource, encoded_mean, screening_factors, tensor_source, token_weight
from atoll.node.wire.transport import Stream
from atoll.v1 import manifest_pb2

_READ_AHEAD = 2  # parts of a contributor that wait while earlier ones are summed
_HALF_TIME = 0.5
_NO_DEADLINE = timedelta(days=1)  # the end of the exchange cancels the wait

_log = log.get("exchange")


class ContributorQueue:
    """Parts of one contributor, checked and in order, until it has given all or is given up."""

    def __init__(self, peer: str, parts: int) -> None:
        self.peer = peer
        self.open = True
        self.first_frame_seen = asyncio.Event()  # a first frame came, or none is expected any more
        self._due = parts
        self._room = asyncio.Semaphore(_READ_AHEAD)
        self._waiting: asyncio.Queue[CheckedPart | None] = asyncio.Queue()
        self._dry = False

    async def put(self, given: CheckedPart) -> None:
        """Add the next part; waits while earlier ones are not summed."""
        await self._room.acquire()
        if self.open:
            self._due -= 1
            self._waiting.put_nowait(given)

    async def next(self) -> CheckedPart | None:
        """The next part; None once the contributor is given up."""
        if self._dry:
            return None
        given = await self._waiting.get()
        self._dry = given is None
        self._room.release()
        return given

    @property
    def full(self) -> bool:
        """Whether its peer is ahead of the sums and has to wait."""
        return self._waiting.qsize() >= _READ_AHEAD

    def close(self) -> bool:
        """Expect nothing more. Whether anything was missing still; parts that came are still summed."""
        missing = self.open and self._due > 0
        self.open = False
        self.first_frame_seen.set()
        if missing:
            self._waiting.put_nowait(None)
            self._room.release()
        return missing


class Reducer:
    """One exchange's sums on one member."""

    def __init__(
        self,
        me: str,
        weights: Mapping[str, int],
        share: ReducerShare,
        contribution_E: Tensor,
        average: Average,
        stall: timedelta,
        *,
        screen: Screen | None,
        weigh: Callable[[int], int] = token_weight,
    ) -> None:
        """`weights` are tokens, `weigh` says how much so many weigh.

        `screen` of None: nobody is judged.
        """
        self.partial: set[str] = set()  # contributors that a sum lacks
        self.given_up: set[str] = set()
        self._me = me
        self._weights = weights  # in the order of the sum
        self._share = share
        self._contribution_E = contribution_E
        self._average = average
        self._stall = stall
        self._screen = screen
        self._weigh = weigh
        self._places = {peer: place for place, peer in enumerate(weights)}
        self._left_out: Counter[int] = Counter()  # parts, by contributor
        self._scaled: Counter[int] = Counter()
        count = len(share.parts)
        self._queues = {
            peer: ContributorQueue(peer, count) for peer, weight in weights.items() if weight and peer != me
        }
        self._finished = [asyncio.Event() for _ in share.parts]  # averaged, or never will be

    @property
    def verdicts(self) -> tuple[manifest_pb2.Verdict, ...]:
        """What screening did so far, ordered by contributor."""
        judged = sorted(self._left_out.keys() | self._scaled.keys())
        return tuple(
            manifest_pb2.Verdict(
                reducer=self._places[self._me],
                contributor=place,
                parts_left_out=self._left_out[place],
                parts_scaled=self._scaled[place],
            )
            for place in judged
        )

    async def run(self, timeout: timedelta) -> None:
        """Average every part. Only our own bugs and cancellation raise."""
        half_time = asyncio.get_running_loop().time() + _HALF_TIME * timeout.total_seconds()
        async with asyncio.TaskGroup() as tasks:
            for queue in self._queues.values():
                tasks.create_task(self._await_first_frame(queue))
            for part, finished in zip(self._share.parts, self._finished, strict=True):
                values = await self._collect(part, half_time)
                await self._average_part(part, values)
                finished.set()

    def close(self) -> None:
        """What is not averaged by now never will be; those who wait for it are told so."""
        for queue in self._queues.values():
            queue.close()
        for finished in self._finished:
            finished.set()

    def forget_contribution(self) -> None:
        """After `run`: our own values are not needed any more."""
        self._contribution_E = torch.empty(0)

    async def serve_contributor(self, stream: Stream) -> None:
        """Take one member's parts and give it the averages, until it closes the stream. Raises `PeerMisbehaved`."""
        queue = self._queues.get(stream.peer_id)
        why = "the exchange ended"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_parts(stream, queue))
                tasks.create_task(self._send_averages(stream))
        except ExceptionGroup as group:
            error = first_error(group)
            why = str(error)
            if not isinstance(error, Unreachable):
                raise error from group
        finally:
            if queue is not None:
                self._give_up(queue, why)

    # --- in ------------------------------------------------------------------------------------------

    async def _await_first_frame(self, queue: ContributorQueue) -> None:
        """From the beginning a first part is due, also of somebody whose stream has not come."""
        if not await wait_for_event(queue.first_frame_seen, self._stall):
            self._give_up(queue, f"it sent nothing within {self._stall}")

    async def _receive_parts(self, stream: Stream, queue: ContributorQueue | None) -> None:
        """Read to the end of the stream; what comes after giving up is thrown away, so that averages still flow."""
        for part in self._share.parts if queue is not None else ():
            assert queue is not None
            frame = await self._frame(stream, queue)
            queue.first_frame_seen.set()
            self._average.check(frame, self._share.first + part.index, queue.peer, number_in_stream=part.index)
            if queue.open:
                await queue.put(self._average.open(frame.body, part))
        await next_frame(stream, _NO_DEADLINE)
        raise PartInvalid(f"{stream.peer_id} sent more parts than are due")

    async def _frame(self, stream: Stream, queue: ContributorQueue) -> Frame:
        if queue.open:
            try:
                return await next_frame(stream, self._stall)
            except DeadlineExceeded as error:
                self._give_up(queue, str(error))
        return await next_frame(stream, _NO_DEADLINE)

    async def _send_averages(self, stream: Stream) -> None:
        """Send the averages as they come, an empty body for what has none."""
        for part, finished in zip(self._share.parts, self._finished, strict=True):
            await finished.wait()
            index = self._share.first + part.index
            body = self._average.body(index) or b""
            await stream.send(FrameKind.PART, self._average.header(index, part.index), body)

    def _give_up(self, queue: ContributorQueue, why: str) -> None:
        if queue.close():
            self.given_up.add(queue.peer)
            _log.info("contributor given up", peer=queue.peer, reason=why)

    # --- sums ----------------------------------------------------------------------------------------

    async def _collect(self, part: Part, half_time: float) -> dict[str, PieceSource]:
        """Values of this part from everybody who gives them."""
        values: dict[str, PieceSource] = {}
        for peer, queue in self._queues.items():
            given = await self._next_values(queue, half_time)
            if given is not None:
                values[peer] = given.decode_into
        if self._weights[self._me]:
            values[self._me] = tensor_source(self._contribution_E[part.start : part.end])
        return values

    async def _next_values(self, queue: ContributorQueue, half_time: float) -> CheckedPart | None:
        loop = asyncio.get_running_loop()
        grace = (self._stall / WAIT_SLICES).total_seconds()
        while True:
            try:
                async with asyncio.timeout_at(max(half_time, loop.time() + grace)):
                    return await queue.next()
            except TimeoutError:
                others = [other for other in self._queues.values() if other.open and other is not queue]
                if others and 2 * sum(other.full for other in others) >= len(others):
                    self._give_up(queue, "it holds the others up")

    async def _average_part(self, part: Part, values: Mapping[str, PieceSource]) -> None:
        if not values:
            self.partial |= self._queues.keys()
            return
        try:
            index = self._share.first + part.index
            factors = await self._average.compute_part(index, lambda: self._encode_mean(part.elements, values))
            self.partial |= self._queues.keys() - values.keys()
            self._left_out.update(self._places[peer] for peer, factor in factors.items() if factor == 0)
            self._scaled.update(self._places[peer] for peer, factor in factors.items() if 0 < factor < 1)
        except PartInvalid as error:
            # finite values whose mean is not: nobody in particular is to blame, and nobody gets this part
            _log.warning("part without an average", part=part.index, reason=str(error))

    def _encode_mean(self, elements: int, values: Mapping[str, PieceSource]) -> tuple[memoryview, dict[str, float]]:
        """The bytes of the average, the same for everybody, and what of each contribution is in it."""
        present = [peer for peer in self._weights if peer in values]  # in the order of the members
        sources, tokens = [values[peer] for peer in present], [self._weights[peer] for peer in present]
        factors = (1.0,) * len(present)
        if self._screen is not None:
            factors = screening_factors(sources, tokens, elements, self._screen)
        body = encoded_mean(self._average.codec, sources, [self._weigh(it) for it in tokens], factors, elements)
        return body, dict(zip(present, factors, strict=True))
