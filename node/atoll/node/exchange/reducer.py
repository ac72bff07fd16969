"""The reducer: receive the parts of all contributors to this node's share, sum them, and send the averages back.

Each contributor has a queue. A part is summed once every queue gave its values or is closed. A queue closes when its
peer ends the stream, sends an invalid part, or is silent for `stall`. Then the sums continue without that contributor,
and the weights are normalised over the others. So a dead contributor costs `stall` once and never fails the round. A
frame in a queue counts as received: a contributor is not silent while this node's sums lag.

A contributor that sends one part per `stall` would still delay all others. After half of the exchange's timeout, a
contributor is dropped as well when the sums wait for it while at least half of the other queues are full. When all
are equally slow, none is dropped.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
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
from atoll.node.exchange.weighted_sum import (
    PieceSource,
    SumRules,
    encoded_mean,
    screening_factors,
    tensor_source,
    weights_in_sum,
)
from atoll.node.wire.transport import Stream
from atoll.v1 import manifest_pb2

_READ_AHEAD = 2  # parts in a contributor's queue while earlier ones are summed
_HALF_TIME = 0.5
_NO_DEADLINE = timedelta(days=1)  # the end of the exchange cancels these waits

_log = log.get("exchange")


class ContributorQueue:
    """The checked parts of one contributor in order, until it sent all of them or was dropped."""

    def __init__(self, peer: str, parts: int) -> None:
        self.peer = peer
        self.open = True
        self.first_frame_seen = asyncio.Event()  # also set when the queue closes
        self._due = parts
        self._free_slots = asyncio.Semaphore(_READ_AHEAD)
        self._waiting: asyncio.Queue[CheckedPart | None] = asyncio.Queue()
        self._exhausted = False

    async def put(self, part: CheckedPart) -> None:
        """Add the next part; waits while the queue is full."""
        await self._free_slots.acquire()
        if self.open:
            self._due -= 1
            self._waiting.put_nowait(part)

    async def next(self) -> CheckedPart | None:
        """Wait for the next part; None once the queue is closed and empty."""
        if self._exhausted:
            return None
        part = await self._waiting.get()
        self._exhausted = part is None
        self._free_slots.release()
        return part

    @property
    def full(self) -> bool:
        """Whether the contributor is ahead of the sums and has to wait."""
        return self._waiting.qsize() >= _READ_AHEAD

    def close(self) -> bool:
        """Accept no more parts; those in the queue are still summed. Returns whether any part is missing."""
        missing = self.open and self._due > 0
        self.open = False
        self.first_frame_seen.set()
        if missing:
            self._waiting.put_nowait(None)
            self._free_slots.release()
        return missing


class Reducer:
    """Sums the parts of this node's share in one exchange."""

    def __init__(
        self,
        me: str,
        rules: SumRules,
        share: ReducerShare,
        contribution_E: Tensor,
        average: Average,
        stall: timedelta,
    ) -> None:
        """Prepare the sums of `share`."""
        weights = rules.weights
        self.given_up: set[str] = set()  # contributors dropped before they sent all parts
        self._me = me
        self._rules = rules
        self._weights = weights
        self._share = share
        self._contribution_E = contribution_E
        self._average = average
        self._stall = stall
        self._places = {peer: place for place, peer in enumerate(weights)}
        self._left_out: Counter[int] = Counter()  # contributor's place → number of parts
        self._scaled: Counter[int] = Counter()  # likewise
        self._missing: Counter[int] = Counter()  # likewise
        count = len(share.parts)
        self._queues = {
            peer: ContributorQueue(peer, count) for peer, weight in weights.items() if weight and peer != me
        }
        self._finished = [asyncio.Event() for _ in share.parts]  # set once a part is averaged or never will be

    @property
    def verdicts(self) -> tuple[manifest_pb2.Verdict, ...]:
        """Verdicts on the contributions that some sums so far lack or scale down, ordered by contributor."""
        judged = sorted(self._left_out.keys() | self._scaled.keys() | self._missing.keys())
        return tuple(
            manifest_pb2.Verdict(
                reducer=self._places[self._me],
                contributor=place,
                parts_left_out=self._left_out[place],
                parts_scaled=self._scaled[place],
                parts_missing=self._missing[place],
            )
            for place in judged
        )

    async def run(self, timeout: timedelta) -> None:
        """Average every part. A contributor's failure raises no error."""
        half_time = asyncio.get_running_loop().time() + _HALF_TIME * timeout.total_seconds()
        async with asyncio.TaskGroup() as tasks:
            for queue in self._queues.values():
                tasks.create_task(self._await_first_frame(queue))
            for part, finished in zip(self._share.parts, self._finished, strict=True):
                values = await self._collect(part, half_time)
                await self._average_part(part, values)
                finished.set()

    def close(self) -> None:
        """Close all queues; contributors get an empty body for every part that has no average yet."""
        for queue in self._queues.values():
            queue.close()
        for finished in self._finished:
            finished.set()

    def forget_contribution(self) -> None:
        """Free this node's own values after `run`."""
        self._contribution_E = torch.empty(0)

    async def serve_contributor(self, stream: Stream) -> None:
        """Receive one member's parts and send it the averages, until it closes the stream. Raises `PeerMisbehaved`."""
        queue = self._queues.get(stream.peer_id)
        reason = "the exchange ended"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._receive_parts(stream, queue))
                tasks.create_task(self._send_averages(stream))
        except ExceptionGroup as group:
            error = first_error(group)
            reason = str(error)
            if not isinstance(error, Unreachable):
                raise error from group
        finally:
            if queue is not None:
                self._drop(queue, reason)

    # --- receive -------------------------------------------------------------------------------------

    async def _await_first_frame(self, queue: ContributorQueue) -> None:
        """Drop a contributor that sends no frame within `stall` of the start, even if it never connected."""
        if not await wait_for_event(queue.first_frame_seen, self._stall):
            self._drop(queue, f"it sent nothing within {self._stall}")

    async def _receive_parts(self, stream: Stream, queue: ContributorQueue | None) -> None:
        """Read the stream to its end. Discards parts of a dropped contributor, which still gets the averages."""
        for part in self._share.parts if queue is not None else ():
            assert queue is not None
            frame = await self._frame(stream, queue)
            queue.first_frame_seen.set()
            self._average.check(frame, self._share.first + part.index, queue.peer, number_in_stream=part.index)
            if queue.open:
                await queue.put(self._average.codec.open(frame.body, part.elements))
        await next_frame(stream, _NO_DEADLINE)
        raise PartInvalid(f"peer {stream.peer_id} sent more than the {len(self._share.parts)} parts of its stream")

    async def _frame(self, stream: Stream, queue: ContributorQueue) -> Frame:
        if queue.open:
            try:
                return await next_frame(stream, self._stall)
            except DeadlineExceeded as error:
                self._drop(queue, str(error))
        return await next_frame(stream, _NO_DEADLINE)

    async def _send_averages(self, stream: Stream) -> None:
        """Send each average once it is computed; an empty body for a part without one."""
        for part, finished in zip(self._share.parts, self._finished, strict=True):
            await finished.wait()
            index = self._share.first + part.index
            body = self._average.body(index) or b""
            await stream.send(FrameKind.PART, self._average.header(index, part.index), body)

    def _drop(self, queue: ContributorQueue, reason: str) -> None:
        if queue.close():
            self.given_up.add(queue.peer)
            _log.info("contributor dropped", peer=queue.peer, reason=reason)

    # --- sums ----------------------------------------------------------------------------------------

    async def _collect(self, part: Part, half_time: float) -> dict[str, PieceSource]:
        """The values of this part from this node and from every contributor that sent them."""
        values: dict[str, PieceSource] = {}
        for peer, queue in self._queues.items():
            received = await self._next_values(queue, half_time)
            if received is not None:
                values[peer] = received.decode_into
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
                    self._drop(queue, "it is the slowest contributor and the others wait for it")

    async def _average_part(self, part: Part, values: Mapping[str, PieceSource]) -> None:
        self._missing.update(self._places[peer] for peer in self._queues.keys() - values.keys())
        if not values:
            return
        try:
            index = self._share.first + part.index
            factors = await self._average.compute_part(index, lambda: self._encode_mean(part.elements, values))
            self._average.set_factors(index, [factors.get(peer, 0.0) for peer in self._weights])
            self._left_out.update(self._places[peer] for peer, factor in factors.items() if factor == 0)
            self._scaled.update(self._places[peer] for peer, factor in factors.items() if 0 < factor < 1)
        except PartInvalid as error:
            # the values are finite but their mean is not, or none has weight: no contributor is at fault
            _log.warning("part has no average", part=part.index, reason=str(error))

    def _encode_mean(self, elements: int, values: Mapping[str, PieceSource]) -> tuple[memoryview, dict[str, float]]:
        """Encode the average; returns its bytes and each contributor's screening factor."""
        present = [peer for peer in self._weights if peer in values]  # in the order of the sum
        sources, weights = [values[peer] for peer in present], [self._weights[peer] for peer in present]
        factors, rules = (1.0,) * len(present), self._rules
        on_probation = [peer in rules.on_probation for peer in present]
        if rules.screen is not None:
            tokens = [rules.tokens[peer] for peer in present]
            factors = screening_factors(sources, tokens, elements, rules.screen, on_probation)
        weights = weights_in_sum(weights, factors, on_probation)
        body = encoded_mean(self._average.codec, sources, weights, factors, elements)
        return body, dict(zip(present, factors, strict=True))
