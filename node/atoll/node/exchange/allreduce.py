"""Butterfly all-reduce: every member reduces its share of the vector and sends the average back to all members.

For every other reducer this node opens one stream: it sends its encoded parts and reads the averaged parts from the
same stream (contributor.py). As a reducer it serves one such stream per other member (reducer.py). The average of a
part is encoded *once*. All members, the reducer too, apply the decoded values of the same bytes: so replicas end equal
bit for bit whatever the codec loses. Sums run in the order of the members, in fp32.

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
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import Tensor

from atoll.core import log
from atoll.core.errors import RoundAbandoned, first_error
from atoll.core.round_id import RoundId
from atoll.node.exchange.auditor import Auditor, Dispute
from atoll.node.exchange.averaged_parts import Average, AverageSink
from atoll.node.exchange.codecs import is_finite
from atoll.node.exchange.contribution_copies import ContributionCopies
from atoll.node.exchange.contributor import Contributor
from atoll.node.exchange.exchange_streams import ExchangeStreams
from atoll.node.exchange.reducer import Reducer
from atoll.node.exchange.repair import RepairClient, RepairServer, SourcesOfPart
from atoll.node.exchange.screening import Screen, largest_norm
from atoll.node.exchange.weighted_sum import SumRules
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

_CODEC_GROWTH = 2.0  # decoded values have at most this many times the norm of the encoded values
_REPAIR_TURNS = 4  # holders that a repair has time to ask one after another

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
        self._streams = ExchangeStreams(self.round_id, network)
        self._contribution_E = contribution_E  # fp32 [E], read only
        self._timeout = timeout
        self._stall = stall
        rules = SumRules.of(start, screen)
        self._weights = rules.weights
        self._average = Average(start, sink, executor, _norm_limit(start, screen))
        self._reducer: Reducer | None = None
        for share in self._average.reducer_shares:
            if share.reducer == self._streams.me:
                self._reducer = Reducer(self._streams.me, rules, share, contribution_E, self._average, stall)

        def own() -> Tensor:
            return self._contribution_E

        given = own if self._weights[self._streams.me] else None
        self._contributor = Contributor(self._average, self._streams, given, stall, self._is_silent)
        self._repair_server = RepairServer(self._average)
        self._auditor = Auditor(
            self._average, rules, self._streams, self._contributor.from_reducers, own, audit_executor or executor
        )
        self.copies = ContributionCopies(self._average, self._streams, own, self._auditor)
        self._connected: set[str] = set()  # members that opened a stream to this node as a reducer
        self._run_finished = False  # `run` has returned
        self._has_ended = False

    @property
    def faults(self) -> Mapping[str, str]:
        """The members that broke a rule: peer → description."""
        return self._streams.faults

    @property
    def bytes_sent(self) -> int:
        """Socket bytes that this node has sent on this exchange's streams so far."""
        return self._streams.bytes_sent

    async def run(self) -> ExchangeResult:
        """Exchange parts until each has arrived or its reducer has failed, or until the timeout.

        Serves other members until `end`. Raises `RoundAbandoned` only if this node's own contribution is not finite.
        """
        if self._weights[self._streams.me] and not await self._average.compute(is_finite, self._contribution_E):
            raise RoundAbandoned("this node's own update has NaN or infinite values; it was not sent")
        try:
            async with asyncio.timeout(self._timeout.total_seconds()), asyncio.TaskGroup() as tasks:
                if self._reducer is not None:
                    tasks.create_task(self._reducer.run(self._timeout))
                for share in self._average.reducer_shares:
                    if share.reducer != self._streams.me:
                        tasks.create_task(self._contributor.exchange(share))
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
        """After `run`: replace parts so that they match the settled digests. An empty digest means a zero update.

        `sources` names the members to ask for a part. Returns whether anything changed. Raises `RoundAbandoned` when no
        member gave bytes with the settled digest in time.
        """
        have = self._average.digests
        if all(digests) and tuple(digests) == have:
            return False
        await self._average.zero([index for index, digest in enumerate(digests) if not digest])
        wanted = {index: digest for index, digest in enumerate(digests) if digest and digest != have[index]}
        frame_timeout = min(self._stall, timeout / _REPAIR_TURNS)
        repairer = RepairClient(self._average, self._streams, frame_timeout)
        await repairer.fetch(wanted, sources, timeout)
        return True

    async def audit(
        self, seed: bytes, asked: Collection[str], settle: dp.Settle, grace: timedelta, timeout: timedelta
    ) -> tuple[Dispute, ...]:
        """After `repair`: check the averages of other reducers against the sketches of the contributors `asked`.

        `grace`: how long to wait for all answers; a member that sends none counts as unknown. `timeout`: how long to
        wait for contributors with half of the weight. See audit.py. Raises `RoundAbandoned`.
        """
        places = {peer: place for place, peer in enumerate(self._weights)}
        verdicts = {
            share.reducer: {it.contributor: it for it in settle.verdicts if it.reducer == places[share.reducer]}
            for share in self._average.reducer_shares
            if share.reducer in asked  # otherwise its verdicts came too late for Settle
        }
        return await self._auditor.run(seed, asked, verdicts, grace, timeout)

    def drop_sink(self) -> None:
        """Stop passing the average to the sink. Members that lack parts are still served.

        The contribution may change from now on, so no more sketches are made of it.
        """
        self._average.drop_sink()
        self._auditor.close()

    def end(self) -> None:
        """End the exchange: stop serving members and free the encoded bytes."""
        self._streams.end()
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
        peer, streams = stream.peer_id, self._streams
        if peer not in self._weights or self._reducer is None or peer == streams.me:
            raise streams.misbehaved(peer, f"peer {peer} has no part in this node's sums of round {self.round_id}")
        if peer in self._connected:
            raise streams.misbehaved(peer, f"peer {peer} opened a second stream for round {self.round_id}")
        self._connected.add(peer)
        await self._streams.serve(stream, self._reducer.serve_contributor(stream))

    async def serve_repair(self, stream: Stream, indices: Sequence[int]) -> None:
        """Send a member the parts that it lacks. Raises `PeerMisbehaved`."""
        self._require_member(stream.peer_id)
        await self._streams.serve(stream, self._repair_server.answer(stream, indices))

    async def serve_audit(self, stream: Stream, seed: bytes) -> None:
        """Send a member the sketches of this node's contribution. Raises `PeerMisbehaved`, `RoundAbandoned`."""
        self._require_member(stream.peer_id)
        await self._streams.serve(stream, self._auditor.answer(stream, seed))

    def _require_member(self, peer: str) -> None:
        if peer not in self._weights:
            raise self._streams.misbehaved(peer, f"peer {peer} has no part in round {self.round_id}")

    async def serve_contribution(self, stream: Stream) -> None:
        """Send this node's contribution to the member that audits it. Raises `RoundAbandoned`, `PeerMisbehaved`."""
        await self._streams.serve(stream, self.copies.answer(stream))

    def _is_silent(self, peer: str) -> bool:
        return self._reducer is not None and peer in self._reducer.given_up


def _norm_limit(start: dp.Start, screen: Screen | None) -> Callable[[int], float] | None:
    """The largest norm that an average of so many elements can have: from the most tokens, times the codec's growth."""
    if screen is None:
        return None
    most_tokens = max(item.weight for item in start.contributions)
    return lambda elements: _CODEC_GROWTH * largest_norm(most_tokens, elements, screen)
