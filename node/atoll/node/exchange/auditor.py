"""One member's audit of a round's averages: answer and request sketches of contributions, and judge the sums.

audit.py has the rules. The audit begins when all averages are fixed, so it also covers parts that were repaired.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, TypeVarTuple, Unpack

import torch
from torch import Tensor

from atoll.core import log
from atoll.core.errors import AtollError, PartInvalid, PeerMisbehaved, RoundAbandoned
from atoll.core.frames import FrameKind
from atoll.node.exchange.audit import (
    CODEC_NOISE,
    SIZE_SLACK,
    AuditedPart,
    Evidence,
    Finding,
    Verdicts,
    contradicted_verdicts,
    draw_parts,
    judge,
)
from atoll.node.exchange.averaged_parts import Average
from atoll.node.exchange.codecs import is_finite
from atoll.node.exchange.exchange_streams import ExchangeStreams
from atoll.node.exchange.peer_deadlines import next_frame
from atoll.node.exchange.sketch import BUCKETS, SKETCH_BYTES, Sketcher
from atoll.node.exchange.weighted_sum import SumRules
from atoll.node.wire.transport import Stream

SEED_BYTES = 32
_LEAST_TIMEOUT = timedelta(seconds=5)  # of a request; a shorter one would end a slow but healthy connection
_MAX_REQUESTS = 2  # of one member in one exchange

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

_log = log.get("audit")


@dataclass(frozen=True)
class Dispute:
    """A reducer's averages do not match the sketches that contributors sent."""

    reducer: str | None  # None: the reducer sent this node other bytes, so another member may have made these up
    contributor: str | None  # the one whose sketches alone contradict the reducer: one of the two lies
    reason: str


