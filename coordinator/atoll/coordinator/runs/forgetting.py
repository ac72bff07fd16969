"""Forgetting of nodes that are gone: their rows go, what they contributed stays. Pure.

A node that could still be needed is kept. While its run may go on, its vote may decide the next round, or it may hold
layers that nobody else has. A ban outlives the row, because the deny-list has it.

A forgotten node that comes back is refused, and told why. What is needed for that is kept until the certificates have
expired that it may have. It may join again with a new token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields

from atoll.coordinator.state import deciding, lookup
from atoll.coordinator.state.run_states import TRANSITIONS
from atoll.coordinator.state.snapshot import Draft, RunMemory, State, Step, StepTime
from atoll.coordinator.store.records import ForgottenNode, Node
from atoll.core.certs import LEAF_LIFETIME
from atoll.core.errors import InvalidTransition

_KEPT_MS = 1000 * (LEAF_LIFETIME.total_seconds() + 3600)


def forget(state: State, now: StepTime, text: str) -> Step[Node]:
    """Forget a node that is gone, under all its identities; the result is its last row.

    Raises `NotFound`, `Ambiguous`, and `InvalidTransition` for a node that is connected or needed.
    """
    node = lookup.node(state, text)
    _refuse_present(state, node)
    identities = lookup.identities(state, node)
    for peer_id in identities:
        refuse_needed(state, node, peer_id)
    draft = Draft(state, now)
    for peer_id in identities:
        forget_in_runs(draft, peer_id)
        draft.drop_node(peer_id)
    leave_trace(draft, node, run_deleted=False)
    banned = "; it stays banned" if node.banned else ""
    draft.event("node.forgotten", node.run_id, node.peer_id, f"{node.name} was forgotten{banned}")
    return draft.done(node)


def leave_trace(draft: Draft, node: Node, *, run_deleted: bool) -> None:
    """Keep why a node is refused from now on."""
    draft.put(
        ForgottenNode(
            peer_id=node.peer_id,
            name=node.name,
            run_id=node.run_id,
            run_deleted=run_deleted,
            epoch=node.epoch,
            forgotten_ms=draft.now.unix_ms,
        )
    )


def forget_in_runs(draft: Draft, peer_id: str) -> None:
    """Forget a node in the memory of all runs: its allowances, audits, doubts, and questions about it."""
    for run_id, memory in draft.state.memory.items():
        changes: dict[str, object] = {
            item.name: {key: it for key, it in held.items() if key != peer_id}
            for item in fields(RunMemory)
            if isinstance(held := getattr(memory, item.name), Mapping) and peer_id in held
        }
        if peer_id in memory.failed_genesis_writers:
            changes["failed_genesis_writers"] = memory.failed_genesis_writers - {peer_id}
        if memory.genesis_writer == peer_id:
            changes["genesis_writer"] = ""  # another one is chosen
        asked = (memory.question, memory.preparation.question if memory.preparation is not None else None)
        if any(peer_id in question.peer_by_name().values() for question in asked if question is not None):
            changes |= {"question": None, "answered_question": None, "preparation": None}  # the planner is asked again
        if changes:
            draft.remember(run_id, **changes)


def drop_old_traces(draft: Draft) -> None:
    """Drop what is left of nodes whose certificates have expired."""
    oldest = draft.now.unix_ms - _KEPT_MS
    old = {trace.peer_id for trace in draft.state.forgotten.values() if trace.forgotten_ms < oldest}
    if old:
        draft.drop_traces(frozenset(), old)


def _refuse_present(state: State, node: Node) -> None:
    live = state.live.get(node.peer_id)
    if live is None:
        return
    if live.connected:
        raise InvalidTransition(f"{node.name} is connected", f"ask it to leave first: atollctl node drain {node.name}")
    if not (live.counted_as_lost or node.left or node.banned):
        raise InvalidTransition(
            f"{node.name} lost its connection just now, and may come back", "try again when it counts as lost"
        )


def refuse_needed(state: State, node: Node, peer_id: str) -> None:
    """Raise `InvalidTransition` while a run that may go on needs the node under this identity, an earlier one perhaps.

    The run has it in its plan, or among those that decide the next round.
    """
    for run in state.runs.values():
        plan = state.memory[run.run_id].plan
        if plan is None or not TRANSITIONS[run.state]:
            continue
        if plan.assignment(peer_id) is not None:
            raise InvalidTransition(
                f"{node.name} has a place in plan {plan.version} of run {run.run_id}",
                f"wait for a plan without it (`atollctl plan show`), or stop the run: atollctl run stop {run.run_id}",
            )
        electorate = deciding.next_electorate(state, run.run_id)
        if electorate is not None and peer_id in electorate.members:
            raise InvalidTransition(
                f"{node.name} has a seat in round {run.head_round + 1} of run {run.run_id}: its vote may decide it",
                f"wait until a round has committed without it; if none can: atollctl run recover {run.run_id}",
            )
