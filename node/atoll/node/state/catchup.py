"""Catch up: bring this node's state to the head that the members of its plan agree on.

`heads` chooses the head; `fetch` downloads its state from all holders at once. When the head moves on during a fetch,
the fetch restarts at the new head and keeps every piece that did not change. A node also does this when its machine
wakes from sleep.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from atoll.core import log
from atoll.core.errors import Unreachable
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.node.state.anchor import AnchorState, FetchedState
from atoll.node.state.fetch import FetchPolicy, FetchTarget, StateMoved, fetch_state
from atoll.node.state.heads import ANSWER_TIMEOUT, ChosenHead, choose_head
from atoll.node.state.pieces import Allocate, Piece, Workspace, pieces_of
from atoll.node.state.state_client import StateClient
from atoll.node.wire.transport import Network

_POLICY = FetchPolicy()

_log = log.get("catchup")


async def fetch_manifest(network: Network, peer: str, run_id: str, number: int | None) -> Head:
    """Fetch the manifest of round `number` (None: the head) from one member.

    Verifies the signatures of its votes, but not that they are a quorum. Raises `NotFound`, `Unreachable`,
    `PeerMisbehaved`, `SignatureInvalid`.
    """
    client = await StateClient.connect(network, peer, run_id, ANSWER_TIMEOUT)
    try:
        return await client.manifest(number)
    finally:
        await client.close()


async def newest_round(network: Network, plan: Plan, held: Head, *, operator_key: bytes) -> int:
    """The round of the head that `catch_up` would fetch; the round of `held` when no head is accepted."""
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
    """Fetch the state at the head that the plan's members agree on; every layer matches its digest.

    Returns None when `held` is that head, or is newer and accepted by the plan, unless `incomplete`.

    - `state`: this node's state at `held`; not changed. Pieces that did not change since `held` are not fetched.
    - `incomplete`: `state` lacks some of its layers.
    - `local_states`: further states on this node with their heads, each complete for its layers. Their pieces are
      reused as well.
    - `on_head`: called with the chosen head.
    - `on_lost_layers`: called with the layers that neither this node nor any holder of the head has.
    - `allocate`: creates the vectors that are returned.

    Raises `Unreachable` when no head is accepted yet or no donor sent matching bytes, `CheckpointCorrupt` when the head
    is of another model.
    """
    fetching = _Fetching(network, plan.run_id, state, held, policy, allocate, local_states, on_lost_layers)
    followed = held  # newest head whose history from `held` is verified
    restarts, least_missing = 0, math.inf
    while restarts < policy.max_restarts:
        best = await choose_head(network, plan, operator_key, followed)
        if best is None:
            raise Unreachable("no head found that enough members of the plan agree on; retried once more are connected")
        on_head(best.head)
        try:
            if _is_there(plan, held, best.head, incomplete):
                on_lost_layers(frozenset())
                return None
            followed = best.head if best.descends_from_held else followed
            return await fetching.fetch(best)
        except StateMoved as error:
            _log.info("head moved on during fetch", round=best.head.round, reason=str(error))
            missing = fetching.missing_elements
            restarts = restarts + 1 if missing >= least_missing else 1
            least_missing = min(least_missing, missing)
            # members commit a round one after the other: give them time to reach the same head
            await asyncio.sleep(policy.pause.total_seconds() * 2 ** (restarts - 1))
        finally:
            await best.end()
    raise Unreachable(f"the head moved on {policy.max_restarts} times in a row, and the fetch made no progress")


def _is_there(plan: Plan, held: Head | None, head: Head, incomplete: bool) -> bool:
    """Whether nothing must be fetched. Raises `Unreachable` if layers are missing and `head` is older than `held`."""
    if held is None or not plan.accepts(held) or not (head.hash == held.hash or head.round < held.round):
        return False
    if incomplete and head.round < held.round:
        raise Unreachable(f"the head of the other members is round {head.round}, older than this node's {held.round}")
    return not incomplete


@dataclass
class _Fetching:
    """Fetches one head after another. Pieces that did not change are kept for the next head."""

    network: Network
    run_id: str
    state: AnchorState
    held: Head | None
    policy: FetchPolicy
    allocate: Allocate
    local_states: Callable[[], Sequence[tuple[Head, AnchorState]]]
    on_lost_layers: Callable[[frozenset[int]], None]
    workspace: Workspace | None = None
    wanted: tuple[Piece, ...] = ()

    async def fetch(self, best: ChosenHead) -> FetchedState:
        """Return the state at that head. Raises `StateMoved` when the donors have a newer head."""
        head, state = best.head, self.state
        self.wanted = _recently_changed_first(head, state.offsets, state.layers)
        workspace = self.workspace
        if workspace is None:
            workspace = self.workspace = await asyncio.to_thread(Workspace, state.start, state.end, self.allocate)
            if self.held is not None or head.round == 0:  # a new state matches genesis: momentum is zero in both
                await asyncio.to_thread(
                    workspace.copy_matching, state.start, state.anchor_E, state.momentum_E, self.wanted
                )
        for other_head, other in self.local_states():
            same = [piece for piece in self.wanted if _has_piece(other_head, other, head, piece)]
            await asyncio.to_thread(workspace.copy_matching, other.start, other.anchor_E, other.momentum_E, same)
        self.on_lost_layers(_lost_layers(best, workspace, self.wanted))
        target = FetchTarget(self.run_id, head.hash, self.wanted)
        await fetch_state(self.network, best.holders, target, workspace, self.policy, best.clients, best.held)
        return FetchedState(head, workspace.vectors["anchor"], workspace.vectors["momentum"])

    @property
    def missing_elements(self) -> int:
        """The number of elements that the last fetch still lacked."""
        return sum(it.elements for it in self.wanted if self.workspace is None or not self.workspace.has(it))


def _has_piece(state_head: Head, state: AnchorState, head: Head, piece: Piece) -> bool:
    """Whether `state`, taken at `state_head`, has this piece as it is at `head`."""
    same = state_head.manifest.layers[piece.layer] == head.manifest.layers[piece.layer]
    return same and piece.layer in state.layers


def _lost_layers(best: ChosenHead, workspace: Workspace, pieces: Sequence[Piece]) -> frozenset[int]:
    """Layers with a piece that is not in the workspace and that no holder of the head has."""
    spans = [best.held.get(peer) for peer in best.holders]
    missing = {piece.layer for piece in pieces if not workspace.has(piece)}
    return frozenset(
        layer for layer in missing if not any(span is None or any(layer in part for part in span) for span in spans)
    )


def _recently_changed_first(head: Head, offsets: Sequence[int], held: range) -> tuple[Piece, ...]:
    """The pieces of the `held` layers, most recently changed first: their fragments are averaged again last."""
    layers = head.manifest.layers
    pieces = (piece for piece in pieces_of(layers, offsets) if piece.layer in held)
    return tuple(sorted(pieces, key=lambda piece: -layers[piece.layer].round))
