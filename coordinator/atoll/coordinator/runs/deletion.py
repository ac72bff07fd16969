"""Deletion of runs that have ended or never started: their rows are deleted, and the name is free again. Pure.

The rows of its nodes are deleted too, except of nodes that moved to another run. Bans stay, because they are in the
deny-list.

The number of a deleted run's newest plan is kept. Members may still have its signed plans and manifests. So a new run
of the same name starts with higher plan versions and another epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from atoll.coordinator.runs import forgetting
from atoll.coordinator.state import kept_rounds, lookup
from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.snapshot import Policy, State, StepTime
from atoll.coordinator.store.records import DeletedRun, Node, Run
from atoll.core.errors import InvalidRequest, InvalidTransition

KEPT_DELETED_RUNS = 4096  # names
_DELETABLE = ("CREATED", "STOPPED", "FINISHED")
_MAX_NAMED_NODES = 5


@dataclass(frozen=True)
class Deletion:
    """The deleted run, with the numbers of nodes and tokens deleted with it."""

    run: Run
    nodes: int
    tokens: int


def delete(state: State, now: StepTime, policy: Policy, run_id: str) -> Step[Deletion]:
    """Delete a run.

    Raises `NotFound`, `InvalidRequest`, and `InvalidTransition` if the run has not ended, if a fork begins with it, or
    if it has nodes that are connected or needed.
    """
    if not run_id:
        raise InvalidRequest("a deletion must name the run")
    run = lookup.run(state, run_id)
    if run.state not in _DELETABLE:
        raise InvalidTransition(
            f"run {run_id!r} is {run.state.lower()}: only a run that is over, or that never started, can be deleted",
            f"stop it first: atollctl run stop {run_id}",
        )
    _refuse_forks(state, run_id)
    _refuse_present(state, now, policy, run_id)
    members = [node for node in state.nodes.values() if _home(state, node) == run_id]
    # a run from which these nodes were moved may need them
    forgetting.refuse_needed(state, members, without_run=run_id)
    draft = Draft(state, now)
    _detach_others(draft, run_id)
    draft.drop_run(run_id)
    kept_rounds.update_source(draft, state.memory[run_id].spec)
    forgetting.forget_rows(draft, members, run_deleted=True)
    nodes = sum(not node.replaced_by for node in members)
    tokens = sum(token.run_id == run_id for token in state.tokens.values())
    _leave_trace(draft, run)
    told = f"run {run_id} was deleted at round {run.head_round}, with {_count(nodes, 'node')}"
    draft.event("run.deleted", "", run_id, f"{told} and {_count(tokens, 'token')}")
    return draft.done(Deletion(run, nodes, tokens))


def _refuse_forks(state: State, run_id: str) -> None:
    for fork, number in sorted(kept_rounds.forks_to_come(state.runs.values(), state.memory, run_id).items()):
        raise InvalidTransition(
            f"run {fork!r} begins with round {number} of run {run_id!r}, and has no genesis yet",
            f"wait until it trains, or delete it first: atollctl run delete {fork}",
        )


def _refuse_present(state: State, now: StepTime, policy: Policy, run_id: str) -> None:
    members = state.members_of(run_id)
    lives = ((node, state.live.get(node.peer_id)) for node in members)
    connected = [node for node, live in lives if live is not None and live.connected]
    if connected:
        raise InvalidTransition(
            f"nodes of run {run_id!r} are connected: {_names(connected)}",
            "move them to another run (`atollctl run assign`), or ask them to leave (`atollctl node drain`)",
        )
    coming = [node for node in members if forgetting.may_come_back(state, now, policy, node)]
    if coming:
        raise InvalidTransition(
            f"nodes of run {run_id!r} may have lost their connection just now, and come back: {_names(coming)}",
            "try again when they count as lost",
        )


def _names(nodes: Sequence[Node]) -> str:
    names = sorted(node.name for node in nodes)
    more = f" and {len(names) - _MAX_NAMED_NODES} more" if len(names) > _MAX_NAMED_NODES else ""
    return ", ".join(names[:_MAX_NAMED_NODES]) + more


def _home(state: State, node: Node) -> str:
    """The run of a node. For an earlier identity: the run of its newest identity."""
    return lookup.newest(state, node).run_id


def _detach_others(draft: Draft, run_id: str) -> None:
    """Remove the run's name from the rows of nodes in other runs. A planned move to this run is cancelled."""
    state = draft.state
    for node in state.nodes.values():
        home = _home(state, node)
        if home == run_id or run_id not in (node.run_id, node.moved_from, node.assigned_run):
            continue
        kept = replace(
            node,
            run_id=home if node.run_id == run_id else node.run_id,
            moved_from="" if node.moved_from == run_id else node.moved_from,
        )
        if node.assigned_run == run_id:
            kept = replace(kept, assigned_run="", draining=False)
            _call_off_move(draft, node, home)
        draft.put(kept)


def _call_off_move(draft: Draft, node: Node, home: str) -> None:
    live = draft.state.live.get(node.peer_id)
    if live is not None:
        draft.set_live(node.peer_id, replace(live, handing_over=False))
    message = f"{node.name} stays in run {home}: run {node.assigned_run} was deleted"
    draft.event("node.assigned", home, node.peer_id, message)


def _leave_trace(draft: Draft, run: Run) -> None:
    newest_plan = max(run.plan_version, run.plan_floor, run.plans_before)
    draft.put(DeletedRun(run.run_id, newest_plan, draft.now.unix_ms))
    by_age = sorted(draft.state.deleted_runs.values(), key=lambda trace: (trace.deleted_ms, trace.run_id))
    surplus = {trace.run_id for trace in by_age[:-KEPT_DELETED_RUNS]}
    if surplus:
        draft.drop_traces(surplus, frozenset())


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
