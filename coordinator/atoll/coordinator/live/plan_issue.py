"""Issues a plan: sets its version, reduce shares, former members and figures, and writes the event. Pure.

`issue_replica_plan` is for runs in which every node holds all layers, `issue_route_plan` for pipelines. Neither issues
a plan whose members could not decide the next round (`quorum_guard.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from atoll.coordinator.live.attendance import count_join
from atoll.coordinator.live.probation import planned_probation
from atoll.coordinator.live.quorum_guard import keep_voters
from atoll.coordinator.planner.plan_builder import Route, RoutePart, build_plan
from atoll.coordinator.planner.question import STATE_BYTES_PER_PARAMETER
from atoll.coordinator.planner.reduce_shares import (
    MAX_UPLINK_BYTES_PER_SECOND,
    NodeLink,
    best_shares,
    needs_relay,
    reduce_rate,
    span_rates,
)
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.known_nodes import known_nodes
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import PlanFigures, Run
from atoll.core.manifest import manifest_hash
from atoll.core.plan import Base, Plan
from atoll.core.quorum import next_seats
from atoll.v1 import manifest_pb2, plan_pb2

MAX_FORMER_MEMBERS = 32
RESHARE_REASON = "reduce shares follow the reported uplinks"


@dataclass(frozen=True)
class PlanNotes:
    """The planner's figures for a plan."""

    tokens_per_second: float = 0.0  # predicted; 0: no prediction
    moved_bytes: float = 0.0
    left_out: Mapping[str, str] = field(default_factory=dict)  # by peer id: why a node has no place


def next_version(run: Run) -> int:
    """Version of the run's next plan: higher than any earlier one, including those before a restore or a deletion."""
    return max(run.plan_version, run.plan_floor, run.plans_before) + 1


def issue_replica_plan(
    draft: Draft, run_id: str, members: Sequence[str], reason: str, base: Base | None = None
) -> bool:
    """Issue the next plan, in which each of `members` holds all layers. `base`: a new base, if any.

    Returns False without a plan if its members could not decide the next round (`quorum_guard.py`).
    """
    run, before = draft.state.runs[run_id], draft.state.memory[run_id].plan
    spans = dict.fromkeys(members, range(len(layer_weights(run))))
    voters = keep_voters(draft, run_id, spans, base)
    if voters is None:
        return False
    routes = [(RoutePart(peer, span.start, span.stop - 1),) for peer, span in spans.items()]
    # members on probation reduce only if there are no others
    on_probation = planned_probation(draft.state, routes, voters)
    reducers = [peer for peer in members if peer not in on_probation] or members
    shares = best_shares(reported_links(draft.state, reducers))
    rates = {peer: reduce_rate(share, len(reducers)) for peer, share in shares.items()}
    notes = PlanNotes(moved_bytes=_fetched_bytes(run, before, spans))
    _issue(draft, run_id, routes, voters, rates, reason, notes, base, on_probation)
    return True


def issue_route_plan(
    draft: Draft,
    run_id: str,
    routes: Sequence[Route],
    reason: str,
    notes: PlanNotes,
    base: Base | None = None,
    *,
    standbys: Mapping[str, range],
) -> bool:
    """Issue the next plan, with these routes (at least one) and these standbys (layers by peer id).

    Returns False without a plan if its members could not decide the next round (`quorum_guard.py`).
    """
    run = draft.state.runs[run_id]
    spans = {part.peer_id: part.span for route in routes for part in route}
    voters = keep_voters(draft, run_id, {**spans, **standbys}, base)
    if voters is None:
        return False
    standbys = {**standbys, **voters}
    on_probation = planned_probation(draft.state, routes, standbys)
    reducers = {peer: span for peer, span in spans.items() if peer not in on_probation} or spans
    rates = span_rates(reported_links(draft.state, reducers), reducers, layer_weights(run))
    _issue(draft, run_id, routes, standbys, rates, reason, notes, base, on_probation)
    return True


def reported_links(state: State, members: Iterable[str]) -> dict[str, NodeLink]:
    """Reported links of these nodes, by peer id."""
    found = {}
    for peer in members:
        live = state.live.get(peer)
        reported = live.status.uplink_bytes_per_second if live is not None else 0.0
        uplink = reported if 0 < reported <= MAX_UPLINK_BYTES_PER_SECOND else 0.0  # also 0 for NaN
        found[peer] = NodeLink(uplink, needs_relay(state.nodes[peer].multiaddrs))
    return found


def reduce_rates(plan: Plan) -> dict[str, int]:
    """Reduce rate of each member, in bytes per second."""
    return {item.peer_id: item.max_reduce_bytes_per_second for item in plan.assignments}


def spans_of(plan: Plan) -> dict[str, range]:
    """Layers of each member that is on a route."""
    return {peer: plan.span(peer) for peer in sorted(plan.stages)}


