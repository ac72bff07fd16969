"""Moves of nodes and seeds between runs, without a new token. Pure.

The operator assigns a node to another run. The node is then drained: it finishes its round, and a stage hands over its
layers. Instead of leaving, it asks to be moved, and gets the membership certificate, the spec and the seeds of the new
run. Both steps may be repeated: a node whose answer was lost asks again and gets the same one.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.coordinator.runs import admission, departure
from atoll.coordinator.state import availability, lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.run_states import TRANSITIONS
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import Node
from atoll.core.errors import Banned, IdentityInUse, InvalidRequest, InvalidTransition, NotPermitted


def assign(state: State, now: StepTime, text: str, run_id: str) -> Step[Node]:
    """Order a node to move to a run. Naming its present run cancels an earlier order.

    Raises `NotFound`, `Ambiguous`, `InvalidRequest`, `Banned`, `InvalidTransition` for a run that is over, and
    `NotPermitted` if the node's owner set `stay_in_run`.
    """
    node = lookup.node(state, text)
    if not run_id:
        raise InvalidRequest("an assignment must name a run")
    run = lookup.run(state, run_id)
    if node.banned:
        raise Banned(f"{node.name} is banned", f"take the ban back first: atollctl node unban {node.name}")
    if node.run_id == run.run_id:
        return _stay(state, now, node)
    live = state.live.get(node.peer_id)
    if node.draining and not node.assigned_run:
        raise InvalidTransition(
            f"{node.name} drains: it leaves run {node.run_id}", f"assign it when it is back: atoll up, on {node.name}"
        )
    if live is not None and live.stays_in_run:
        raise NotPermitted(
            f"the owner of {node.name} lets it stay in run {node.run_id}", "ask the owner to unset `stay_in_run`"
        )
    if not TRANSITIONS[run.state]:
        raise InvalidTransition(
            f"run {run.run_id!r} is {run.state.lower()}: no node can join it", "see `atollctl run list`"
        )
    draft = Draft(state, now)
    if node.assigned_run != run.run_id:
        draft.put(replace(node, assigned_run=run.run_id))
        draft.event("node.assigned", node.run_id, node.peer_id, f"{node.name} is to move to run {run.run_id}")
        departure.begin_drain(draft, node.peer_id)
    return draft.done(draft.state.nodes[node.peer_id])


def _stay(state: State, now: StepTime, node: Node) -> Step[Node]:
    draft = Draft(state, now)
    if node.assigned_run:
        draft.put(replace(node, assigned_run="", draining=False))
        live = state.live.get(node.peer_id)
        if live is not None:
            draft.set_live(node.peer_id, replace(live, handing_over=False))
        draft.event("node.assigned", node.run_id, node.peer_id, f"{node.name} stays in run {node.run_id}")
    return draft.done(draft.state.nodes[node.peer_id])


def keep_where_it_is(draft: Draft, peer_id: str) -> None:
    """Cancel a move that was ordered before the node reported its owner's `stay_in_run`."""
    node = draft.state.nodes[peer_id]
    if node.assigned_run:
        draft.put(replace(node, assigned_run="", draining=False))
        message = f"{node.name} stays in run {node.run_id}: its owner set `stay_in_run`"
        draft.event("node.assigned", node.run_id, peer_id, message)


def move(state: State, now: StepTime, peer_id: str, instance: bytes = b"") -> Step[Node]:
    """Move the caller to the run that it is assigned to, and return its row. Changes nothing without an order.

    Pins, audits and reports stay with the old run. Probation and the availability record move with the node. Its
    streams end. `instance` names the process that asks. Raises `IdentityInUse` if another process of the node has the
    stream, `Banned`, `IdentityReplaced`, `CertificateInvalid`.
    """
    node, live = lookup.member(state, peer_id), state.live.get(peer_id)
    if departure.is_of_another_process(live, instance):
        raise IdentityInUse("another process runs with the identity of this node", "run only one of them")
    if not (node.assigned_run and TRANSITIONS[state.runs[node.assigned_run].state]):
        return _stay(state, now, node)  # also if the assigned run has ended since
    draft = Draft(state, now)
    counted = node
    if live is not None and live.connected:
        counted = availability.count_connected(node, live, now.monotonic)
    moved = replace(
        counted,
        moved_from=node.run_id,
        last_seen_ms=now.unix_ms,
        multiaddrs=(),  # a seed's addresses: nodes of the new run learn them when it connects
        run_id=node.assigned_run,
        name=admission.unique_name(state, node.assigned_run, peer_id, node.name),
        assigned_run="",
        epoch=node.epoch + 1,
        draining=False,
        left=False,
        pin="",
    )
    draft.put(moved)
    if live is not None:  # rate limits are not refilled; the node's reports belong to the old run
        draft.set_live(peer_id, live.begun_anew(now.monotonic))
    draft.set_checkpoints(peer_id, ())
    named = f"{node.name} moved" if moved.name == node.name else f"{node.name} moved, as {moved.name},"
    draft.event("node.moved", node.run_id, peer_id, f"{named} to run {moved.run_id}")
    draft.event("node.moved", moved.run_id, peer_id, f"{moved.name} came from run {node.run_id}")
    if "seed" in node.roles:
        admission.tell_if_no_seed(draft, node.run_id)
    return draft.done(moved)
