"""Butterfly all-reduce: every member reduces its share of the vector and sends the average back to all.

For every other reducer this node opens one stream: it sends its encoded parts and reads the averaged parts from the
same stream. As a reducer it serves one such stream per other member (reducer.py). The average of a part is encoded
*once*; the same bytes go to everyone, and everyone, the reducer too, applies the decoded bytes: so replicas end equal
bit for bit whatever the codec loses. Sums run in the order of the members, in fp32.

No member can make the exchange fail. One that dies, falls silent or lies is given up in the role in which it did:
as a contributor, sums go on without it; as a reducer, its remaining parts are missing here. Then `run` says what there
is, the members settle on what the average is (settlement.py), and `repair` makes it so (repair.py).

Patience: a reducer gives a contributor `stall` for its next frame. It may itself be silent that long while it waits,
and after that its frame has to travel, so contributors give a reducer two and a half times as much; half of that if
the same member gave nothing to our own sums either, as one that stands still does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core import log
from atoll.core.errors import AtollError, PeerMisbehaved, RoundAbandoned, Unreachable, first_error
from atoll.core.frames import FrameKind
from atoll.core.round_id import RoundId
from atoll.node.exchange.averaged_parts import Average, AverageSink
from atoll.node.exchange.codecs import is_finite
from atoll.node.exchange.partition import ReducerShare
from atoll.node.exchange.peer_deadlines import next_frame
from atoll.node.exchange.reducer import Reducer
from atoll.node.exchange.repair import PROTOCOL, RepairClient, RepairServer, SourcesOfPart
from atoll.node.exchange.screening import Screen
from atoll.node.exchange.weighted_sum import token_weight
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.wire.peer_slots import PeerSlots
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

__all__ = ["PROTOCOL", "Exchange", "ExchangeResult", "ExchangeServer"]

_MAX_EARLY_STREAMS_PER_PEER = 4
_REDUCER_TIMEOUT_STALLS = 2.5  # stalls
_RECONNECT_INTERVAL = timedelta(seconds=1)
_REPAIR_TURNS = 4  # holders that may be tried one after another before the time is up

_log = log.get("exchange")


@dataclass(frozen=True)
class ExchangeResult:
    """What an exchange came to on one member."""

    digests: tuple[bytes, ...]  # SHA-256 of each part's encoded bytes, in the order of the vector; empty: missing
    partial: tuple[str, ...]  # contributors that one of our own sums lacks, sorted
    verdicts: tuple[manifest_pb2.Verdict, ...]  # what screening did in our own sums, ordered by contributor
    faults: Mapping[str, str]  # who broke the rules, and how


class Exchange:
    """One attempt at one round's all-reduce, as seen from one member."""

    def __init__(
        self,
        start: dp.Start,
        network: Network,
        contribution_E: Tensor,
        sink: AverageSink,
        executor: Executor,
        timeout: timedelta,
        stall: timedelta,
        *,
        screen: Screen | None,
        weigh: Callable[[int], int] = token_weight,
    ) -> None:
        """`sink` gets the average, part by part.

        `screen`: how contributions are judged; None: not at all. `weigh`: how much one of so many tokens weighs.
        """
        self.round_id = RoundId.from_proto(start.round)
        self.faults: dict[str, str] = {}  # peer → a sentence
        self._me = network.peer_id
        self._network = network
        self._contribution_E = contribution_E  # fp32 [E], read only
        self._timeout = timeout
        self._stall = stall
        self._weights = {item.peer_id: item.weight for item in start.contributions}  # in the order of the sum
        self._average = Average(start, sink, executor)
        self._reducer: Reducer | None = None
        for share in self._average.reducer_shares:
            if share.reducer == self._me:
                self._reducer = Reducer(
                    self._me, self._weights, share, contribution_E, self._average, stall, screen=screen, weigh=weigh
                )
        self._repair_server = RepairServer(self._average)
        self._came: set[str] = set()  # members whose stream to us as a reducer came
        self._serving: set[asyncio.Task[None]] = set()
        self._closing = BackgroundTasks()
        self._streams: list[Stream] = []  # open ones
        self._bytes_sent = 0  # on closed ones
        self._run_finished = False  # `run` has returned
        self._has_ended = False

    @property
    def bytes_sent(self) -> int:
        """Socket bytes of this exchange's streams so far, in this node's sending direction."""
        return self._bytes_sent + sum(stream.bytes_sent for stream in self._streams)

    async def run(self) -> ExchangeResult:
        """Have the average taken as far as the others let us, in time.

        Returns when every part is here or belongs to somebody who failed, or when the time is up. Other members are
        served until `end`. Raises `RoundAbandoned` only if our own contribution is not finite.
        """
        if self._weights[self._me] and not await self._average.compute(is_finite, self._contribution_E):
            raise RoundAbandoned("this node's own update holds values that are not finite; it was not sent")
        try:
            async with asyncio.timeout(self._timeout.total_seconds()), asyncio.TaskGroup() as tasks:
                if self._reducer is not None:
                    tasks.create_task(self._reducer.run(self._timeout))
                for share in self._average.reducer_shares:
                    if share.reducer != self._me:
                        tasks.create_task(self._contribute(share))
        except TimeoutError:
            _log.info("exchange out of time", round=str(self.round_id))
        except ExceptionGroup as group:
            raise first_error(group) from group
        finally:
            if self._reducer is not None:
                self._reducer.close()
            self._run_finished = True
            self._forget_contribution()
        ours = self._reducer
        partial, verdicts = (tuple(sorted(ours.partial)), ours.verdicts) if ours is not None else ((), ())
        return ExchangeResult(self._average.digests, partial, verdicts, dict(self.faults))

    async def repair(self, digests: Sequence[bytes], sources: SourcesOfPart, timeout: timedelta) -> bool:
        """After `run`: make the average what was settled; empty digests become a zero update.

        `sources` names the members to ask for a part. Returns whether anything changed. Raises `RoundAbandoned` when
        no member gave bytes with the settled digest in time.
        """
        have = self._average.digests
        if all(digests) and tuple(digests) == have:
            return False
        await self._average.zero([index for index, digest in enumerate(digests) if not digest])
        wanted = {index: digest for index, digest in enumerate(digests) if digest and digest != have[index]}
        frame_timeout = min(self._stall, timeout / _REPAIR_TURNS)
        repairer = RepairClient(
            self.round_id, self._network, self._average, frame_timeout, self._track_stream, self._fault
        )
        await repairer.fetch(wanted, sources, timeout)
        return True

    def drop_sink(self) -> None:
        """Nobody takes the average any more; members that lack parts of it are still served."""
        self._average.drop_sink()

    def end(self) -> None:
        """The round is over: serve nobody any more, forget the encoded bytes."""
        for task in self._serving:
            task.cancel()
        self._average.release()
        self._has_ended = True
        self._forget_contribution()

    def _forget_contribution(self) -> None:
        """Once nobody reads it any more: tracebacks of ended streams would keep it."""
        if self._run_finished and self._has_ended:
            self._contribution_E = torch.empty(0)
            if self._reducer is not None:
                self._reducer.forget_contribution()

    # --- others' streams -----------------------------------------------------------------------------

    async def serve(self, stream: Stream) -> None:
        """Reduce for a member that opened its stream to us. Raises `PeerMisbehaved`."""
        peer = stream.peer_id
        if peer not in self._weights or self._reducer is None or peer == self._me:
            raise self._misbehaved(peer, f"{peer} has no part in round {self.round_id}")
        if peer in self._came:
            raise self._misbehaved(peer, f"{peer} opened a second stream for round {self.round_id}")
        self._came.add(peer)
        await self._serve_until_end(stream, self._reducer.serve_contributor(stream))

    async def serve_repair(self, stream: Stream, indices: Sequence[int]) -> None:
        """Give a member the parts that it lacks. Raises `PeerMisbehaved`."""
        if stream.peer_id not in self._weights:
            raise self._misbehaved(stream.peer_id, f"{stream.peer_id} has no part in round {self.round_id}")
        await self._serve_until_end(stream, self._repair_server.answer(stream, indices))

    async def _serve_until_end(self, stream: Stream, work: Coroutine[Any, Any, None]) -> None:
        """Do `work` for the other side of `stream` to its end or to ours."""
        task = asyncio.create_task(work)
        self._serving.add(task)
        self._streams.append(stream)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
            self._serving.discard(task)
            self._forget(stream)
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, PeerMisbehaved):
            self._fault(stream.peer_id, str(error))
        if error is not None:
            raise error

    # --- our vector to the other reducers ------------------------------------------------------------

    async def _contribute(self, share: ReducerShare) -> None:
        """Whatever happens to the reducer, it ends quietly with that reducer's remaining parts missing."""
        try:
            stream = await self._open(share.reducer)
            with self._track_stream(stream):
                async with asyncio.TaskGroup() as tasks:
                    giving = tasks.create_task(self._send_contribution(stream, share))
                    await self._receive_averages(stream, share)
                    giving.cancel()
        except AtollError as error:
            self._reducer_lost(share, error)
        except ExceptionGroup as group:
            first = first_error(group)
            self._reducer_lost(share, first if isinstance(first, AtollError) else _crashed(first))
        except Exception as error:  # of ours: it must not end the exchange with the others
            self._reducer_lost(share, _crashed(error))

    async def _open(self, reducer: str) -> Stream:
        """Knock again for as long as the reducer waits for us: behind NAT it is found only once it has a relay."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._stall.total_seconds()
        while True:
            try:
                return await self._network.open(reducer, PROTOCOL, self._stall * _REDUCER_TIMEOUT_STALLS)
            except Unreachable:
                if loop.time() + _RECONNECT_INTERVAL.total_seconds() >= until:
                    raise
            await asyncio.sleep(_RECONNECT_INTERVAL.total_seconds())

    async def _send_contribution(self, stream: Stream, share: ReducerShare) -> None:
        header = dp.ExchangeHeader(round=self.round_id.to_proto())
        await stream.send(FrameKind.MESSAGE, header.SerializeToString())
        for part in share.parts if self._weights[self._me] else ():
            body = await self._average.compute(self._average.codec.encode, self._contribution_E[part.start : part.end])
            await stream.send(FrameKind.PART, self._average.header(share.first + part.index, part.index), body)

    async def _receive_averages(self, stream: Stream, share: ReducerShare) -> None:
        for part in share.parts:
            frame = await next_frame(
                stream, self._stall * _REDUCER_TIMEOUT_STALLS, lambda: self._is_silent(share.reducer)
            )
            index = share.first + part.index
            self._average.check(frame, index, share.reducer, number_in_stream=part.index)
            if frame.body:  # else nobody contributed to it
                await self._average.put(index, frame.body)

    def _reducer_lost(self, share: ReducerShare, error: AtollError) -> None:
        _log.info("reducer given up", peer=share.reducer, reason=str(error))
        if isinstance(error, PeerMisbehaved):
            self._fault(share.reducer, str(error))

    def _is_silent(self, peer: str) -> bool:
        return self._reducer is not None and peer in self._reducer.given_up

    # --- small words ---------------------------------------------------------------------------------

    @contextmanager
    def _track_stream(self, stream: Stream) -> Iterator[None]:
        """Count the bytes of a stream that we opened, and close it, without waiting for who may be dead."""
        self._streams.append(stream)
        try:
            yield
        finally:
            self._forget(stream)
            self._closing.begin(stream.close())

    def _forget(self, stream: Stream) -> None:
        self._streams.remove(stream)
        self._bytes_sent += stream.bytes_sent

    def _fault(self, peer: str, what: str) -> None:
        self.faults.setdefault(peer, what)
        _log.warning("peer misbehaved", peer=peer, reason=what)

    def _misbehaved(self, peer: str, what: str) -> PeerMisbehaved:
        self._fault(peer, what)
        return PeerMisbehaved(what)


def _crashed(error: BaseException) -> Unreachable:
    _log.error("a conversation with a reducer failed", error=repr(error))
    return Unreachable(f"the conversation failed: {error!r}")


class ExchangeServer:
    """Brings incoming averaging streams to the exchange that they belong to, also when they are early."""

    def __init__(self, network: Network, timeout: timedelta) -> None:
        self._timeout = timeout
        self._exchanges: dict[RoundId, Exchange] = {}
        self._early = PeerSlots[str](_MAX_EARLY_STREAMS_PER_PEER)  # streams that wait for their exchange
        self._begun = asyncio.Event()  # replaced at every `begin`
        network.handle(PROTOCOL, self._handle)

    def begin(self, exchange: Exchange) -> None:
        """From now on, streams for this round reach `exchange`."""
        self._exchanges[exchange.round_id] = exchange
        begun, self._begun = self._begun, asyncio.Event()
        begun.set()

    def end(self, round_id: RoundId) -> None:
        """The round is over; its streams end, and late ones are refused."""
        exchange = self._exchanges.pop(round_id, None)
        if exchange is not None:
            exchange.end()

    async def _handle(self, stream: Stream) -> None:
        frame = await stream.receive(self._timeout)
        try:
            header = dp.ExchangeHeader.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved("an averaging stream must begin with an ExchangeHeader") from error
        round_id = RoundId.from_proto(header.round)
        if header.repair:
            if round_id not in self._exchanges:
                raise RoundAbandoned(f"round {round_id} is not kept here")
            await self._exchanges[round_id].serve_repair(stream, header.repair)
        else:
            await (await self._wait_for_exchange(stream.peer_id, round_id)).serve(stream)

    async def _wait_for_exchange(self, peer: str, round_id: RoundId) -> Exchange:
        """The exchange of that round; waits a little, because Start may reach others before us."""
        with self._early.hold(peer, "streams for rounds that have not started here"):
            try:
                async with asyncio.timeout(self._timeout.total_seconds()):
                    while round_id not in self._exchanges:
                        await self._begun.wait()
            except TimeoutError as error:
                raise RoundAbandoned(f"round {round_id} is not running here") from error
        return self._exchanges[round_id]
