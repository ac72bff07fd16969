"""Plans with routes: when the planner is asked, and what becomes of its answer. Pure.

Where some node cannot hold the whole model, or the operator pinned layers, who holds what is a search of seconds. So
the machine only writes down a *question* (`RunMemory.question`); whoever runs the machine has it answered elsewhere and
brings the answer back (`take`). An answer that uses a node that is gone, shrank or was pinned meanwhile is dropped, and
the question asked anew; nodes that came meanwhile wait for the next one. One question at a time.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from atoll.coordinator.planner.drafting import Part, Route, routes_of
from atoll.coordinator.planner.question import Answer, Measured, NamedRoute, Question, is_known, memory_of
from atoll.coordinator.planner.shares import WORTH, span_gain, span_rates
from atoll.coordinator.state import issuing
from atoll.coordinator.state.edges import move
from atoll.coordinator.state.fitness import Present, difference, present
from atoll.coordinator.state.issuing import Notes, issue_routes
from atoll.coordinator.state.paths import fresh
from atoll.coordinator.state.pinning import pins_of, span_of
from atoll.coordinator.state.rooms import room_of
from atoll.coordinator.state.snapshot import Considered, Draft, Live, Moment, Policy, State, Step
from atoll.core.errors import InvalidTransition
from atoll.core.plan import Plan
from atoll.v1 import plan_pb2

if TYPE_CHECKING:
    from atoll.coordinator.planner.capacity import Room

_LINKS_SECONDS = 10.0  # between looks at whether other shares of reducing would pay


def needs_routes(state: State, run_id: str, here: Present) -> bool:
    """Whether somebody cannot hold everything, or is pinned to layers."""
    model = room_of(state, run_id)
    if model is None:
        return False
    plan = state.memory[run_id].plan
    return any(
        span_of(state.nodes[peer]) is not None or not _holds_all(state, model, plan, peer) for peer in here.members
    )


def follow(draft: Draft, run_id: str, policy: Policy, here: Present) -> None:
    """Ask when what is known differs from what was asked about last and stays so for the debounce."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.question is not None or _unsettled(draft.state, run_id, here):
        return
    _look_at_links(draft, run_id)
    memory = draft.state.memory[run_id]
    why = _why(draft.state, run_id, policy, here, now)
    if not why:
        if memory.changed_since is not None:
            draft.remember(run_id, changed_since=None)
    elif memory.changed_since is None or memory.changed_why != why:
        draft.remember(run_id, changed_since=now, changed_why=why)
    elif now - memory.changed_since < _patience(why, policy):
        return
    elif why == "links":
        _share_anew(draft, run_id)
    else:
        question = ask(draft.state, draft.now, run_id, policy)
        about = _about(draft.state, run_id, here)
        draft.remember(run_id, question=question, questions=question.number, asked_about=about)


def ask(state: State, now: Moment, run_id: str, policy: Policy) -> Question:
    """What the planner has to find for a run as things are now. Raises `InvalidTransition` before genesis."""
    run, memory = state.runs[run_id], state.memory[run_id]
    if not run.genesis:
        raise InvalidTransition(
            f"run {run_id!r} has no layer table yet: there is nothing to plan",
            "it gets one when its genesis is written",
        )
    here = present(state, run_id, now.monotonic)
    usable = _usable(state, here)
    return Question(
        number=memory.questions + 1,
        nodes=tuple(_measured(state, memory.plan, peer, now) for peer in usable),
        layers=plan_pb2.LayerTable.FromString(run.layers),
        spec=memory.spec,
        pins=pins_of(state, usable),
        current=named(state, memory.plan),
        seconds=policy.solve_seconds,
        steps=policy.solve_steps,
    )


