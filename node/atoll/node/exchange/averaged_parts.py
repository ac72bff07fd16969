"""The average as one member has it: encoded parts, the very bytes that others have, and what they decode to.

The encoded bytes are kept because they are what is digested, compared, and given to members that lack them. Decoded, a
part goes to whoever takes the average: `put` and `zero` are the only ways to change either.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar, TypeVarTuple, Unpack

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core.errors import PartInvalid
from atoll.core.frames import Buffer, Frame, FrameKind
from atoll.node.exchange.codecs import BY_NUMBER, PIECE_ELEMENTS, CheckedPart, Codec
from atoll.node.exchange.partition import Part, ReduceRange, reducer_shares
from atoll.v1 import dataplane_pb2 as dp

_MOST_HEADER_BYTES = 64  # a `PartHeader` has 16

AverageSink = Callable[[int, Tensor], object]
"""Called with a first element and the values from there on, fp32, which are the caller's again afterwards: for all of a
part piece by piece, and again when they change. From threads, for one part after the other or side by side, but never
twice at once for the same."""

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


class Average:
    """The parts of one round's average, by their index in the order of the vector."""

    def __init__(self, start: dp.Start, sink: AverageSink, executor: Executor) -> None:
        ranges = [ReduceRange(piece.reducer, piece.start, piece.end) for piece in start.partition]
        self.codec: Codec = BY_NUMBER[start.codec]
        self.reducer_shares = reducer_shares(ranges, start.part_elements)
        self._parts = [part for share in self.reducer_shares for part in share.parts]
        self._sink = sink
        self._executor = executor
        self._bodies: list[Buffer | None] = [None] * len(self._parts)
        self._digests = [b""] * len(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """SHA-256 of each part's encoded bytes; empty for what is missing."""
        return tuple(self._digests)

    def body(self, index: int) -> Buffer | None:
        """A part's encoded bytes, if they are here."""
        return self._bodies[index]

    def header(self, index: int, number_in_stream: int | None = None) -> bytes:
        """Return the `PartHeader` of a part; `number_in_stream` replaces its number in the vector."""
        elements = self._parts[index].elements
        number = index if number_in_stream is None else number_in_stream
        return dp.PartHeader(index=number, elements=elements, codec=self.codec.number).SerializeToString()

    def check(self, frame: Frame, index: int, peer: str, number_in_stream: int | None = None) -> None:
        """Compare a frame with what is due before anything is done with its body. Raises `PartInvalid`."""
        if len(frame.header) > _MOST_HEADER_BYTES:  # it is kept with the body
            raise PartInvalid(f"{peer} sent a part with a header of {len(frame.header)} bytes")
        if frame.kind is not FrameKind.PART:
            raise PartInvalid(f"{peer} sent a {frame.kind.name} frame where a part was due")
        try:
            header = dp.PartHeader.FromString(frame.header)
        except DecodeError as error:
            raise PartInvalid(f"{peer} sent a part without a header") from error
        due = (index if number_in_stream is None else number_in_stream, self._parts[index].elements, self.codec.number)
        if (header.index, header.elements, header.codec) != due:
            raise PartInvalid(f"{peer} sent part {header.index} with {header.elements} elements out of turn")

    def open(self, body: Buffer, part: Part) -> CheckedPart:
        """Somebody's values for a part. Raises `PartInvalid`."""
        return self.codec.open(body, part.elements)

    async def compute_part(self, index: int, work: Callable[[], tuple[Buffer, T]]) -> T:
        """Take the bytes of a part that `work` makes, in the executor. Raises `PartInvalid`, and what it raises."""

        def made() -> tuple[Buffer, bytes, T]:
            body, rest = work()
            return *self._apply(self._parts[index], body, None), rest

        self._bodies[index], self._digests[index], rest = await self.compute(made)
        return rest

    async def put(self, index: int, body: Buffer, digest: bytes | None = None) -> None:
        """Take a part's encoded bytes. Raises `PartInvalid` if they do not decode, or do not have that digest."""
        self._bodies[index], self._digests[index] = await self.compute(self._apply, self._parts[index], body, digest)

    async def zero(self, indices: Collection[int]) -> None:
        """Make these parts a zero update."""
        for index in indices:
            self._bodies[index], self._digests[index] = None, b""
        await self.compute(self._clear, [self._parts[index] for index in indices])

    def drop_sink(self) -> None:
        """Forget who took the average; tracebacks of ended streams would keep it. Others are still served."""
        self._sink = lambda start, values_E: None

    def release(self) -> None:
        """Forget the encoded bytes, too."""
        self.drop_sink()
        self._bodies = [None] * len(self._parts)

    async def compute(self, work: Callable[[Unpack[Arguments]], T], *arguments: *Arguments) -> T:
        """Run `work` in the executor. When cancelled, it still waits: nobody takes a part behind our back."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                with suppress(asyncio.CancelledError):  # again
                    await asyncio.wait([future])
            raise

    def _apply(self, part: Part, body: Buffer, digest: bytes | None) -> tuple[Buffer, bytes]:
        found = hashlib.sha256(body).digest()
        if digest is not None and found != digest:
            raise PartInvalid("the bytes of a part do not have the digest that was settled")
        opened, sink, values_C = self.open(body, part), self._sink, torch.empty(min(PIECE_ELEMENTS, part.elements))
        for first in range(0, part.elements, PIECE_ELEMENTS):
            some_C = values_C[: part.elements - first]
            opened.decode_into(first, some_C)
            sink(part.start + first, some_C)
        return body, found

    def _clear(self, cleared: list[Part]) -> None:
        for part in cleared:
            self._sink(part.start, torch.zeros(part.elements))
