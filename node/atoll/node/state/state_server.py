"""The server of `/atoll/state/1`: committed manifests, and slices of the head's state.

`state_client` is the other side. Besides its current state a node serves the layers of its previous spans: no other
node may have them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import pairwise

from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core import log
from atoll.core.errors import Busy, CheckpointCorrupt, NotFound, PeerMisbehaved, Unreachable
from atoll.core.frames import FrameKind
from atoll.core.manifest import Head
from atoll.node.state.anchor import AnchorState
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.pieces import Kind
from atoll.node.state.state_client import PROTOCOL
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2, plan_pb2

MAX_SLICE_ELEMENTS = 1 << 20  # per request: 4 MiB of fp32 to copy
STREAMS_PER_PEER = 4  # one to survey heads and one to fetch; the same again for a prefetch
_IDLE_TIMEOUT = timedelta(seconds=30)
_MAX_REMEMBERED_HEADS = 128  # twice the largest number of fragments

_log = log.get("state")


class StateServer:
    """Answers the requests of other members from this node's states.

    - `current`: returns the head and its state, or None if there is no state or it is changing.
    - `former`: returns states that the node held before its span changed.

    The server calls both before every slice, so a slice never mixes two states.
    """

    def __init__(
        self,
        network: Network,
        run_id: str,
        manifests: ManifestStore,
        current: Callable[[], tuple[Head, AnchorState] | None],
        former: Callable[[], Sequence[tuple[Head, AnchorState]]] = lambda: (),
    ) -> None:
        self._run_id = run_id
        self._manifests = manifests
        self._current = current
        self._former = former
        self._layers = range(0)  # of the current state, kept while it changes
        self._last_head: Head | None = None  # the newest head of this node, kept while the state changes
        self._versions: dict[bytes, tuple[bytes, ...]] = {}  # head hash → its serialised layer states, newest last
        self._streams: Counter[str] = Counter()
        network.handle(PROTOCOL, self._handle)

    async def _handle(self, stream: Stream) -> None:
        if self._streams[stream.peer_id] >= STREAMS_PER_PEER:
            raise PeerMisbehaved(
                f"peer {stream.peer_id} opened more than {STREAMS_PER_PEER} state streams at once; close one first"
            )
        self._streams[stream.peer_id] += 1
        try:
            while True:
                try:
                    frame = await stream.receive(_IDLE_TIMEOUT)
                except Unreachable:
                    return  # the peer closed the stream or was idle for too long
                await self._answer(stream, frame.header)
        finally:
            self._streams[stream.peer_id] -= 1
            if not self._streams[stream.peer_id]:
                del self._streams[stream.peer_id]

    async def _answer(self, stream: Stream, header: bytes) -> None:
        try:
            request = dp.StateRequest.FromString(header)
        except DecodeError as error:
            raise PeerMisbehaved("a state request does not parse") from error
        if request.run_id != self._run_id:
            raise NotFound(f"this node is in run {self._run_id!r}; the request is for another run")
        match request.WhichOneof("what"):
            case "manifest_round":
                await self._send_manifest(stream, await asyncio.to_thread(self._stored, request.manifest_round))
            case "head_manifest":
                head = self._head()
                await self._send_manifest(stream, head.committed if head else None, self._held())
            case "anchor":
                await self._send_slice(stream, request.anchor, "anchor")
            case "momentum":
                await self._send_slice(stream, request.momentum, "momentum")
            case _:
                raise PeerMisbehaved("a state request asks for nothing")

    def remember_head(self, head: Head) -> None:
        """Remember a valid head, whether or not this node holds its state.

        Other members may request its state by its hash.
        """
        self._versions_of(head)

    def _head(self) -> Head | None:
        """The head to report: of the current state or, while that lacks layers, the newest of the former states."""
        current = self._current_head_and_state()
        if current is None and self._former():
            former = max((head for head, _ in self._former()), key=lambda head: head.round)
            if self._last_head is None or self._last_head.round < former.round:
                self._last_head = former
        return self._last_head

    def _current_head_and_state(self) -> tuple[Head, AnchorState] | None:
        """The current state, unless it is changing. Remembers its head and its layer versions."""
        current = self._current()
        if current is not None:
            self._last_head, self._layers = current[0], current[1].layers
            self._versions_of(current[0])
        return current

    def _versions_of(self, head: Head) -> tuple[bytes, ...]:
        """The serialised layer states of `head`. Remembers them."""
        if head.hash not in self._versions:
            self._versions[head.hash] = tuple(layer.SerializeToString() for layer in head.manifest.layers)
            if len(self._versions) > _MAX_REMEMBERED_HEADS:
                del self._versions[next(iter(self._versions))]
        return self._versions[head.hash]

    def _held(self) -> list[plan_pb2.Span]:
        """The spans to report with the head; empty when a state here has all layers."""
        spans = [self._layers, *(state.layers for _, state in self._former())]
        if self._last_head is None or any(len(span) == len(self._last_head.manifest.layers) for span in spans):
            return []
        return [plan_pb2.Span(first=span.start, last=span.stop - 1) for span in spans if span]

    def _stored(self, number: int) -> manifest_pb2.CommittedManifest | None:
        try:
            return self._manifests.get(number)
        except CheckpointCorrupt as error:
            _log.warning("manifest not served", round=number, reason=str(error))
            return None

    async def _send_manifest(
        self, stream: Stream, committed: manifest_pb2.CommittedManifest | None, held: Sequence[plan_pb2.Span] = ()
    ) -> None:
        reply = dp.StateReply() if committed is None else dp.StateReply(manifest=committed, held=held)
        await stream.send(FrameKind.MESSAGE, reply.SerializeToString())

    async def _send_slice(self, stream: Stream, piece: dp.StateSlice, kind: Kind) -> None:
        first_E, vector_E = self._vector(piece, kind)
        start, end = piece.start - first_E, piece.end - first_E
        if not 0 <= start < end <= vector_E.numel() or end - start > MAX_SLICE_ELEMENTS:
            raise PeerMisbehaved(
                f"a state request asks for elements {piece.start} to {piece.end}; this node has "
                f"{first_E} to {first_E + vector_E.numel()} and sends at most {MAX_SLICE_ELEMENTS} per request"
            )
        values_E = vector_E[start:end].clone()  # copy, because the state may change during the send
        await stream.send(FrameKind.MESSAGE, dp.StateReply(body_bytes=4 * values_E.numel()).SerializeToString())
        await stream.send(FrameKind.BODY, b"", values_E.numpy().data.cast("B"))

    def _vector(self, piece: dp.StateSlice, kind: Kind) -> tuple[int, Tensor]:
        """Find a vector with the requested elements.

        Returns the number of its first element in the model, and the vector. Raises `Busy` while the state changes,
        `NotFound`.
        """
        current = self._current_head_and_state()
        for held in (current, *self._former()):
            if held is not None and self._has_slice(piece, *held):
                return held[1].start, held[1].vector(kind)
        if current is None:
            raise Busy("this node's state is changing; ask again")
        raise NotFound(
            "this node does not have the requested state: it is not the head, or its layers are on other nodes"
        )

    def _has_slice(self, piece: dp.StateSlice, head: Head, state: AnchorState) -> bool:
        """Whether `state`, at `head`, has the requested elements with the values of the requested state."""
        if not state.is_whole and not state.start <= piece.start < piece.end <= state.end:
            return False
        return head.hash == piece.manifest_hash or self._is_unchanged(piece, head, state)

    def _is_unchanged(self, piece: dp.StateSlice, head: Head, state: AnchorState) -> bool:
        """Whether the requested state is of an earlier head and these layers have not changed up to `head`."""
        before = self._versions.get(piece.manifest_hash)
        if before is None:
            return False
        layers = zip(before, self._versions_of(head), pairwise(state.offsets), strict=True)
        return all(old == new for old, new, (start, end) in layers if start < piece.end and piece.start < end)