def take(
    state: State, now: Moment, run_id: str, question: Question, answer: Answer, *, ordered: bool = False
) -> Step[Plan | None]:
    """The planner answered: the plan that was issued, if any. `ordered`: by the operator, who is not kept waiting."""
    draft = Draft(state, now)
    memory = state.memory[run_id]
    waits = memory.question is not None and memory.question.number == question.number
    if not waits and not ordered:
        return draft.done(None)
    if waits:
        draft.remember(run_id, question=None)
    here = present(state, run_id, now.monotonic)
    goes_on = state.runs[run_id].state in ("GENESIS", "TRAINING")
    if not goes_on or not _still_holds(state, run_id, question, answer, here):
        return draft.done(None)
    about = memory.asked_about if waits else _about(state, run_id, here)
    draft.remember(run_id, considered=Considered(about, now.monotonic), changed_since=None)
    _tell_missing(draft, run_id, answer.missing)
    if answer.missing:
        return draft.done(None)
    left_out = _left_out(state, here, answer)
    if set(answer.routes) != set(question.current) or _forgotten(state, run_id):
        _issue(draft, run_id, answer, left_out)
    _tell_left_out(draft, run_id, left_out)
    plan = draft.state.memory[run_id].plan
    return draft.done(plan if plan is not memory.plan else None)


# --- when to ask -------------------------------------------------------------------------------------


def _patience(why: str, policy: Policy) -> float:
    """For how many seconds that must have been so. Nobody waits for the first plan."""
    return {"first": 0.0, "links": policy.shares_seconds}.get(why, policy.debounce_seconds)


def _why(state: State, run_id: str, policy: Policy, here: Present, now: float) -> str:
    memory = state.memory[run_id]
    considered = memory.considered
    if considered is None or considered.nodes != _about(state, run_id, here) or _forgotten(state, run_id):
        return "first" if memory.plan is None else "members"
    if now - considered.at >= policy.replan_seconds:
        return "drift"
    return "links" if memory.links_pay and not memory.missing else ""


def _about(state: State, run_id: str, here: Present) -> tuple[tuple[object, ...], ...]:
    """Who may have a part, with what decides which spans it may hold. Whoever is silent for a moment still counts."""
    profiles = ((peer, _live(state, peer).profile) for peer in here.members)
    return tuple((peer, memory_of(profile), is_known(profile), state.nodes[peer].pin) for peer, profile in profiles)


def _unsettled(state: State, run_id: str, here: Present) -> bool:
    """Whether a member of the plan has not come back since the coordinator started: it will, or be lost, in seconds."""
    return any(not _live(state, peer).profile.device for peer in here.silent)


def _forgotten(state: State, run_id: str) -> bool:
    """Whether a restore made nodes follow a newer plan than ours."""
    run, plan = state.runs[run_id], state.memory[run_id].plan
    return plan is not None and run.plan_floor >= plan.version


