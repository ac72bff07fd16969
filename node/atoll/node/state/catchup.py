"""Catching up: from whatever this node holds to the state that the members of its plan agree on.

`heads` says which head to believe, `fetch` brings its state from all who hold it at once. When the head moves on
meanwhile, the fetch begins again there and keeps every piece that did not change; so does a node back from sleep.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
from google.protobuf.message import DecodeError

from atoll.core import log
from atoll.core.errors import PeerMisbehaved, Unreachable
from atoll.core.manifest import Head, changed_layers, manifest_hash
from atoll.core.plan import Plan
from atoll.node.state.anchor import AnchorState, FetchedState, Staged
from atoll.node.state.fetch import FetchPolicy, FetchTarget, StateMoved, fetch_state
from atoll.node.state.heads import ChosenHead, choose_head
from atoll.node.state.pieces import Allocate, Piece, Workspace, pieces_of
from atoll.node.state.state_client import StateClient
from atoll.node.wire.transport import Network
from atoll.v1 import manifest_pb2

_ANSWER = timedelta(seconds=10)
_POLICY = FetchPolicy()

_log = log.get("catchup")


async def fetch_manifest(network: Network, peer: str, run_id: str, number: int | None) -> Head:
    """The manifest of round `number` (None: the head) from one member, its votes verified, not weighed.

    Raises `NotFound`, `Unreachable`, `PeerMisbehaved`, `SignatureInvalid`.
    """
    conversation = await StateClient.connect(network, peer, run_id, _ANSWER)
    try:
        return await conversation.manifest(number)
    finally:
        await conversation.close()


async def newest_round(network: Network, plan: Plan, held: Head, *, operator_key: bytes) -> int:
    """The round of the head that `catch_up` would fetch; that of `held` when no head is believed."""
    best = await choose_head(network, plan, operator_key, held)
    if best is None:
        return held.round
    await best.end()
    return best.head.round


async def catch_up(
    network: Network,
    plan: Plan,
    state: AnchorState,
    held: Head | None,
    *,
    operator_key: bytes,
    policy: FetchPolicy = _POLICY,
    incomplete: bool = False,
    on_head: Callable[[Head], None] = lambda head: None,
    allocate: Allocate = torch.empty,
    local_states: Callable[[], Sequence[tuple[Head, AnchorState]]] = tuple,
    on_lost_layers: Callable[[frozenset[int]], None] = lambda layers: None,
) -> FetchedState | None:
    """The state at the head that the plan's members agree on, every digest checked.

    None when `held` is that head, or is newer and part of the history that counts, unless `state` is `incomplete` some
    of its layers. `state` is what this node holds; it is not changed, and of what `held` has in common with the head
    nothing is fetched; nor of what `local_states` hold, states that are whole for their layers, each with its head.
    `on_head` hears of the head that counts, and `on_lost_layers` which layers nobody who answered holds as they are
    there, nor we. `allocate` makes the vectors that are returned.

    Raises `Unreachable` when no head can be believed yet or nobody's bytes were true, `CheckpointCorrupt` when the head
    is not of this model.
    """
    workspace: Workspace | None = None
    followed = held  # what grew out of ours need not be followed again
    restarts, least = 0, math.inf
    while restarts < policy.restarts:
        best = await choose_head(network, plan, operator_key, followed)
        if best is None:
            raise Unreachable("no head was found that enough members of the plan agree on")
        head = best.head
        on_head(head)
        try:
            if held is not None and plan.accepts(held) and (head.hash == held.hash or head.round < held.round):
                if not incomplete:
                    on_lost_layers(frozenset())
                    return None
                if head.round < held.round:
                    raise Unreachable(f"the others are at round {head.round}, before ours")
            followed = head if best.descends_from_held else followed
            wanted = FetchTarget(plan.run_id, head.hash, _recently_changed_first(head, state.offsets, state.layers))
            if workspace is None:
                workspace = await asyncio.to_thread(Workspace, state.start, state.end, allocate)
                if held is not None or head.round == 0:  # at genesis, momentum is zero: so is that of a new state
                    await asyncio.to_thread(
                        workspace.copy_matching, state.start, state.anchor_E, state.momentum_E, wanted.pieces
                    )
            for then, other in local_states():
                same = [piece for piece in wanted.pieces if _holds(then, other, head, piece)]
                await asyncio.to_thread(workspace.copy_matching, other.start, other.anchor_E, other.momentum_E, same)
            on_lost_layers(_unheld(best, workspace, wanted.pieces))
            await fetch_state(network, best.holders, wanted, workspace, policy, best.conversations, best.held)
        except StateMoved as error:
            _log.info("the head moved on while it was fetched", round=head.round, reason=str(error))
            missing = sum(piece.elements for piece in wanted.pieces if workspace is None or not workspace.has(piece))
            restarts = restarts + 1 if missing >= least else 1
            least = min(least, missing)
            await asyncio.sleep(policy.pause.total_seconds() * 2 ** (restarts - 1))  # heads change one by one
            continue
        finally:
            await best.end()
        return FetchedState(head, workspace.vectors["anchor"], workspace.vectors["momentum"])
    raise Unreachable(f"the head moved on {policy.restarts} times, and no more of it was fetched than before")


def _holds(then: Head, state: AnchorState, now: Head, piece: Piece) -> bool:
    """Whether a state of `then` has this piece of `now`."""
    same = then.manifest.layers[piece.layer] == now.manifest.layers[piece.layer]
    return same and piece.layer in state.layers


def _unheld(best: ChosenHead, workspace: Workspace, pieces: Sequence[Piece]) -> frozenset[int]:
    """Layers of which something is neither in the workspace nor with anybody who holds that head."""
    spans = [best.held.get(peer) for peer in best.holders]
    missing = {piece.layer for piece in pieces if not workspace.has(piece)}
    return frozenset(
        layer for layer in missing if not any(span is None or any(layer in part for part in span) for span in spans)
    )


def _recently_changed_first(head: Head, offsets: Sequence[int], held: range) -> tuple[Piece, ...]:
    """The pieces of these layers, those that changed last first: their fragment's turn comes last."""
    layers = head.manifest.layers
    pieces = (piece for piece in pieces_of(layers, offsets) if piece.layer in held)
    return tuple(sorted(pieces, key=lambda piece: -layers[piece.layer].round))


