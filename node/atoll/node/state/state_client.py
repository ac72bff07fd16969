"""The asking side of `/atoll/state/1`: questions to one member, answered in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta

from google.protobuf.message import DecodeError

from atoll.core.errors import NotFound, PeerMisbehaved
from atoll.core.frames import FrameKind
from atoll.core.manifest import Head, parse_and_verify_head
from atoll.node.state.pieces import Kind
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp

PROTOCOL = "/atoll/state/1"
_AHEAD = 8  # manifests asked for before the first has come; both sides buffer little
_MAX_SPANS = 16  # that one member can hold at once


class StateClient:
    """A stream to one member. Every answer must come within `timeout`."""

    def __init__(self, stream: Stream, run_id: str, timeout: timedelta) -> None:
        self._stream = stream
        self._run_id = run_id
        self.timeout = timeout
        self.held: tuple[range, ...] = ()  # layers that the member said it holds, with its head; none: all

    @classmethod
    async def connect(cls, network: Network, peer: str, run_id: str, timeout: timedelta) -> StateClient:
        """Dial. Raises `Unreachable`, `Rejected`."""
        return cls(await network.open(peer, PROTOCOL, timeout), run_id, timeout)

    @property
    def has_own_connection(self) -> bool:
        """As its stream says."""
        return self._stream.has_own_connection

    async def close(self) -> None:
        """End it; twice is fine."""
        await self._stream.close()

    async def manifest(self, number: int | None) -> Head:
        """The manifest of round `number` (None: the head), its votes verified. Raises `NotFound`."""
        await self._ask_manifest(number)
        head = await self._manifest(number)
        if head is None:
            raise NotFound(f"{self._stream.peer_id} does not hold that manifest")
        return head

    async def manifests(self, numbers: Sequence[int]) -> AsyncIterator[Head]:
        """Those of `numbers` that the member holds, their votes verified; several are asked for at once."""
        for number in numbers[:_AHEAD]:
            await self._ask_manifest(number)
        for place, number in enumerate(numbers):
            head = await self._manifest(number)
            if head is not None:
                yield head
            if place + _AHEAD < len(numbers):
                await self._ask_manifest(numbers[place + _AHEAD])

    async def _ask_manifest(self, number: int | None) -> None:
        request = dp.StateRequest(run_id=self._run_id)
        if number is None:
            request.head_manifest = True
        else:
            request.manifest_round = number
        await self._stream.send(FrameKind.MESSAGE, request.SerializeToString())

    async def _manifest(self, number: int | None) -> Head | None:
        reply = await self._reply()
        if reply.WhichOneof("what") is None:
            return None
        if reply.WhichOneof("what") != "manifest":
            raise PeerMisbehaved(f"{self._stream.peer_id} answered a request for a manifest with something else")
        if number is None:
            self.held = tuple(range(span.first, span.last + 1) for span in reply.held[:_MAX_SPANS])
        head = await asyncio.to_thread(
            parse_and_verify_head, reply.manifest, self._run_id
        )  # it may carry thousands of votes
        if number is not None and head.round != number:
            raise PeerMisbehaved(f"{self._stream.peer_id} answered with round {head.round} when asked for {number}")
        return head

    async def request_slice(self, kind: Kind, state_hash: bytes, start: int, end: int) -> None:
        """Ask for some elements; `answer` brings the oldest question's."""
        piece = dp.StateSlice(manifest_hash=state_hash, start=start, end=end)
        request = (
            dp.StateRequest(run_id=self._run_id, anchor=piece)
            if kind == "anchor"
            else dp.StateRequest(run_id=self._run_id, momentum=piece)
        )
        await self._stream.send(FrameKind.MESSAGE, request.SerializeToString())

    async def answer(self, elements: int) -> bytes | memoryview:
        """The bytes of `elements` values. Raises `NotFound` when that state is not held (any more), `Busy`."""
        reply = await self._reply()
        if reply.body_bytes != 4 * elements:
            raise PeerMisbehaved(f"{self._stream.peer_id} offers {reply.body_bytes} bytes, not {4 * elements}")
        frame = await self._stream.receive(self.timeout)
        if frame.kind is not FrameKind.BODY or len(frame.body) != 4 * elements:
            raise PeerMisbehaved(f"{self._stream.peer_id} sent {len(frame.body)} bytes, not {4 * elements}")
        return frame.body

    async def _reply(self) -> dp.StateReply:
        frame = await self._stream.receive(self.timeout)
        if frame.kind is not FrameKind.MESSAGE:
            raise PeerMisbehaved(f"{self._stream.peer_id} sent a frame of kind {frame.kind.name} out of turn")
        try:
            return dp.StateReply.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved(f"{self._stream.peer_id} sent a state reply that does not parse") from error
