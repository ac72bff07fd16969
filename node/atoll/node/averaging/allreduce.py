"""Butterfly all-reduce: every member reduces its share of the vector and sends the average back to all.

For every other reducer this node opens one stream: it sends its encoded parts and reads the averaged parts
from the same stream. As a reducer it serves one such stream per other member. The average of a part is
encoded *once*; the same bytes go to everyone, and everyone, the reducer too, applies the decoded bytes: so
replicas end equal bit for bit whatever the codec loses. Sums run in the order of the members, in fp32.

Everything overlaps: parts are encoded, sent, received, decoded, summed and returned by separate tasks, with
codecs and sums in a thread pool (torch releases the GIL). Any failure fails the exchange as a whole; nobody
applies half an average.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from datetime import timedelta
from typing import TypeVar, TypeVarTuple, Unpack

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core.errors import PartInvalid, PeerMisbehaved, RoundAbandoned, first_error
from atoll.core.frames import Frame, FrameKind
from atoll.core.round_id import RoundId
from atoll.node.averaging.codecs import BY_NUMBER
from atoll.node.averaging.outer import weighted_mean
from atoll.node.averaging.partition import Part, ReduceRange, parts
from atoll.node.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp

PROTOCOL = "/atoll/average/1"
_EARLY_PER_PEER = 4
_READ_AHEAD = 2  # parts buffered per sender while earlier ones are summed

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Exchange:
    """One attempt at one round's all-reduce, as seen from one member."""

    def __init__(
        self,
        start: dp.Start,
        network: Network,
        contribution_E: Tensor,
        average_E: Tensor,
        executor: Executor,
        timeout: timedelta,
    ) -> None:
        self.round_id = RoundId.from_proto(start.round)
        self._me = network.peer_id
        self._network = network
        self._contribution_E = contribution_E  # fp32 [E], read only
        self._average_E = average_E  # fp32 [E], filled by `run`
        self._executor = executor
        self._timeout = timeout
        self._codec = BY_NUMBER[start.codec]
        self._weights = {item.peer_id: item.weight for item in start.contributions}  # in the order of the sum
        self._ranges = [ReduceRange(piece.reducer, piece.start, piece.end) for piece in start.partition]
        self._part_elements = start.part_elements
        self._mine = next(
            (piece for piece in self._ranges if piece.reducer == self._me and piece.end > piece.start), None
        )
        loop = asyncio.get_running_loop()
        senders = [peer for peer in self._weights if peer != self._me] if self._mine else []
        self._arrived: dict[str, asyncio.Future[Stream]] = {peer: loop.create_future() for peer in senders}
        self._opened: list[Stream] = []
        self._done = asyncio.Event()

    @property
    def bytes_sent(self) -> int:
        """Socket bytes of this exchange's streams so far, in this node's sending direction."""
        served = [future.result() for future in self._arrived.values() if future.done() and not future.cancelled()]
        return sum(stream.bytes_sent for stream in [*self._opened, *served])

    async def run(self) -> None:
        """Fill the average. Raises `RoundAbandoned` with the first failure; the deadline is the round's."""
        try:
            async with asyncio.timeout(self._timeout.total_seconds()), asyncio.TaskGroup() as tasks:
                if self._mine is not None:
                    tasks.create_task(self._reduce(self._mine))
                for piece in self._ranges:
                    if piece.reducer != self._me and piece.end > piece.start:
                        tasks.create_task(self._contribute(piece))
        except TimeoutError as error:
            raise RoundAbandoned("the exchange did not finish in time") from error
        except ExceptionGroup as group:
            first = first_error(group)
            raise RoundAbandoned(f"the exchange failed: {first}") from first
        finally:
            self._done.set()
            await asyncio.gather(*(stream.close() for stream in self._opened))

    async def serve(self, stream: Stream) -> None:
        """Hand over a stream that another member opened for this round; returns when the round is over."""
        waiting = self._arrived.get(stream.peer_id)
        if stream.peer_id not in self._weights or waiting is None:
            raise PeerMisbehaved(f"{stream.peer_id} has no part in round {self.round_id}")
        if waiting.done():
            raise PeerMisbehaved(f"{stream.peer_id} opened a second stream for round {self.round_id}")
        waiting.set_result(stream)
        await self._done.wait()

    # --- our share of everyone's vector --------------------------------------------------------------

    async def _reduce(self, piece: ReduceRange) -> None:
        pieces = parts(piece, self._part_elements)
        received: dict[str, asyncio.Queue[Frame]] = {}
        averaged: dict[str, asyncio.Queue[tuple[Part, bytes]]] = {}
        async with asyncio.TaskGroup() as tasks:
            for peer in self._arrived:
                received[peer] = asyncio.Queue(_READ_AHEAD)
                averaged[peer] = asyncio.Queue()
                tasks.create_task(self._serve_member(peer, pieces, received[peer], averaged[peer]))
            for part in pieces:
                frames = {peer: await received[peer].get() for peer in self._arrived if self._weights[peer]}
                body = await self._compute(self._average_part, part, frames)
                for queue in averaged.values():
                    queue.put_nowait((part, body))

    async def _serve_member(
        self,
        peer: str,
        pieces: tuple[Part, ...],
        received: asyncio.Queue[Frame],
        averaged: asyncio.Queue[tuple[Part, bytes]],
    ) -> None:
        stream = await self._arrived[peer]

        async def take() -> None:
            for _ in pieces if self._weights[peer] else ():
                await received.put(await stream.receive(self._timeout))

        async def give() -> None:
            for _ in pieces:
                part, body = await averaged.get()
                await stream.send(FrameKind.PART, self._header(part), body)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(take())
            tasks.create_task(give())

    def _average_part(self, part: Part, frames: dict[str, Frame]) -> bytes:
        """Decode, check and sum in member order; encode once; apply the decoded bytes here too."""
        values = []
        for peer, weight in self._weights.items():
            if not weight:
                values.append(torch.empty(0))
            elif peer == self._me:
                values.append(self._contribution_E[part.start : part.end])
            else:
                values.append(self._decode(part, frames[peer], peer))
        body = self._codec.encode(weighted_mean(values, list(self._weights.values())))
        self._average_E[part.start : part.end] = self._codec.decode(body, part.elements)
        return body

    # --- our vector to the other reducers ------------------------------------------------------------

    async def _contribute(self, piece: ReduceRange) -> None:
        stream = await self._network.open(piece.reducer, PROTOCOL, self._timeout)
        self._opened.append(stream)
        header = dp.ExchangeHeader(round=self.round_id.to_proto())
        await stream.send(FrameKind.MESSAGE, header.SerializeToString())
        pieces = parts(piece, self._part_elements)

        async def give() -> None:
            for part in pieces if self._weights[self._me] else ():
                values_E = self._contribution_E[part.start : part.end]
                body = await self._compute(self._codec.encode, values_E)
                await stream.send(FrameKind.PART, self._header(part), body)

        async def take() -> None:
            for part in pieces:
                frame = await stream.receive(self._timeout)
                await self._compute(self._store, part, frame, piece.reducer)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(give())
            tasks.create_task(take())

    def _store(self, part: Part, frame: Frame, reducer: str) -> None:
        self._average_E[part.start : part.end] = self._decode(part, frame, reducer)

    # --- frames ------------------------------------------------------------------------------------

    def _header(self, part: Part) -> bytes:
        return dp.PartHeader(index=part.index, elements=part.elements, codec=self._codec.number).SerializeToString()

    def _decode(self, part: Part, frame: Frame, peer: str) -> Tensor:
        """Check a part against the plan before anything is done with it. Raises `PartInvalid`."""
        if frame.kind is not FrameKind.PART:
            raise PartInvalid(f"{peer} sent a {frame.kind.name} frame where a part was due")
        try:
            header = dp.PartHeader.FromString(frame.header)
        except DecodeError as error:
            raise PartInvalid(f"{peer} sent a part without a header") from error
        if (header.index, header.elements, header.codec) != (part.index, part.elements, self._codec.number):
            raise PartInvalid(f"{peer} sent part {header.index} with {header.elements} elements out of turn")
        return self._codec.decode(frame.body, part.elements)

    async def _compute(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)


