"""Committed state between members: serving it, and fetching it with every byte checked.

A newcomer asks the members of its plan for their head, takes the one that most of them hold, checks its
signatures, and fetches anchor and momentum from those who hold it; each layer must match the digest in the
manifest before any of it is used. A donor that sends wrong bytes costs a retry with the next one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core import log
from atoll.core.errors import AtollError, NotFound, PeerMisbehaved, Unreachable
from atoll.core.frames import FrameKind
from atoll.core.manifest import Head, contributors, read_head, require_signers
from atoll.node.state.anchor import AnchorState
from atoll.node.state.manifests import ManifestStore
from atoll.node.transport import Network, Stream
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

PROTOCOL = "/atoll/state/1"
_CHUNK_ELEMENTS = 1 << 20  # 4 MiB of fp32 a frame
_FRAME_TIMEOUT = timedelta(seconds=15)

_log = log.get("catchup")


class StateServer:
    """Answers `/atoll/state/1` from what this node has committed."""

    def __init__(
        self,
        network: Network,
        run_id: str,
        manifests: ManifestStore,
        current: Callable[[], tuple[Head, AnchorState] | None],
    ) -> None:
        self._run_id = run_id
        self._manifests = manifests
        self._current = current
        network.handle(PROTOCOL, self._handle)

    async def _handle(self, stream: Stream) -> None:
        frame = await stream.receive(_FRAME_TIMEOUT)
        try:
            request = dp.StateRequest.FromString(frame.header)
        except DecodeError as error:
            raise PeerMisbehaved("a state request does not parse") from error
        if request.run_id != self._run_id:
            raise NotFound(f"run {request.run_id!r} is not held here")
        match request.WhichOneof("what"):
            case "manifest_round":
                await self._send_manifest(stream, self._manifests.get(request.manifest_round))
            case "head_manifest":
                current = self._current()
                await self._send_manifest(stream, current[0].committed if current else None)
            case "anchor":
                await self._send_vector(stream, request.anchor, "anchor")
            case "momentum":
                await self._send_vector(stream, request.momentum, "momentum")
            case _:
                raise PeerMisbehaved("a state request asks for nothing")

    async def _send_manifest(self, stream: Stream, committed: manifest_pb2.CommittedManifest | None) -> None:
        reply = dp.StateReply() if committed is None else dp.StateReply(manifest=committed)
        await stream.send(FrameKind.MESSAGE, reply.SerializeToString())
        await _until_closed(stream)

    async def _send_vector(self, stream: Stream, piece: dp.StateSlice, kind: str) -> None:
        current = self._current()
        if current is None or current[0].round != piece.round:
            raise NotFound(f"round {piece.round} is not the head here")
        vector_E = current[1].anchor_E if kind == "anchor" else current[1].momentum_E
        if not 0 <= piece.start < piece.end <= vector_E.numel():
            raise PeerMisbehaved("a state request is outside the vector")
        copy_E = vector_E[piece.start : piece.end].clone()  # the head may move while this is sent
        body_bytes = 4 * copy_E.numel()
        await stream.send(FrameKind.MESSAGE, dp.StateReply(body_bytes=body_bytes).SerializeToString())
        for chunk_E in torch.split(copy_E, _CHUNK_ELEMENTS):
            await stream.send(FrameKind.BODY, b"", chunk_E.numpy().data.cast("B"))
        await _until_closed(stream)


async def fetch_manifest(network: Network, peer: str, run_id: str, number: int | None) -> Head:
    """The manifest of round `number` (None: the head) from one member, its signatures checked."""
    request = dp.StateRequest(run_id=run_id)
    if number is None:
        request.head_manifest = True
    else:
        request.manifest_round = number
    stream = await _ask(network, peer, request)
    try:
        reply = await _reply(stream)
        if reply.WhichOneof("what") is None:
            raise NotFound(f"{peer} does not hold that manifest")
        if reply.WhichOneof("what") != "manifest":
            raise PeerMisbehaved(f"{peer} answered a request for a manifest with something else")
        head = read_head(reply.manifest, run_id)
        require_signers(head, contributors(head))
        return head
    finally:
        await stream.close()


async def find_manifest(network: Network, peers: Sequence[str], run_id: str, number: int) -> Head | None:
    """The manifest of one round from whoever has it, or None when nobody reachable does."""
    return next((head for head in await _ask_all(network, peers, run_id, number)), None)


async def catch_up(
    network: Network, peers: Sequence[str], run_id: str, genesis_hash: bytes, state: AnchorState, held: Head | None
) -> Head:
    """Bring `state` to the head that most of `peers` hold. Returns it; `held` when nothing is newer.

    Raises `Unreachable` when nobody answers or no donor's bytes were true.
    """
    answers = await _ask_all(network, peers, run_id, None)
    heads = [head for head in answers if head.round > 0 or head.hash == genesis_hash]
    if not heads:
        raise Unreachable("no member of the plan answered with its head")
    votes = Counter(head.hash for head in heads)
    best = max(heads, key=lambda head: (votes[head.hash], head.round))
    if held is not None and best.round <= held.round:
        return held
    elements = state.anchor_E.numel()
    for peer in await _holders(network, peers, run_id, best):
        try:
            anchor_E = await _fetch_vector(network, peer, run_id, "anchor", best.round, elements)
            momentum_E = await _fetch_vector(network, peer, run_id, "momentum", best.round, elements)
            state.adopt(anchor_E, momentum_E, best)
        except AtollError as error:
            _log.warning("donor failed", peer=peer, round=best.round, reason=str(error))
            continue
        return best
    raise Unreachable(f"no member gave round {best.round} with its true digests")


async def _holders(network: Network, peers: Sequence[str], run_id: str, head: Head) -> list[str]:
    async def holds(peer: str) -> bool:
        try:
            return (await fetch_manifest(network, peer, run_id, None)).hash == head.hash
        except AtollError:
            return False

    answers = await asyncio.gather(*(holds(peer) for peer in peers))
    return [peer for peer, answer in zip(peers, answers, strict=True) if answer]


async def _ask_all(network: Network, peers: Sequence[str], run_id: str, number: int | None) -> list[Head]:
    async def one(peer: str) -> Head | None:
        try:
            return await fetch_manifest(network, peer, run_id, number)
        except AtollError as error:
            _log.debug("no manifest", peer=peer, reason=str(error))
            return None

    answers = await asyncio.gather(*(one(peer) for peer in peers if peer != network.peer_id))
    return [head for head in answers if head is not None]


async def _fetch_vector(
    network: Network, peer: str, run_id: str, kind: str, round_number: int, elements: int
) -> Tensor:
    piece = dp.StateSlice(round=round_number, start=0, end=elements)
    request = dp.StateRequest(run_id=run_id, **{kind: piece})  # type: ignore[arg-type]
    stream = await _ask(network, peer, request)
    vector_E = torch.empty(elements)
    target = vector_E.numpy().data.cast("B")
    try:
        reply = await _reply(stream)
        if reply.body_bytes != 4 * elements:
            raise PeerMisbehaved(f"{peer} offers {reply.body_bytes} bytes of {kind}, not {4 * elements}")
        filled = 0
        while filled < 4 * elements:
            body = (await stream.receive(_FRAME_TIMEOUT)).body
            if not 0 < len(body) <= 4 * elements - filled:
                raise PeerMisbehaved(f"{peer} sent a piece of {kind} that does not fit")
            target[filled : filled + len(body)] = body
            filled += len(body)
    finally:
        await stream.close()
    return vector_E


async def _ask(network: Network, peer: str, request: dp.StateRequest) -> Stream:
    stream = await network.open(peer, PROTOCOL, _FRAME_TIMEOUT)
    try:
        await stream.send(FrameKind.MESSAGE, request.SerializeToString())
    except BaseException:
        await stream.close()
        raise
    return stream


async def _reply(stream: Stream) -> dp.StateReply:
    frame = await stream.receive(_FRAME_TIMEOUT)
    try:
        return dp.StateReply.FromString(frame.header)
    except DecodeError as error:
        raise PeerMisbehaved(f"{stream.peer_id} sent a state reply that does not parse") from error


async def _until_closed(stream: Stream) -> None:
    """Wait for the reader to hang up: closing first could cut what is still in flight."""
    try:
        await stream.receive(_FRAME_TIMEOUT)
    except Unreachable:
        return