def layer_weights(run: Run) -> tuple[float, ...]:
    """Sizes of the layers, in parameters."""
    return _layer_weights(run.layers)


@lru_cache(maxsize=16)  # called for many nodes of a run, several times a second
def _layer_weights(table: bytes) -> tuple[float, ...]:
    return tuple(float(row.parameters) for row in plan_pb2.LayerTable.FromString(table).layers)


def round_seconds(memory: RunMemory) -> float:
    """Seconds between two rounds, from the higher of the plan's measured and predicted pace; infinite if unknown."""
    figures = memory.figures
    rate = max(figures.measured_tokens_per_second, figures.predicted_tokens_per_second) if figures else 0.0
    return memory.spec.sync.round_tokens / rate if rate else math.inf


def _base(state: State, run_id: str, members: Iterable[str]) -> Base:
    plan = state.memory[run_id].plan
    if plan is not None:
        return plan.base
    run = state.runs[run_id]
    genesis = manifest_pb2.CommittedManifest.FromString(run.genesis)
    seats = first_seats(known_nodes(state, members) or members)
    return Base(manifest_hash(genesis.payload), seats, since_version=run.plans_before + 1)


def first_seats(members: Iterable[str]) -> tuple[str, ...]:
    """The seats that decide the first round after a base."""
    present = sorted(members)
    return next_seats((), present, present)


def _issue(
    draft: Draft,
    run_id: str,
    routes: Sequence[Route],
    standbys: Mapping[str, range],
    rates: Mapping[str, int],
    reason: str,
    notes: PlanNotes,
    base: Base | None,
    on_probation: frozenset[str],
) -> None:
    run, memory = draft.state.runs[run_id], draft.state.memory[run_id]
    plan = build_plan(
        memory.spec,
        version=next_version(run),
        routes=routes,
        standbys=standbys,
        reduce_rates=rates,
        previous=memory.plan,
        head_round=run.head_round,
        base=base or _base(draft.state, run_id, [part.peer_id for route in routes for part in route]),
        issued_unix_ms=draft.now.unix_ms,
        reason=reason,
        on_probation=on_probation,
    )
    planned = memory.plan.members if memory.plan else ()
    plan = replace(plan, former=_former(draft.state, memory.plan, plan))
    left_out = {peer: why for peer, why in notes.left_out.items() if peer not in plan.members}
    plan_joins = {peer: count_join(memory, peer, draft.now.monotonic) for peer in plan.members if peer not in planned}
    draft.put(replace(run, plan_version=plan.version))
    draft.remember(plan.run_id, plan_joins={**memory.plan_joins, **plan_joins})
    if memory.figures is not None and memory.figures.measured_seconds:
        draft.set_figures(memory.figures)  # the final figures of the old plan
    draft.issue_plan(plan, _figures(plan, replace(notes, left_out=left_out)))
    _log_issued(draft, plan)


def _log_issued(draft: Draft, plan: Plan) -> None:
    nodes = _count(len(plan.stages), "node")
    shape = "" if len(plan.routes) == len(plan.stages) else f" in {_count(len(plan.routes), 'route')}"
    shape += f", {_count(len(plan.standbys), 'standby')}" if plan.standbys else ""
    draft.event("plan.issued", plan.run_id, str(plan.version), f"plan {plan.version} for {nodes}{shape}: {plan.reason}")


def _former(state: State, before: Plan | None, plan: Plan) -> tuple[str, ...]:
    """Earlier members that may still answer. They alone may know a round that was committed during the change."""
    earlier = {*before.members, *before.former} - set(plan.members) if before is not None else set()
    return tuple(sorted(peer for peer in earlier if _may_still_answer(state, peer)))[:MAX_FORMER_MEMBERS]


def _may_still_answer(state: State, peer: str) -> bool:
    node, live = state.nodes.get(peer), state.live.get(peer)
    return node is not None and not (node.banned or node.left) and live is not None and not live.counted_as_lost


def _figures(plan: Plan, notes: PlanNotes) -> PlanFigures:
    return PlanFigures(
        run_id=plan.run_id,
        version=plan.version,
        reason=plan.reason,
        issued_ms=plan.issued_unix_ms,
        nodes=len(plan.members),
        routes=len(plan.routes),
        predicted_tokens_per_second=notes.tokens_per_second,
        moved_bytes=notes.moved_bytes,
        left_out=json.dumps(dict(notes.left_out), sort_keys=True),
    )


def _fetched_bytes(run: Run, before: Plan | None, spans: Mapping[str, range]) -> float:
    """Bytes of anchor and momentum that nodes must fetch for these spans, beyond what they hold under `before`."""
    weights, held = layer_weights(run), spans_of(before) if before else {}
    new = (weights[layer] for peer, span in spans.items() for layer in span if layer not in held.get(peer, range(0)))
    return STATE_BYTES_PER_PARAMETER * sum(new)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
