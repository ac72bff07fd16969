"""Committed state between members: serving it, and fetching it with every byte checked.

A newcomer asks the members of its plan for their heads, believes the newest that enough of them have signed,
and fetches anchor and momentum from those who hold it; each layer must match the digest in the
manifest before any of it is used. A donor that sends wrong bytes costs a retry with the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from google.protobuf.message import DecodeError
from torch import Tensor

from atoll.core import log
from atoll.core.errors import AtollError, NotFound, PeerMisbehaved, Unreachable
from atoll.core.frames import FrameKind
from atoll.core.manifest import Head, contributors, read_head
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.state.anchor import AnchorState, Fetched
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
        self._serving: set[str] = set()
        network.handle(PROTOCOL, self._handle)

    async def _handle(self, stream: Stream) -> None:
        if stream.peer_id in self._serving:
            raise PeerMisbehaved("one question about state at a time")
        self._serving.add(stream.peer_id)
        try:
            await self._answer(stream)
        finally:
            self._serving.discard(stream.peer_id)

    async def _answer(self, stream: Stream) -> None:
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
        body_bytes = 4 * (piece.end - piece.start)
        await stream.send(FrameKind.MESSAGE, dp.StateReply(body_bytes=body_bytes).SerializeToString())
        for start in range(piece.start, piece.end, _CHUNK_ELEMENTS):
            now = self._current()
            if now is None or now[0].round != piece.round:
                raise NotFound(f"the head moved past round {piece.round}")
            chunk_E = vector_E[
                start : min(start + _CHUNK_ELEMENTS, piece.end)
            ].clone()  # ours may move while it is sent
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
        if number is not None and head.round != number:
            raise PeerMisbehaved(f"{peer} answered with round {head.round} when asked for {number}")
        return head
    finally:
        await stream.close()


async def find_manifest(network: Network, peers: Sequence[str], run_id: str, round_id: RoundId) -> Head | None:
    """The manifest that decided `round_id`, signed by all of `peers`, or None when nobody reachable has one."""
    for head in (await _ask_all(network, peers, run_id, round_id.number)).values():
        if head is not None and head.manifest.round == round_id.to_proto() and head.signers.issuperset(peers):
            return head
    return None


async def newest_round(network: Network, plan: Plan, held: Head) -> int:
    """The round of the head that `catch_up` would fetch; that of `held` when nothing is ahead."""
    best = await _common_head(network, plan)
    return best.round if best is not None else held.round


async def catch_up(network: Network, plan: Plan, state: AnchorState, held: Head | None) -> Fetched | None:
    """The state at the head of the plan's members, checked; None when `held` is that head or is newer.

    Raises `Unreachable` when no head can be believed yet or no donor's bytes were true.
    """
    best = await _common_head(network, plan)
    if best is None:
        raise Unreachable("no head that enough members of the plan have signed was found")
    if held is not None and (best.hash == held.hash or best.round < held.round):
        return None
    elements = state.anchor_E.numel()
    for peer in plan.members:
        if peer == network.peer_id:
            continue
        try:
            anchor_E = await _fetch_vector(network, peer, plan.run_id, "anchor", best.round, elements)
            momentum_E = await _fetch_vector(network, peer, plan.run_id, "momentum", best.round, elements)
            return await asyncio.to_thread(state.check, anchor_E, momentum_E, best)
        except AtollError as error:
            _log.warning("donor failed", peer=peer, round=best.round, reason=str(error))
    raise Unreachable(f"no member gave round {best.round} with its true digests")


async def _common_head(network: Network, plan: Plan) -> Head | None:
    """The newest head that can be believed, among those that the plan's members offer.

    Genesis is believed by the hash in the plan. A later manifest names its members itself, so their signatures
    alone prove nothing: a strict majority of the plan's members (without us, and without newcomers who say that
    they hold nothing yet) must have signed it, and all of them where it was made under this very plan.
    """
    answers = await _ask_all(network, plan.members, plan.run_id, None)
    empty = {peer for peer, head in answers.items() if head is None}
    voters = set(plan.members) - {network.peer_id} - empty
    offered = {head.hash: head for head in answers.values() if head is not None}
    believed = [head for head in offered.values() if _believed(head, plan, voters)]
    return max(believed, key=lambda head: head.round, default=None)


def _believed(head: Head, plan: Plan, voters: set[str]) -> bool:
    if head.round == 0:
        return head.hash == plan.genesis_manifest_hash
    if head.manifest.round.plan_version == plan.version and not head.signers.issuperset(plan.members):
        return False
    return set(contributors(head)) <= head.signers and 2 * len(voters & head.signers) > len(voters)


async def _ask_all(network: Network, peers: Sequence[str], run_id: str, number: int | None) -> dict[str, Head | None]:
    """What each reachable peer holds; None for one that says it holds nothing."""

    async def one(peer: str) -> tuple[str, Head | None] | None:
        try:
            return peer, await fetch_manifest(network, peer, run_id, number)
        except NotFound:
            return peer, None
        except AtollError as error:
            _log.debug("no manifest", peer=peer, reason=str(error))
            return None

    answers = await asyncio.gather(*(one(peer) for peer in peers if peer != network.peer_id))
    return dict(answer for answer in answers if answer is not None)


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