async def fetch_staged(
    network: Network,
    holders: Sequence[str],
    payload: bytes,
    run_id: str,
    offsets: Sequence[int],
    held: range,
    *,
    policy: FetchPolicy = _POLICY,
) -> Staged:
    """The state of a result that was voted for and is not here: of the layers that it changes those that we `held`.

    As the manifest `payload` has it, every digest checked. `offsets` are those of all layers. Who asks sets a deadline:
    donors that never kept it say what those say that went on. Raises `Unreachable`, `PeerMisbehaved`,
    `CheckpointCorrupt`.
    """
    try:
        manifest = manifest_pb2.Manifest.FromString(payload)
    except DecodeError as error:
        raise PeerMisbehaved("the manifest of a staged result does not parse") from error
    if manifest.round.run_id != run_id:
        raise PeerMisbehaved("the manifest of a staged result is of another run")
    pieces = pieces_of(manifest.layers, offsets)
    changed = changed_layers(manifest)
    layers = range(max(changed.start, held.start), min(changed.stop, held.stop))
    workspace = Workspace(offsets[layers.start], offsets[layers.stop])
    pieces = tuple(piece for piece in pieces if piece.layer in layers)
    wanted = FetchTarget(run_id, manifest_hash(payload), pieces)
    donors = [peer for peer in holders if peer != network.peer_id]
    try:
        await fetch_state(network, donors, wanted, workspace, replace(policy, stragglers_timeout=None))
    except StateMoved as error:
        raise Unreachable(str(error)) from error
    start = offsets[layers.start]
    return Staged(start, workspace.vectors["anchor"], workspace.vectors["momentum"], tuple(manifest.layers))
