"""The client of `/atoll/state/1`: requests manifests and slices of state from one member.

The member answers in the order of the requests, so several may be in flight. `state_server` is the other side.
"""

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
_MANIFESTS_IN_FLIGHT = 8  # few, because both sides buffer little
_MAX_SPANS = 16  # accepted from one member


class StateClient:
    """A stream to one member. Every answer must arrive within `timeout`."""

    def __init__(self, stream: Stream, run_id: str, timeout: timedelta) -> None:
        self._stream = stream
        self._run_id = run_id
        self.timeout = timeout
        self.held: tuple[range, ...] = ()  # the member's layers, as it reported with its head; empty: all

    @classmethod
    async def connect(cls, network: Network, peer: str, run_id: str, timeout: timedelta) -> StateClient:
        """Open a stream to `peer`. Raises `Unreachable`, `Rejected`."""
        return cls(await network.open(peer, PROTOCOL, timeout), run_id, timeout)

    @property
    def has_own_connection(self) -> bool:
        """Whether the stream has a connection of its own (`Stream.has_own_connection`)."""
        return self._stream.has_own_connection

    async def close(self) -> None:
        """Close the stream; may be called twice."""
        await self._stream.close()

    async def manifest(self, number: int | None) -> Head:
        """Fetch the manifest of round `number` (None: the head) and verify its votes. Raises `NotFound`."""
        await self._request_manifest(number)
        head = await self._receive_manifest(number)
        if head is None:
            which = "a head" if number is None else f"the manifest of round {number}"
            raise NotFound(f"peer {self._stream.peer_id} does not have {which}")
        return head

    async def manifests(self, numbers: Sequence[int]) -> AsyncIterator[Head]:
        """Fetch the manifests of `numbers` that the member has, several at a time, and verify their votes."""
        for number in numbers[:_MANIFESTS_IN_FLIGHT]:
            await self._request_manifest(number)
        for place, number in enumerate(numbers):
            head = await self._receive_manifest(number)
            if head is not None:
                yield head
            if place + _MANIFESTS_IN_FLIGHT < len(numbers):
                await self._request_manifest(numbers[place + _MANIFESTS_IN_FLIGHT])

    async def _request_manifest(self, number: int | None) -> None:
        request = dp.StateRequest(run_id=self._run_id)
        if number is None:
            request.head_manifest = True
        else:
            request.manifest_round = number
        await self._stream.send(FrameKind.MESSAGE, request.SerializeToString())

    async def _receive_manifest(self, number: int | None) -> Head | None:
        reply = await self._receive_reply()
        if reply.WhichOneof("what") is None:
            return None
        if reply.WhichOneof("what") != "manifest":
            raise PeerMisbehaved(f"peer {self._stream.peer_id} answered a manifest request with another message")
        if number is None:
            self.held = tuple(range(span.first, span.last + 1) for span in reply.held[:_MAX_SPANS])
        # in a thread, because it may have thousands of votes
        head = await asyncio.to_thread(parse_and_verify_head, reply.manifest, self._run_id)
        if number is not None and head.round != number:
            raise PeerMisbehaved(
                f"peer {self._stream.peer_id} sent the manifest of round {head.round} instead of round {number}"
            )
        return head

    async def request_slice(self, kind: Kind, state_hash: bytes, start: int, end: int) -> None:
        """Request elements [start, end) of a vector. `receive_slice` returns the answer to the oldest request."""
        piece = dp.StateSlice(manifest_hash=state_hash, start=start, end=end)
        request = (
            dp.StateRequest(run_id=self._run_id, anchor=piece)
            if kind == "anchor"
            else dp.StateRequest(run_id=self._run_id, momentum=piece)
        )
        await self._stream.send(FrameKind.MESSAGE, request.SerializeToString())

    async def receive_slice(self, elements: int) -> bytes | memoryview:
        """Receive the bytes of `elements` values. Raises `NotFound` when the member lacks that state, `Busy`."""
        reply = await self._receive_reply()
        if reply.body_bytes != 4 * elements:
            raise PeerMisbehaved(
                f"peer {self._stream.peer_id} announced {reply.body_bytes} bytes of state instead of {4 * elements}"
            )
        frame = await self._stream.receive(self.timeout)
        if frame.kind is not FrameKind.BODY or len(frame.body) != 4 * elements:
            raise PeerMisbehaved(
                f"peer {self._stream.peer_id} sent a {frame.kind.name} frame with {len(frame.body)} bytes; "
                f"a BODY frame with {4 * elements} was due"
            )
        return frame.body

    async def _receive_reply(self) -> dp.StateReply:
        frame = await self._stream.receive(self.timeout)
        if frame.kind is not FrameKind.MESSAGE:
            raise PeerMisbehaved(f"peer {self._stream.peer_id} sent a {frame.kind.name} frame where a MESSAGE was due")
        try:
            return dp.StateReply.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved(f"peer {self._stream.peer_id} sent a state reply that does not parse") from error