class ExchangeServer:
    """Brings incoming averaging streams to the exchange that they belong to, also when they are early."""

    def __init__(self, network: Network, timeout: timedelta) -> None:
        self._timeout = timeout
        self._exchanges: dict[RoundId, Exchange] = {}
        self._early: Counter[str] = Counter()  # streams that wait for their exchange, per sender
        self._begun = asyncio.Event()  # replaced at every `begin`
        network.handle(PROTOCOL, self._handle)

    def begin(self, exchange: Exchange) -> None:
        """From now on, streams for this round reach `exchange`."""
        self._exchanges[exchange.round_id] = exchange
        begun, self._begun = self._begun, asyncio.Event()
        begun.set()

    def end(self, round_id: RoundId) -> None:
        """The round is over; late streams are refused."""
        self._exchanges.pop(round_id, None)

    async def _handle(self, stream: Stream) -> None:
        frame = await stream.receive(self._timeout)
        try:
            round_id = RoundId.from_proto(dp.ExchangeHeader.FromString(frame.header).round)
        except DecodeError as error:
            raise PeerMisbehaved("an averaging stream must begin with an ExchangeHeader") from error
        exchange = await self._soon(stream.peer_id, round_id)
        await exchange.serve(stream)

    async def _soon(self, peer: str, round_id: RoundId) -> Exchange:
        """The exchange of that round; waits a little, because Start may reach others before us."""
        if self._early[peer] >= _EARLY_PER_PEER:
            raise PeerMisbehaved("too many rounds are announced at once")
        self._early[peer] += 1
        try:
            async with asyncio.timeout(self._timeout.total_seconds()):
                while round_id not in self._exchanges:
                    await self._begun.wait()
        except TimeoutError as error:
            raise RoundAbandoned(f"round {round_id} is not running here") from error
        finally:
            self._early[peer] -= 1
            self._early += Counter()  # drops what is not positive
        return self._exchanges[round_id]
