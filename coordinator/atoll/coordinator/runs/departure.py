"""How nodes leave: asked to drain, or by an announced end. Pure.

`forgetting` deletes the rows of nodes that left. A node that does not announce its end is lost (`machine`).
"""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.live import hand_over
from atoll.coordinator.sanitize import MAX_REASON_CHARACTERS, clean
from atoll.coordinator.state import lookup
from atoll.coordinator.state.draft import Draft, Step, charge_row
from atoll.coordinator.state.snapshot import LiveNode, State, StepTime
from atoll.coordinator.store.records import Node
from atoll.core.node_reasons import is_failure, reason_name, reason_words
from atoll.v1 import membership_pb2 as mb

MAX_FAILURE_CHARACTERS = 500
FAILURE_SECONDS = 10  # least time between two recorded failures of a node that never connects


def drain(state: State, now: StepTime, text: str) -> Step[Node]:
    """Ask a node to finish its round and leave. Cancels an ordered move. Raises `NotFound`, `Ambiguous`."""
    node = lookup.node(state, text)
    draft = Draft(state, now)
    if not node.draining or node.assigned_run:
        draft.put(replace(node, assigned_run=""))
        begin_drain(draft, node.peer_id)
        draft.event("node.draining", node.run_id, node.peer_id, f"{node.name} was asked to drain")
    return draft.done(draft.state.nodes[node.peer_id])


def begin_drain(draft: Draft, peer_id: str) -> None:
    """Make a node finish its round and, if it is a stage, hand over its layers. Does nothing if it drains already."""
    node, live = draft.state.nodes[peer_id], draft.state.live.get(peer_id)
    if node.draining:
        return
    node = replace(node, draining=True)
    draft.put(node)
    if live is not None:
        must_hand_over = hand_over.must_hand_over(draft.state, node)
        draft.set_live(peer_id, replace(live, drain_since=draft.now.monotonic, handing_over=must_hand_over))


def leave(
    state: State, now: StepTime, peer_id: str, reason: str, instance: bytes = b"", why: int = mb.NODE_REASON_UNSPECIFIED
) -> Step[None]:
    """Record an announced end, and why. The node may return while its certificate is valid.

    Raises `CertificateInvalid`.

    A process cannot announce the end of another process that has the node's stream.
    """
    node = lookup.caller(state, peer_id)
    reason = clean(reason, MAX_FAILURE_CHARACTERS if is_failure(why) else MAX_REASON_CHARACTERS)
    draft = Draft(state, now)
    told_before = node.left and (node.ended, node.ended_detail) == (reason_name(why), reason)
    another_tells_nothing_new = node.left and not is_failure(why)
    if node.replaced_by or told_before or another_tells_nothing_new:
        return draft.done(None)
    live = state.live.get(peer_id)
    a_start_failed_elsewhere = is_failure(why) and not instance and live is not None and live.connected
    if live is None and node.left and node.ended and 0 <= now.unix_ms - node.last_seen_ms < 1000 * FAILURE_SECONDS:
        return draft.done(None)
    if is_of_another_process(live, instance) or a_start_failed_elsewhere:
        return draft.done(None)
    charged = charge_row(draft, peer_id)
    if charged or not node.left:  # the leave is recorded even if the event is not
        draining = bool(node.assigned_run)  # the node moves when it comes back
        node = replace(node, left=True, draining=draining, last_seen_ms=now.unix_ms)
        draft.put(replace(node, ended=reason_name(why), ended_detail=reason))
    if charged:
        kind, verb = ("node.failed", f"failed: {reason_words(why)}") if is_failure(why) else ("node.left", "left")
        draft.event(kind, node.run_id, peer_id, f"{node.name} {verb}{f': {reason}' if reason else ''}")
    return draft.done(None)


def is_of_another_process(live: LiveNode | None, instance: bytes) -> bool:
    """Whether a node's open stream belongs to another process than `instance`. False if a process is not named."""
    return live is not None and live.connected and bool(live.instance and instance) and live.instance != instance