def _look_at_links(draft: Draft, run_id: str) -> None:
    """Now and then: it takes a while where members are many, and shares follow slowly anyway."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    looked = memory.links_looked_at
    if memory.plan is not None and (looked is None or now - looked >= _LINKS_SECONDS):
        pays = _pays_to_share_anew(draft.state, memory.plan)
        draft.remember(run_id, links_looked_at=now, links_pay=pays)


def _pays_to_share_anew(state: State, plan: Plan) -> bool:
    told, spans, planned = issuing.links(state, plan.members), issuing.spans_of(plan), issuing.reduce_rates(plan)
    now = span_gain(told, spans, planned)
    best = span_gain(told, spans, span_rates(told, spans, issuing.layer_weights(state.runs[plan.run_id])))
    return now > WORTH * best and math.isfinite(best)


def _share_anew(draft: Draft, run_id: str) -> None:
    """The same routes, in which others reduce."""
    memory = draft.state.memory[run_id]
    assert memory.plan is not None
    predicted = memory.figures.predicted_tokens_per_second if memory.figures else 0.0
    notes = Notes(predicted, 0.0, memory.left_out)
    reason = "who reduces how much follows what nodes say of their links"
    issue_routes(draft, run_id, routes_of(memory.plan), reason, notes)
    draft.remember(run_id, links_pay=False)


# --- what is asked -----------------------------------------------------------------------------------


def _holds_all(state: State, model: Room, plan: Plan | None, peer: str) -> bool:
    """Of who told nothing yet, as the plan has it: a restart makes nobody larger."""
    profile, planned = _live(state, peer).profile, plan.assignment(peer) if plan else None
    if not profile.device_memory_bytes and planned is not None:
        return (planned.first_layer, planned.last_layer) == (0, model.layers - 1)
    return model.holds_all(profile)


def _usable(state: State, here: Present) -> tuple[str, ...]:
    """Who may have a part in a new plan: told what a planner needs, and is not about to leave."""
    return tuple(peer for peer in sorted({*here.fit, *here.silent}) if is_known(_live(state, peer).profile))


def _measured(state: State, plan: Plan | None, peer: str, now: Moment) -> Measured:
    live, node = _live(state, peer), state.nodes[peer]
    planned = plan.assignment(peer) if plan else None
    last = max(item.last_layer for item in plan.assignments) if plan else 0
    alone = planned is None or (planned.first_layer, planned.last_layer) == (0, last)
    return Measured(
        peer, node.name, live.profile, live.status, node.multiaddrs, fresh(live.paths, now.monotonic), alone
    )


def named(state: State, plan: Plan | None) -> tuple[NamedRoute, ...]:
    """The routes of a plan by names of nodes."""
    return tuple(
        tuple((state.nodes[part.peer_id].name, part.first, part.last) for part in route)
        for route in (routes_of(plan) if plan else ())
    )


def _live(state: State, peer: str) -> Live:
    return state.live.get(peer) or Live(session=0, seen=0.0)


# --- what becomes of an answer -----------------------------------------------------------------------


def _still_holds(state: State, run_id: str, question: Question, answer: Answer, here: Present) -> bool:
    """Whether those that the answer gives a part are as they were when it was asked for."""
    names = {node.name: node for node in question.nodes}
    used = {name for route in answer.routes for name, _, _ in route} or names.keys()
    peers = [names[name].peer_id for name in used]
    about, able = {node.peer_id: memory_of(node.profile) for node in question.nodes}, {*here.fit, *here.silent}
    return named(state, state.memory[run_id].plan) == question.current and all(
        peer in able
        and about[peer] == memory_of(_live(state, peer).profile)
        and span_of(state.nodes[peer]) == question.pins.get(state.nodes[peer].name)
        for peer in peers
    )


def _issue(draft: Draft, run_id: str, answer: Answer, left_out: dict[str, str]) -> None:
    state, plan = draft.state, draft.state.memory[run_id].plan
    peers = {node.name: node.peer_id for node in state.members_of(run_id)}
    routes: list[Route] = [
        tuple(Part(peers[name], first, last) for name, first, last in route) for route in answer.routes
    ]
    members = sorted(part.peer_id for route in routes for part in route)
    changed = difference(state, plan.members, members) if plan else ""
    notes = Notes(answer.tokens_per_second, math.fsum(answer.fetched_bytes.values()), left_out)
    issue_routes(draft, run_id, routes, "; ".join(filter(None, (changed, answer.reason))), notes)
    if state.runs[run_id].state == "GENESIS":
        move(draft, run_id, "TRAINING", f"training begins with {len(members)} nodes")


def _left_out(state: State, here: Present, answer: Answer) -> dict[str, str]:
    """By peer id: those that the planner left out, and those that it was not asked about."""
    placed = {name for route in answer.routes for name, _, _ in route}
    found = {}
    for peer in here.fit:
        name = state.nodes[peer].name
        if name in placed:
            continue
        silent = "joined while the plan was made" if is_known(_live(state, peer).profile) else "has not told its memory"
        found[peer] = answer.left_out.get(name, silent)
    return found


def _tell_left_out(draft: Draft, run_id: str, left_out: dict[str, str]) -> None:
    """Each once, until it has a part."""
    memory = draft.state.memory[run_id]
    for peer in sorted(left_out.keys() - memory.left_out.keys()):
        name = draft.state.nodes[peer].name
        draft.event("node.left-out", run_id, peer, f"{name} has no part in the plan: {left_out[peer]}")
    draft.remember(run_id, left_out=left_out)
    if memory.figures is not None and left_out != memory.left_out:
        draft.set_figures(replace(memory.figures, left_out=json.dumps(left_out, sort_keys=True)))


def _tell_missing(draft: Draft, run_id: str, missing: str) -> None:
    if missing and missing != draft.state.memory[run_id].missing:
        draft.event("plan.impossible", run_id, run_id, f"no plan is possible: {missing}")
    draft.remember(run_id, missing=missing)
