"""One member's copy of a round's average: encoded parts, their digests, and the sink for decoded values.

All members have the same encoded bytes. They are kept to compare their digests and to send them to members that lack
them. The decoded values go to the sink. Only `compute_part`, `put` and `zero` change a part.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core.errors import PartInvalid
from atoll.core.frames import Buffer, Frame, FrameKind
from atoll.node.exchange.codecs import BY_NUMBER, CheckedPart, Codec
from atoll.node.exchange.partition import Part, ReduceRange, reducer_shares
from atoll.v1 import dataplane_pb2 as dp

_MAX_HEADER_BYTES = 64  # a `PartHeader` has 16, and 8 for each factor

AverageSink = Callable[[int, Tensor], object]
"""Receives a first element's index and the fp32 values from there on. The caller reuses their memory afterwards.

Called for a part piece by piece, and again when the part changes. The calls come from threads, for several parts at
once, but never twice at once for the same part.
"""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Average:
    """The parts of one round's average, by index in the order of the vector."""

    def __init__(
        self,
        start: dp.Start,
        sink: AverageSink,
        executor: Executor,
        norm_limit: Callable[[int], float] | None = None,
    ) -> None:
        """`norm_limit`: elements → the largest norm that an average of that length can have; None: no limit."""
        ranges = [ReduceRange(piece.reducer, piece.start, piece.end) for piece in start.partition]
        self.codec: Codec = BY_NUMBER[start.codec]
        self.reducer_shares = reducer_shares(ranges, start.part_elements)
        self._parts = [part for share in self.reducer_shares for part in share.parts]
        self._sink = sink
        self._executor = executor
        self._norm_limit = norm_limit
        self._weights = [item.weight for item in start.contributions]
        self._bodies: list[Buffer | None] = [None] * len(self._parts)
        self._digests = [b""] * len(self._parts)
        self._factors: dict[int, tuple[float, ...]] = {}  # only of parts that do not contain every contribution in full

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each part's encoded bytes; empty for a missing part."""
        return tuple(self._digests)

    def digest(self, index: int) -> bytes:
        """SHA-256 of a part's encoded bytes; empty if this node lacks them."""
        return self._digests[index]

    def body(self, index: int) -> Buffer | None:
        """A part's encoded bytes; None if this node lacks them."""
        return self._bodies[index]

    def part(self, index: int) -> Part:
        """Where a part lies in the vector."""
        return self._parts[index]

    @property
    def longest_part(self) -> int:
        """The elements of the longest part."""
        return max((part.elements for part in self._parts), default=0)

    def factors(self, index: int) -> tuple[float, ...]:
        """The factor of each contribution in a sum, as its reducer reports it; empty: each one with a weight has 1."""
        return self._factors.get(index, ())

    def set_factors(self, index: int, factors: Sequence[float]) -> None:
        """Keep the factors of a part that was summed here."""
        if any(factor != (weight > 0) for factor, weight in zip(factors, self._weights, strict=True)):
            self._factors[index] = tuple(factors)

    def open(self, index: int) -> CheckedPart | None:
        """A part, to be decoded; None if this node lacks it."""
        body = self._bodies[index]
        return None if body is None else self.codec.open(body, self._parts[index].elements)

    def header(self, index: int, number_in_stream: int | None = None, *, averaged: bool = True) -> bytes:
        """The serialised `PartHeader` of a part; `number_in_stream` replaces its index in the vector.

        `averaged`: with the factors of the sum, which a contribution does not have.
        """
        return dp.PartHeader(
            index=index if number_in_stream is None else number_in_stream,
            elements=self._parts[index].elements,
            codec=self.codec.number,
            factors=self.factors(index) if averaged else (),
        ).SerializeToString()

    def check(self, frame: Frame, index: int, peer: str, number_in_stream: int | None = None) -> tuple[float, ...]:
        """Check that a frame is the expected part, before its body is used. Returns the factors of its sum.

        Raises `PartInvalid`.
        """
        most = _MAX_HEADER_BYTES + 8 * len(self._weights)
        if len(frame.header) > most:  # the header stays in memory with the body
            raise PartInvalid(
                f"peer {peer} sent a part with a header of {len(frame.header)} bytes; at most {most} are allowed"
            )
        if frame.kind is not FrameKind.PART:
            raise PartInvalid(f"peer {peer} sent a {frame.kind.name} frame where a PART was due")
        try:
            header = dp.PartHeader.FromString(frame.header)
        except DecodeError as error:
            raise PartInvalid(f"peer {peer} sent a part whose header does not parse") from error
        due = (index if number_in_stream is None else number_in_stream, self._parts[index].elements, self.codec.number)
        if (header.index, header.elements, header.codec) != due:
            raise PartInvalid(
                f"peer {peer} sent part {header.index} with {header.elements} elements in codec {header.codec}; "
                f"part {due[0]} with {due[1]} elements in codec {due[2]} was due"
            )
        factors = tuple(header.factors)
        pairs = zip(factors, self._weights, strict=len(factors) == len(self._weights))
        if len(factors) not in (0, len(self._weights)) or not all(
            0 <= factor <= (weight > 0) for factor, weight in pairs
        ):
            raise PartInvalid(f"peer {peer} sent {len(factors)} factors of a sum, or one that is not between 0 and 1")
        return factors

    async def compute_part(self, index: int, work: Callable[[], tuple[Buffer, T]]) -> T:
        """Compute a part's encoded bytes with `work` in the executor and store them; returns its second result.

        Raises `PartInvalid`, and what `work` raises.
        """

        def work_and_apply() -> tuple[Buffer, bytes, T]:
            body, rest = work()
            return *self._apply(self._parts[index], body), rest

        self._bodies[index], self._digests[index], rest = await self.compute(work_and_apply)
        return rest

    async def put(self, index: int, body: Buffer, digest: bytes | None = None, factors: tuple[float, ...] = ()) -> None:
        """Store a part's encoded bytes, and the factors that its reducer reports.

        Raises `PartInvalid` if they do not decode, do not match `digest`, or are larger than an average can be.
        """
        limit = math.inf if self._norm_limit is None else self._norm_limit(self._parts[index].elements)
        stored = await self.compute(self._apply, self._parts[index], body, digest, limit)
        self._bodies[index], self._digests[index] = stored
        self._factors.pop(index, None)
        if factors:
            self._factors[index] = factors

    async def zero(self, indices: Collection[int]) -> None:
        """Replace these parts by a zero update."""
        for index in indices:
            self._bodies[index], self._digests[index] = None, b""
        await self.compute(self._clear, [self._parts[index] for index in indices])

    def drop_sink(self) -> None:
        """Free the sink, because tracebacks of ended streams refer to this object. The encoded bytes stay."""
        self._sink = lambda start, values_E: None

    def release(self) -> None:
        """Free the sink and the encoded bytes."""
        self.drop_sink()
        self._bodies = [None] * len(self._parts)

    async def compute(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Run `work` in the executor. If cancelled, wait for it first: no part may change after this call."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):  # a second cancellation
                    await asyncio.wait([future])
            raise

    def _apply(
        self, part: Part, body: Buffer, digest: bytes | None = None, norm_limit: float = math.inf
    ) -> tuple[Buffer, bytes]:
        found = hashlib.sha256(body).digest()
        if digest is not None and found != digest:
            raise PartInvalid("the bytes of a part do not match the agreed digest")
        sink, norms = self._sink, [0.0]

        def take(first: int, values_C: Tensor) -> None:
            if norm_limit < math.inf:
                norms.append(float(torch.linalg.vector_norm(values_C)))
            sink(part.start + first, values_C)

        self.codec.open(body, part.elements).decode_pieces(take)
        if math.hypot(*norms) > norm_limit:  # the sink gets the part again, or a zero update, before it is used
            raise PartInvalid(f"an average has the norm {math.hypot(*norms):.3g}; {norm_limit:.3g} is possible")
        return body, found

    def _clear(self, cleared: list[Part]) -> None:
        for part in cleared:
            self._sink(part.start, torch.zeros(part.elements))
