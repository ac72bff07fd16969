"""A node's new identity: its membership, name, standing and history move to another key. Pure.

The old identity is put on the deny-list, and its row stays: a later ban of it bans the node's newest identity. A banned
node cannot rotate. If the answer was lost, the node asks again and gets the same answer. Each token that admits a node
allows a few rotations with pauses, which bounds the rows and the deny-list.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.rounds import credits, training_scores
from atoll.coordinator.runs.bans import change_deny_list
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import Node
from atoll.core.errors import AlreadyExists, Busy, NotPermitted
from atoll.core.identity_rotation import Rotation
from atoll.core.units import duration_text

MAX_ROTATIONS = 8  # of one node, until it joins with a token again
PAUSE_SECONDS = 3600  # between two rotations of a node
SHOW_SECONDS = 30  # that members have after a restore to send a newer deny-list
_MOVED = (  # fields of `RunMemory` by peer id that limit or correct a node
    "claim_doubts",
    "corrections",
    "fetch_timeouts",
    "plan_joins",
    "prepare_retry_at",
    "raise_allowances",
)


def rotate(state: State, now: StepTime, caller: str, rotation: Rotation) -> Step[Node]:
    """Move the caller's membership to its new identity, and return its row. A repeated call changes nothing.

    Raises `Banned`, `IdentityReplaced`, `CertificateInvalid`, `NotPermitted`, `AlreadyExists`, `Busy`.
    """
    if rotation.old_peer_id != caller:
        raise NotPermitted(f"peer {caller} sent the statement of {rotation.old_peer_id}")
    new = rotation.new_peer_id
    if lookup.caller(state, caller).replaced_by == new:
        return Draft(state, now).done(lookup.member(state, new))
    old = lookup.member(state, caller)
    if new in state.nodes or new in state.deny.peer_ids:
        raise AlreadyExists(f"peer {new} is known already", "a new identity needs a key that was never used")
    _check_rate(old, now)
    _wait_for_bans(state, now, old)
    draft = Draft(state, now)
    node = replace(
        old,
        peer_id=new,
        public_key=rotation.new_public_key,
        epoch=old.epoch + 1,
        multiaddrs=(),  # these contain the old peer id
        rotated_ms=now.unix_ms,
        rotations=old.rotations + 1,
    )
    draft.put(node)
    draft.put(replace(old, banned=True, replaced_by=new))
    change_deny_list(draft, state.deny.peer_ids | {old.peer_id})
    _move_reports(draft, old, node)
    message = f"{node.name} has a new identity, {new}; the old one is refused"
    draft.event("node.identity-rotated", node.run_id, old.peer_id, message)
    return draft.done(node)


def _check_rate(node: Node, now: StepTime) -> None:
    if node.rotations >= MAX_ROTATIONS:
        raise Busy(
            f"this node had {node.rotations} new identities since it joined, which is the limit",
            "ask your operator for a token, run `atoll join` with it, then try again",
        )
    since_ms = now.unix_ms - node.rotated_ms
    if 0 <= since_ms < 1000 * PAUSE_SECONDS:
        raise Busy(
            f"this node got a new identity {duration_text(since_ms / 1000)} ago",
            f"nothing is wrong here; another one is possible {duration_text(PAUSE_SECONDS)} after the last",
        )


def _wait_for_bans(state: State, now: StepTime, node: Node) -> None:
    """Raise `Busy` after a restore until members have had time to send newer deny-lists, which may name this node.

    A rotation issues a deny-list with a higher number than theirs, so the bans in them would be lost.
    """
    if state.deny.number >= state.deny_reserved:
        return
    present = (it for it in state.present_nodes() if it.peer_id != node.peer_id and not (it.banned or it.left))
    others = [state.live.get(it.peer_id) for it in present]
    if others and not any(
        it is not None and it.connected and now.monotonic - it.connected_at >= SHOW_SECONDS for it in others
    ):
        raise Busy(
            "the coordinator was restored from a backup and waits for other members, who know which nodes are banned",
            f"try again when another node has been connected for {SHOW_SECONDS} s",
        )


def _move_reports(draft: Draft, old: Node, node: Node) -> None:
    """Move the node's reports, allowances and audits. Streams of the old identity end by themselves."""
    live = draft.state.live.get(old.peer_id)
    if live is not None:
        last = draft.now.monotonic if live.connected else live.last_message_at
        moved = replace(live, session=0, last_message_at=last, instance=b"", challenge=b"", challenge_answered=False)
        draft.set_live(node.peer_id, replace(moved, counted_as_lost=True))  # it has not connected yet: that is no loss
    held = draft.state.checkpoints.get(old.peer_id, ())
    if held:
        draft.set_checkpoints(old.peer_id, ())
        draft.set_checkpoints(node.peer_id, tuple(replace(item, peer_id=node.peer_id) for item in held))
    memory, names = draft.state.memory[node.run_id], {old.peer_id: node.peer_id}
    moved_memory = {
        field: {names.get(peer, peer): it for peer, it in getattr(memory, field).items()} for field in _MOVED
    }
    draft.remember(node.run_id, **moved_memory)
    training_scores.move(draft, old, node)
    credits.move(draft, old, node)