class Auditor:
    """The audit of one exchange."""

    def __init__(
        self,
        average: Average,
        rules: SumRules,
        streams: ExchangeStreams,
        from_reducers: Mapping[int, bytes],
        contribution: Callable[[], Tensor],
        executor: Executor,
    ) -> None:
        """Prepare the audit of `average`.

        - `from_reducers`: part → digest of what its reducer itself sent to this node.
        - `contribution`: this node's own, fp32 [E].
        - `executor`: for sketches.
        """
        self._average = average
        self._rules = rules
        self._weights = rules.weights
        self._from_reducers = from_reducers
        self._contribution = contribution
        self._executor = executor
        self._streams = streams
        self._me, self._round_id = streams.me, streams.round_id
        self._requests: Counter[str] = Counter()
        self._sketching: dict[bytes, asyncio.Task[dict[int, Tensor]]] = {}  # seed → this node's own sketches
        self._told: dict[str, dict[int, Tensor]] = {}  # sketches that others sent for `_told_seed`
        self._told_seed = b""
        self._closed = False

    def close(self) -> None:
        """Make no more sketches, because the contribution is about to change. Earlier sketches are still sent."""
        self._closed = True

    # --- requests of others ---------------------------------------------------------------------------

    async def answer(self, stream: Stream, seed: bytes) -> None:
        """Send the sketches of this node's contribution. Raises `PeerMisbehaved`, `RoundAbandoned`."""
        self._requests[stream.peer_id] += 1
        if self._requests[stream.peer_id] > _MAX_REQUESTS or len(seed) != SEED_BYTES:
            raise PeerMisbehaved(
                f"peer {stream.peer_id} asked {self._requests[stream.peer_id]} times for sketches, with a seed of "
                f"{len(seed)} bytes; allowed are {_MAX_REQUESTS} times, with {SEED_BYTES} bytes"
            )
        sketches = await self._own_sketches(seed)
        body = torch.stack(list(sketches.values())).numpy().tobytes() if sketches else b""
        await stream.send(FrameKind.PART, b"", body)

    async def _own_sketches(self, seed: bytes) -> dict[int, Tensor]:
        """Sketches of this node's contribution to the drawn parts, except parts that it reduces itself."""
        if seed not in self._sketching:
            if self._closed:
                raise RoundAbandoned(f"round {self._round_id} has ended on this node, so it has no sketches to send")
            indices = self._due(self._me, draw_parts(seed, self._average.reducer_shares))
            making = asyncio.create_task(self._compute(self._sketch_contribution, seed, indices))
            self._sketching = {**dict(list(self._sketching.items())[-1:]), seed: making}
        return await asyncio.shield(self._sketching[seed])

    def _sketch_contribution(self, seed: bytes, indices: Sequence[int]) -> dict[int, Tensor]:
        sketcher, values_E = self._sketcher(seed), self._contribution()
        if self._closed:
            raise RoundAbandoned(f"round {self._round_id} has ended on this node, so it has no sketches to send")
        sketches = {}
        for index in indices:
            part = self._average.part(index)
            sketches[index] = sketcher.of(values_E[part.start : part.end])
        if self._closed:  # the contribution changed meanwhile
            raise RoundAbandoned(f"round {self._round_id} ended on this node while it made sketches")
        return sketches

    def _due(self, contributor: str, drawn: Mapping[str, Sequence[int]]) -> list[int]:
        """Drawn parts of which a contributor must send sketches: those that others reduce. None if it has no weight."""
        if not self._weights[contributor]:
            return []
        return [index for reducer, indices in drawn.items() if reducer != contributor for index in indices]

    def _sketcher(self, seed: bytes) -> Sketcher:
        return Sketcher(seed, self._average.longest_part)

    # --- requests of this node ------------------------------------------------------------------------

    async def run(
        self,
        seed: bytes,
        asked: Collection[str],
        verdicts: Mapping[str, Verdicts],
        grace: timedelta,
        timeout: timedelta,
    ) -> tuple[Dispute, ...]:
        """Audit this node's copy of all other reducers' averages with the sketches of the contributors `asked`.

        - `verdicts`: of each reducer whose verdicts are known.
        - `grace`: for the answers of all. `timeout`: until contributors with half of the tokens answered.

        Raises `RoundAbandoned` if these do not answer.
        """
        drawn = draw_parts(seed, self._average.reducer_shares)
        places = {peer: place for place, peer in enumerate(self._weights)}
        asking = {peer: asyncio.create_task(self._sketches_of(peer, seed, drawn, timeout)) for peer in asked}
        try:
            parts = await self._compute(self._sketch_averages, seed, drawn)
            answers = await self._answers(asking, drawn, self._weight_in_sums(verdicts), grace, timeout)
        finally:
            for task in asking.values():
                task.cancel()
        self._told, self._told_seed = answers, seed
        evidence = Evidence(
            sketches={places[peer]: it for peer, it in answers.items() if it},
            tokens=list(self._rules.tokens.values()),
            weights=list(self._weights.values()),
            codec=self._average.codec.name,
            screen=self._rules.screen,
            on_probation=frozenset(places[peer] for peer in self._rules.on_probation),
        )
        return await self._compute(self._judge, parts, evidence, verdicts)

    def require_sketches_of(self, peer: str) -> None:
        """Raise `RoundAbandoned` unless this node has all sketches that `peer` had to send."""
        due = self._due(peer, draw_parts(self._told_seed, self._average.reducer_shares))
        if not due or self._told.get(peer, {}).keys() != set(due):
            raise RoundAbandoned(f"this node has no sketches of {peer} to compare its contribution with")

    def check_contribution(self, peer: str, values_E: Tensor) -> None:
        """Raise `PartInvalid` unless these values, fp32 [E], match the sketches of `peer`.

        Only drawn parts have sketches. Call `require_sketches_of` first.
        """
        sketcher, noise = self._sketcher(self._told_seed), CODEC_NOISE[self._average.codec.name]
        for index, told_B in self._told[peer].items():
            part = self._average.part(index)
            found_B = sketcher.of(values_E[part.start : part.end])
            allowed = SIZE_SLACK * (noise.relative * float(told_B.norm()) + noise.absolute * math.sqrt(part.elements))
            if not float((found_B - told_B).norm()) <= allowed:  # also if it is not finite
                raise PartInvalid(f"peer {peer} sent another contribution than its sketches are of, in part {index}")

    async def _answers(
        self,
        asking: Mapping[str, asyncio.Task[dict[int, Tensor]]],
        drawn: Mapping[str, Sequence[int]],
        weights: Mapping[str, int],
        grace: timedelta,
        timeout: timedelta,
    ) -> dict[str, dict[int, Tensor]]:
        """The answers that arrive within `grace`, or later once contributors with half of the weight answered."""
        loop = asyncio.get_running_loop()
        began, waiting = loop.time(), set(asking.values())
        while True:
            told = {peer: task.result() for peer, task in asking.items() if task.done()}
            known = sum(weights[peer] for peer, it in told.items() if it or not self._due(peer, drawn))
            enough = 2 * known >= sum(weights.values())
            left = began + (grace if enough else timeout).total_seconds() - loop.time()
            if not waiting or left <= 0:
                break
            _, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not enough:
            raise RoundAbandoned("too few contributors told what they sent to audit the sums")
        return told

    def _weight_in_sums(self, verdicts: Mapping[str, Verdicts]) -> dict[str, int]:
        """The weight of each contributor. 0 on probation, or if most sums lack it (it probably died)."""
        lacking: Counter[int] = Counter()
        for told in verdicts.values():
            for place, verdict in told.items():
                lacking[place] += verdict.parts_missing + verdict.parts_left_out
        return {
            peer: 0 if 2 * lacking[place] > len(self._average) or peer in self._rules.on_probation else weight
            for place, (peer, weight) in enumerate(self._weights.items())
        }

    async def _compute(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Run `work` in another executor than the threads that compute the round's result."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)

    def _judge(
        self, parts: Mapping[str, Sequence[AuditedPart]], evidence: Evidence, verdicts: Mapping[str, Verdicts]
    ) -> tuple[Dispute, ...]:
        peers = list(self._weights)
        disputes = []
        for reducer, audited in parts.items():
            # no other member received the reducer's own contribution to its share
            own = evidence.without(peers.index(reducer))
            told = verdicts.get(reducer)
            said = contradicted_verdicts(audited, evidence, told) if told is not None else ""
            finding = Finding(said, None) if said else judge(audited, own)
            if finding is not None:
                contributor = None if finding.witness is None else peers[finding.witness]
                sent = all(self._is_from_reducer(it.index) for it in audited)
                disputes.append(Dispute(reducer if sent else None, contributor, finding.reason))
        return tuple(disputes)

    def _is_from_reducer(self, index: int) -> bool:
        """Whether the reducer sent this node the settled bytes, or no bytes."""
        settled = self._average.digest(index)
        return self._from_reducers.get(index, settled) == settled

    def _sketch_averages(self, seed: bytes, drawn: Mapping[str, Sequence[int]]) -> dict[str, list[AuditedPart]]:
        sketcher, everyone = self._sketcher(seed), [float(count > 0) for count in self._weights.values()]
        audited: dict[str, list[AuditedPart]] = {}
        for reducer, indices in drawn.items():
            for index in indices if reducer != self._me else ():
                checked, running = self._average.open(index), sketcher.begin()
                if checked is not None:
                    checked.decode_pieces(running.add)
                    factors = self._average.factors(index) or everyone
                    part = AuditedPart(index, checked.elements, running.finish(), factors, checked.usual_error())
                    audited.setdefault(reducer, []).append(part)
        return audited

    async def _sketches_of(
        self, peer: str, seed: bytes, drawn: Mapping[str, Sequence[int]], timeout: timedelta
    ) -> dict[int, Tensor]:
        """Sketches of a member's contribution; empty if it does not answer or its answer is invalid."""
        due = self._due(peer, drawn)
        if not due:
            return {}
        if peer == self._me:
            return await self._own_sketches(seed)
        try:
            return await self._request(peer, seed, due, max(timeout, _LEAST_TIMEOUT))
        except PeerMisbehaved as error:
            self._streams.fault(peer, str(error))
        except AtollError as error:
            _log.info("no sketches", peer=peer, reason=str(error))
        return {}

    async def _request(self, peer: str, seed: bytes, due: Sequence[int], timeout: timedelta) -> dict[int, Tensor]:
        async with self._streams.request(peer, timeout, audit_seed=seed) as stream:
            frame = await next_frame(stream, timeout)
        if frame.kind is not FrameKind.PART or len(frame.body) != SKETCH_BYTES * len(due):
            raise PartInvalid(f"peer {peer} sent {len(frame.body)} bytes for {len(due)} sketches")
        sketches_nB = torch.frombuffer(bytearray(frame.body), dtype=torch.float32).view(-1, BUCKETS)
        if not is_finite(sketches_nB.view(-1)):
            raise PartInvalid(f"peer {peer} sent sketches with NaN or infinite values")
        return dict(zip(due, sketches_nB, strict=True))
