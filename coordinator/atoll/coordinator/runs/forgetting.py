"""Forgetting of nodes that are gone: their rows are deleted, their credit is kept. Pure.

A node that may still be needed is kept. While its run has not ended, there are three reasons: it has a place in the
plan, its vote may decide the next round, or only nodes on probation would be left. After a restore this is unknown
until a round of a newer plan has committed. The disk contents of nodes outside the plan are ignored.

A ban remains without the row, because it is in the deny-list. A forgotten node that comes back is refused with the
reason. The record for that is kept until the node's certificates have expired. The node may join again with a new
token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import fields

from atoll.coordinator.rounds import credits
from atoll.coordinator.state import deciding, lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.state.run_states import TRANSITIONS
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.coordinator.store.records import ForgottenNode, Node, Run
from atoll.core.certs import LEAF_LIFETIME
from atoll.core.errors import InvalidTransition

_KEPT_MS = 1000 * (LEAF_LIFETIME.total_seconds() + 3600)


def forget(state: State, now: StepTime, policy: Policy, text: str) -> Step[Node]:
    """Forget a node that is gone, under all its identities; returns its last row.

    Raises `NotFound`, `Ambiguous`, and `InvalidTransition` for a node that is connected or needed.
    """
    node = lookup.node(state, text)
    _refuse_present(state, now, policy, node)
    rows = [state.nodes[peer_id] for peer_id in lookup.identities(state, node)]
    refuse_needed(state, rows)
    draft = Draft(state, now)
    forget_rows(draft, rows, run_deleted=False)
    banned = "; it stays banned" if node.banned else ""
    draft.event("node.forgotten", node.run_id, node.peer_id, f"{node.name} was forgotten{banned}")
    return draft.done(node)


def forget_rows(draft: Draft, rows: Iterable[Node], *, run_deleted: bool) -> None:
    """Delete these rows, and keep a trace of each: the reason why its peer is refused from now on."""
    traces = [
        ForgottenNode(
            peer_id=row.peer_id,
            name=row.name,
            run_id=row.run_id,
            run_deleted=run_deleted,
            epoch=row.epoch,
            forgotten_ms=draft.now.unix_ms,
            replaced_by=row.replaced_by,
        )
        for row in rows
    ]
    peer_ids = {trace.peer_id for trace in traces}
    credits.fold(draft, peer_ids)
    for run_id, memory in draft.state.memory.items():
        _forget_in_run(draft, run_id, memory, peer_ids)
    draft.drop_nodes(peer_ids & draft.state.nodes.keys())
    draft.put_traces(traces)


def _forget_in_run(draft: Draft, run_id: str, memory: RunMemory, peer_ids: Set[str]) -> None:
    """Remove nodes from the memory of a run: their allowances, audits, doubts, and planner questions about them."""
    changes: dict[str, object] = {
        item.name: {key: it for key, it in held.items() if key not in peer_ids}
        for item in fields(RunMemory)
        if isinstance(held := getattr(memory, item.name), Mapping) and not peer_ids.isdisjoint(held)
    }
    if not peer_ids.isdisjoint(memory.failed_genesis_writers):
        changes["failed_genesis_writers"] = memory.failed_genesis_writers - peer_ids
    if memory.genesis_writer in peer_ids:
        changes["genesis_writer"] = ""  # another writer is chosen
    asked = (memory.question, memory.preparation.question if memory.preparation is not None else None)
    if any(not peer_ids.isdisjoint(question.peer_by_name().values()) for question in asked if question is not None):
        changes |= {"question": None, "answered_question": None, "preparation": None}  # the planner is asked again
    if changes:
        draft.remember(run_id, **changes)


def drop_old_traces(draft: Draft) -> None:
    """Delete the traces of nodes whose certificates have expired."""
    oldest = draft.now.unix_ms - _KEPT_MS
    old = {trace.peer_id for trace in draft.state.forgotten.values() if trace.forgotten_ms < oldest}
    if old:
        draft.drop_traces(frozenset(), old)


def may_come_back(state: State, now: StepTime, policy: Policy, node: Node) -> bool:
    """Whether a node lost its stream a moment ago, perhaps to the previous process of this coordinator."""
    live = state.live.get(node.peer_id)
    if node.left or node.banned:
        return False
    if live is not None:
        return not live.counted_as_lost
    return node.last_seen_ms > 0 and now.monotonic - state.started_at <= policy.lost_after_seconds


def _refuse_present(state: State, now: StepTime, policy: Policy, node: Node) -> None:
    live = state.live.get(node.peer_id)
    if live is not None and live.connected:
        raise InvalidTransition(f"{node.name} is connected", f"ask it to leave first: atollctl node drain {node.name}")
    if may_come_back(state, now, policy, node):
        lost = "lost its connection" if live is not None else "may have been connected until the coordinator started"
        raise InvalidTransition(f"{node.name} {lost} just now, and may come back", "try again when it counts as lost")


def refuse_needed(state: State, rows: Iterable[Node], *, without_run: str = "") -> None:
    """Raise `InvalidTransition` if a run that has not ended needs one of these peers, or an earlier identity of it.

    `without_run`: a run that is deleted at the same time.
    """
    leaving = {row.peer_id: lookup.newest(state, row) for row in rows}
    for run in state.runs.values():
        if TRANSITIONS[run.state] and run.run_id != without_run:
            _refuse_needed_by(state, run, leaving)


def _refuse_needed_by(state: State, run: Run, leaving: Mapping[str, Node]) -> None:
    memory, stop = state.memory[run.run_id], f"or stop the run: atollctl run stop {run.run_id}"
    own = [peer for peer, node in leaving.items() if run.run_id in (node.run_id, node.moved_from)]
    if own and (deciding.abstains(run, memory) or deciding.is_behind(state, run.run_id)):
        raise InvalidTransition(
            f"run {run.run_id} may be ahead of the coordinator, which then does not know if it needs "
            f"{leaving[own[0]].name}",
            f"wait until a round of a newer plan has committed, {stop}",
        )
    if memory.plan is not None:
        for peer in sorted(leaving.keys() & set(memory.plan.members)):
            raise InvalidTransition(
                f"{leaving[peer].name} has a place in plan {memory.plan.version} of run {run.run_id}",
                f"wait for a plan without it (`atollctl plan show`), {stop}",
            )
        electorate = deciding.next_electorate(state, run.run_id)
        for peer in sorted(electorate.members & leaving.keys()) if electorate is not None else ():
            raise InvalidTransition(
                f"{leaving[peer].name} has a seat in round {run.head_round + 1} of run {run.run_id}: its vote may "
                "decide it",
                f"wait until a round has committed without it; if none can: atollctl run recover {run.run_id}",
            )
    if own:
        _refuse_last_known(state, run, leaving)


def _refuse_last_known(state: State, run: Run, leaving: Mapping[str, Node]) -> None:
    """Refuse to forget the last node that is not on probation while others are (`state/known_nodes.py`)."""
    rows = [
        node
        for node in state.nodes.values()
        if run.run_id in (node.run_id, node.moved_from) and "node" in node.roles and not node.banned
    ]
    known = [node for node in rows if not node.on_probation]
    strangers = [node for node in rows if node.on_probation and node.peer_id not in leaving]
    if known and strangers and all(node.peer_id in leaving for node in known):
        raise InvalidTransition(
            f"{known[0].name} is the last node of run {run.run_id} that is not on probation: strangers would have it",
            f"vouch for another one (`atollctl node vouch`), or stop the run: atollctl run stop {run.run_id}",
        )
