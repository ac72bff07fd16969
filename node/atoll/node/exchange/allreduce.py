"""Butterfly all-reduce: every member reduces its share of the vector and sends the average back to all members.

For every other reducer this node opens one stream: it sends its encoded parts and reads the averaged parts from the
same stream. As a reducer it serves one such stream per other member (reducer.py). The average of a part is encoded
*once*. All members, the reducer too, apply the decoded values of the same bytes: so replicas end equal bit for bit
whatever the codec loses. Sums run in the order of the members, in fp32.

No member can make the exchange fail. A member that dies, falls silent or lies is dropped in that role only. Without a
contributor the sums continue; without a reducer its remaining parts are missing here. Then `run` returns the digests
of the parts that arrived, the members agree on the digest of every part (settlement.py), and `repair` makes this
node's average match them (repair.py).

Timeouts: a reducer waits `stall` for a contributor's next frame. During that wait the reducer itself may be silent, and
then its own frame has to travel. So contributors wait two and a half times as long for a reducer; half of that if this
node's own sums already dropped the same member, which then has probably stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
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
from atoll.node.exchange.auditor import Auditor, Dispute
from atoll.node.exchange.averaged_parts import Average, AverageSink
from atoll.node.exchange.codecs import is_finite
from atoll.node.exchange.contribution_copies import ContributionCopies
from atoll.node.exchange.partition import ReducerShare
from atoll.node.exchange.peer_deadlines import next_frame
from atoll.node.exchange.reducer import Reducer
from atoll.node.exchange.repair import PROTOCOL, RepairClient, RepairServer, SourcesOfPart
from atoll.node.exchange.screening import Screen, largest_norm
from atoll.node.exchange.weighted_sum import SumRules
from atoll.node.system.background_tasks import BackgroundTasks
from atoll.node.wire.peer_slots import PeerSlots
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

__all__ = ["PROTOCOL", "Exchange", "ExchangeResult", "ExchangeServer"]

_MAX_EARLY_STREAMS_PER_PEER = 4  # for rounds that this node has not started
_REDUCER_TIMEOUT_STALLS = 2.5  # in units of `stall`
_RECONNECT_INTERVAL = timedelta(seconds=1)
_CODEC_GROWTH = 2.0  # decoded values have at most so many times the norm of the encoded ones
_REPAIR_TURNS = 4  # holders that a repair has time to try one after another

_log = log.get("exchange")


@dataclass(frozen=True)
class ExchangeResult:
    """The outcome of an exchange on one member."""

    digests: tuple[bytes, ...]  # SHA-256 of each part's encoded bytes, in the order of the vector; empty: missing
    partial: tuple[str, ...]  # contributors missing from one of this node's sums, sorted
    verdicts: tuple[manifest_pb2.Verdict, ...]  # of this node's sums, ordered by contributor
    faults: Mapping[str, str]  # peer → the rule that it broke


class Exchange:
    """One member's side of one attempt at a round's all-reduce."""

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
        audit_executor: Executor | None = None,
    ) -> None:
        """Prepare the exchange that `start` describes, with this node's `contribution_E`.

        - `sink`: receives the average, part by part.
        - `timeout`: for `run`. `stall`: for a contributor's next frame.
        - `screen`: how to screen contributions; None: not at all.
        - `audit_executor`: for audits; None: that of the exchange.
        """
        self.round_id = RoundId.from_proto(start.round)
        self.faults: dict[str, str] = {}  # peer → a sentence
        self._me = network.peer_id
        self._network = network
        self._contribution_E = contribution_E  # fp32 [E], read only
        self._timeout = timeout
        self._stall = stall
        rules = SumRules.of(start, screen)
        self._weights = rules.weights
        self._average = Average(start, sink, executor, _norm_limit(start, screen))
        self._reducer: Reducer | None = None
        for share in self._average.reducer_shares:
            if share.reducer == self._me:
                self._reducer = Reducer(self._me, rules, share, contribution_E, self._average, stall)
        self._from_reducers: dict[int, bytes] = {}  # part → digest of what its reducer itself sent
        self._repair_server = RepairServer(self._average)
        self._auditor = Auditor(
            self.round_id,
            network,
            self._average,
            rules,
            self._from_reducers,
            lambda: self._contribution_E,
            audit_executor or executor,
            self._track_stream,
            self._fault,
        )
        self._connected: set[str] = set()  # members that opened a stream to this node as a reducer
        self._serving: set[asyncio.Task[None]] = set()
        self._closing = BackgroundTasks()
        self._streams: list[Stream] = []  # open streams
        self._bytes_sent = 0  # on closed streams
        self.copies = ContributionCopies(
            self.round_id, network, self._average, lambda: self._contribution_E, self._auditor, self._track_stream
        )
        self._run_finished = False  # `run` has returned
        self._has_ended = False

    @property
    def bytes_sent(self) -> int:
        """Socket bytes that this node has sent on this exchange's streams so far."""
        return self._bytes_sent + sum(stream.bytes_sent for stream in self._streams)

    async def run(self) -> ExchangeResult:
        """Exchange parts until each has arrived or its reducer has failed, or until the timeout.

        Serves other members until `end`. Raises `RoundAbandoned` only if this node's own contribution is not finite.
        """
        if self._weights[self._me] and not await self._average.compute(is_finite, self._contribution_E):
            raise RoundAbandoned("this node's own update has NaN or infinite values; it was not sent")
        try:
            async with asyncio.timeout(self._timeout.total_seconds()), asyncio.TaskGroup() as tasks:
                if self._reducer is not None:
                    tasks.create_task(self._reducer.run(self._timeout))
                for share in self._average.reducer_shares:
                    if share.reducer != self._me:
                        tasks.create_task(self._contribute(share))
        except TimeoutError:
            _log.info("exchange timed out", round=str(self.round_id))
        except ExceptionGroup as group:
            raise first_error(group) from group
        finally:
            if self._reducer is not None:
                self._reducer.close()
            self._run_finished = True
            self._forget_contribution()
        verdicts, peers = self._reducer.verdicts if self._reducer is not None else (), list(self._weights)
        partial = sorted(peers[verdict.contributor] for verdict in verdicts if verdict.parts_missing)
        return ExchangeResult(self._average.digests, tuple(partial), verdicts, dict(self.faults))

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

    async def audit(
        self, seed: bytes, asked: Collection[str], settle: dp.Settle, grace: timedelta, timeout: timedelta
    ) -> tuple[Dispute, ...]:
        """After `repair`: check the averages of other reducers against what `asked`, the contributors, say they sent.

        `grace`: for the answers of all; a member that gives none counts as unknown. `timeout`: for those of half. See
        audit.py. Raises `RoundAbandoned`.
        """
        places = {peer: place for place, peer in enumerate(self._weights)}
        verdicts = {
            share.reducer: {it.contributor: it for it in settle.verdicts if it.reducer == places[share.reducer]}
            for share in self._average.reducer_shares
            if share.reducer in asked  # else its verdicts came too late for Settle
        }
        return await self._auditor.run(seed, asked, verdicts, grace, timeout)

    def drop_sink(self) -> None:
        """Stop passing the average to the sink; still serves members that lack parts.

        The contribution may change from now on, so no more sketches are made of it.
        """
        self._average.drop_sink()
        self._auditor.close()

    def end(self) -> None:
        """End the exchange: stop serving members and free the encoded bytes."""
        for task in self._serving:
            task.cancel()
        self._average.release()
        self._has_ended = True
        self._forget_contribution()

    def _forget_contribution(self) -> None:
        """Free the contribution after the last read: tracebacks of ended streams refer to this exchange."""
        if self._run_finished and self._has_ended:
            self._contribution_E = torch.empty(0)
            if self._reducer is not None:
                self._reducer.forget_contribution()

    # --- streams that other members open -------------------------------------------------------------

    async def serve(self, stream: Stream) -> None:
        """Serve a contributor's stream as the reducer. Raises `PeerMisbehaved`."""
        peer = stream.peer_id
        if peer not in self._weights or self._reducer is None or peer == self._me:
            raise self._misbehaved(peer, f"peer {peer} has no part in this node's sums of round {self.round_id}")
        if peer in self._connected:
            raise self._misbehaved(peer, f"peer {peer} opened a second stream for round {self.round_id}")
        self._connected.add(peer)
        await self._serve_until_end(stream, self._reducer.serve_contributor(stream))

    async def serve_repair(self, stream: Stream, indices: Sequence[int]) -> None:
        """Send a member the parts that it lacks. Raises `PeerMisbehaved`."""
        if stream.peer_id not in self._weights:
            raise self._misbehaved(stream.peer_id, f"peer {stream.peer_id} has no part in round {self.round_id}")
        await self._serve_until_end(stream, self._repair_server.answer(stream, indices))

    async def serve_audit(self, stream: Stream, seed: bytes) -> None:
        """Send a member the sketches of this node's contribution. Raises `PeerMisbehaved`, `RoundAbandoned`."""
        if stream.peer_id not in self._weights:
            raise self._misbehaved(stream.peer_id, f"peer {stream.peer_id} has no part in round {self.round_id}")
        await self._serve_until_end(stream, self._auditor.answer(stream, seed))

    async def serve_contribution(self, stream: Stream) -> None:
        """Send this node's contribution to the member that audits it. Raises `RoundAbandoned`, `PeerMisbehaved`."""
        await self._serve_until_end(stream, self.copies.answer(stream))

    async def _serve_until_end(self, stream: Stream, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` on `stream` until it finishes or the exchange ends."""
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

    # --- this node's contribution to the other reducers ----------------------------------------------

    async def _contribute(self, share: ReducerShare) -> None:
        """Exchange a reducer's share with it. Raises no error: if it fails, its remaining parts are missing."""
        try:
            stream = await self._open(share.reducer)
            with self._track_stream(stream):
                async with asyncio.TaskGroup() as tasks:
                    sending = tasks.create_task(self._send_contribution(stream, share))
                    await self._receive_averages(stream, share)
                    sending.cancel()
        except AtollError as error:
            self._reducer_lost(share, error)
        except ExceptionGroup as group:
            first = first_error(group)
            self._reducer_lost(share, first if isinstance(first, AtollError) else _crashed(first))
        except Exception as error:  # a bug here must not end the exchange with the other reducers
            self._reducer_lost(share, _crashed(error))

    async def _open(self, reducer: str) -> Stream:
        """Connect, and retry while the reducer waits for us: behind NAT it is reachable only once it has a relay."""
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
            header_bytes = self._average.header(share.first + part.index, part.index, averaged=False)
            await stream.send(FrameKind.PART, header_bytes, body)

    async def _receive_averages(self, stream: Stream, share: ReducerShare) -> None:
        for part in share.parts:
            frame = await next_frame(
                stream, self._stall * _REDUCER_TIMEOUT_STALLS, lambda: self._is_silent(share.reducer)
            )
            index = share.first + part.index
            factors = self._average.check(frame, index, share.reducer, number_in_stream=part.index)
            if frame.body:  # empty: the part has no average
                await self._average.put(index, frame.body, factors=factors)
                self._from_reducers[index] = self._average.digest(index)

    def _reducer_lost(self, share: ReducerShare, error: AtollError) -> None:
        _log.info("reducer dropped", peer=share.reducer, reason=str(error))
        if isinstance(error, PeerMisbehaved):
            self._fault(share.reducer, str(error))

    def _is_silent(self, peer: str) -> bool:
        return self._reducer is not None and peer in self._reducer.given_up

    # --- streams and faults --------------------------------------------------------------------------

    @contextmanager
    def _track_stream(self, stream: Stream) -> Iterator[None]:
        """Count the bytes of a stream that this node opened, then close it in the background: its peer may be dead."""
        self._streams.append(stream)
        try:
            yield
        finally:
            self._forget(stream)
            self._closing.begin(stream.close())

    def _forget(self, stream: Stream) -> None:
        self._streams.remove(stream)
        self._bytes_sent += stream.bytes_sent

    def _fault(self, peer: str, reason: str) -> None:
        self.faults.setdefault(peer, reason)
        _log.warning("peer misbehaved", peer=peer, reason=reason)

    def _misbehaved(self, peer: str, reason: str) -> PeerMisbehaved:
        self._fault(peer, reason)
        return PeerMisbehaved(reason)


def _norm_limit(start: dp.Start, screen: Screen | None) -> Callable[[int], float] | None:
    """The largest norm of an average of so many elements: that of its largest contribution, and what a codec adds."""
    if screen is None:
        return None
    most_tokens = max(item.weight for item in start.contributions)
    return lambda elements: _CODEC_GROWTH * largest_norm(most_tokens, elements, screen)


def _crashed(error: BaseException) -> Unreachable:
    _log.error("stream to a reducer failed", error=repr(error))
    return Unreachable(f"the stream to the reducer failed: {error!r}")


class ExchangeServer:
    """Passes incoming averaging streams to their exchange; a stream may arrive before its exchange begins."""

    def __init__(self, network: Network, timeout: timedelta) -> None:
        self._timeout = timeout
        self._exchanges: dict[RoundId, Exchange] = {}
        self._early = PeerSlots[str](_MAX_EARLY_STREAMS_PER_PEER)  # streams that wait for their exchange
        self._begun = asyncio.Event()  # replaced by every `begin`
        network.handle(PROTOCOL, self._handle)

    def begin(self, exchange: Exchange) -> None:
        """Pass streams for this round to `exchange` from now on."""
        self._exchanges[exchange.round_id] = exchange
        begun, self._begun = self._begun, asyncio.Event()
        begun.set()

    def end(self, round_id: RoundId) -> None:
        """End the round's exchange and its streams; later streams for it are refused."""
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
        if header.repair or header.audit_seed or header.contribution:
            if round_id not in self._exchanges:
                raise RoundAbandoned(f"round {round_id} is not kept on this node, so it has nothing of it to send")
            exchange = self._exchanges[round_id]
            if header.contribution:
                await exchange.serve_contribution(stream)
            elif header.audit_seed:
                await exchange.serve_audit(stream, header.audit_seed)
            else:
                await exchange.serve_repair(stream, header.repair)
        else:
            await (await self._wait_for_exchange(stream.peer_id, round_id)).serve(stream)

    async def _wait_for_exchange(self, peer: str, round_id: RoundId) -> Exchange:
        """Wait for the exchange of that round to begin here: Start may reach other members first."""
        with self._early.hold(peer, "streams for rounds that have not started here"):
            try:
                async with asyncio.timeout(self._timeout.total_seconds()):
                    while round_id not in self._exchanges:
                        await self._begun.wait()
            except TimeoutError as error:
                raise RoundAbandoned(f"round {round_id} is not running on this node") from error
        return self._exchanges[round_id]
