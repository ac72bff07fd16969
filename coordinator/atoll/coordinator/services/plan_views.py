"""Plans as `admin.proto` messages: names, memory, nodes left out, and figures. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict

from atoll.coordinator.live.neighbour_copies import complete_copies
from atoll.coordinator.live.span_fit import span_memory_of
from atoll.coordinator.planner.question import STATE_BYTES_PER_PARAMETER, Answer, NamedRoute, Preferences, Question
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Node, PlanFigures
from atoll.core.plan import Plan
from atoll.v1 import admin_pb2 as admin
from atoll.v1 import common_pb2 as pb
from atoll.v1 import plan_pb2


def plan_view(state: State, signed: pb.Signed, figures: PlanFigures | None, wishes: Preferences) -> admin.PlanView:
    """View of a signed plan with its figures and nodes; copies and reasons only for the newest plan."""
    message = plan_pb2.Plan.FromString(signed.payload)
    memory, plan = state.memory[message.run_id], Plan.from_proto(message)
    newest = memory.plan is not None and memory.plan.version == plan.version
    left_out = memory.left_out if newest else json.loads(figures.left_out) if figures else {}
    return admin.PlanView(
        plan=message,
        signed=signed,
        nodes=_placed_nodes(state, plan, dict(_copies(state, plan)) if newest else {}),
        left_out=[
            admin.LeftOutNode(peer_id=peer, name=_name(state, peer), reason=reason)
            for peer, reason in sorted(left_out.items(), key=lambda item: _name(state, item[0]))
        ],
        missing=(memory.no_plan_reason or memory.undecidable_reason) if newest else "",
        figures=figures_view(figures) if figures else None,
        wishes=admin.PlanWishes(**asdict(wishes)),
    )


def figures_view(row: PlanFigures) -> admin.PlanFigures:
    """View of one row of the plan history."""
    return admin.PlanFigures(
        version=row.version,
        issued_unix_ms=row.issued_ms,
        reason=row.reason,
        nodes=row.nodes,
        routes=row.routes,
        predicted_tokens_per_second=row.predicted_tokens_per_second,
        measured_tokens_per_second=row.measured_tokens_per_second,
        measured_seconds=row.measured_seconds,
        moved_bytes=row.moved_bytes,
    )


def _left_out(answer: Answer, peers: Mapping[str, str]) -> list[admin.LeftOutNode]:
    found = sorted(answer.left_out.items())
    return [admin.LeftOutNode(peer_id=peers.get(name, ""), name=name, reason=reason) for name, reason in found]


def proposal_view(
    state: State, run_id: str, question: Question, answer: Answer, plan: Plan | None
) -> admin.ApplyPlanResponse:
    """View of the changes that a planner answer would make or, if `plan` is given, has made."""
    peers = {node.name: node.peer_id for node in state.members_of(run_id)}
    after = question.given_routes or answer.routes
    moves = [] if answer.missing and not question.given_routes else list(_moves(question, after, peers))
    return admin.ApplyPlanResponse(
        changes=bool(moves),
        reason=answer.reason if not question.given_routes else "every node can hold the whole model",
        version=plan.version if plan else 0,
        before_tokens_per_second=answer.before_tokens_per_second,
        after_tokens_per_second=answer.tokens_per_second,
        moves=moves,
        left_out=_left_out(answer, peers),
        missing="" if question.given_routes else answer.missing,
    )


def plan_fields(state: State, node: Node) -> admin.NodeView:
    """A view with only the fields that describe a node's place in the newest plan."""
    memory = state.memory[node.run_id]
    plan = memory.plan
    left_out, doubt = memory.left_out.get(node.peer_id, ""), memory.claim_doubts.get(node.peer_id, "")
    view = admin.NodeView(pin=node.pin, left_out=left_out, doubt=doubt)
    assigned = plan.assignment(node.peer_id) if plan else None
    if plan is not None and assigned is not None:
        view.span.CopyFrom(plan_pb2.Span(first=assigned.first_layer, last=assigned.last_layer))
        view.route = next((number for number, route in enumerate(plan.routes, 1) if node.peer_id in route), 0)
    return view


def _copies(state: State, plan: Plan) -> Iterator[tuple[str, plan_pb2.Span]]:
    """Holder and span of each complete second copy of a neighbour's layers."""
    for pair in complete_copies(state, plan):
        yield pair.holder, plan_pb2.Span(first=pair.stage_span.start, last=pair.stage_span.stop - 1)


def _placed_nodes(state: State, plan: Plan, copies: Mapping[str, plan_pb2.Span]) -> Iterator[admin.PlacedNode]:
    model = span_memory_of(state, plan.run_id)
    routes = {peer: number for number, route in enumerate(plan.routes, 1) for peer in route}
    peers = [*(peer for route in plan.routes for peer in route), *plan.standbys]
    for peer in peers:
        live, span = state.live.get(peer), plan.span(peer)
        fits = model is not None and span.stop <= model.layers
        yield admin.PlacedNode(
            peer_id=peer,
            name=_name(state, peer),
            route=routes.get(peer, 0),
            span=plan_pb2.Span(first=span.start, last=span.stop - 1),
            memory_bytes=model.device_bytes(span.start, span.stop - 1) if fits and model else 0.0,
            memory_lent_bytes=float(live.profile.device_memory_bytes) if live else 0.0,
            copies=[copies[peer]] if peer in copies else [],
        )


def _moves(question: Question, after: tuple[NamedRoute, ...], peers: dict[str, str]) -> Iterator[admin.MovedNode]:
    """Nodes whose layers change, by name."""
    before, later, standby_spans = _spans(question.current), _spans(after), _spans((question.standbys,))
    for name in sorted(before.keys() | later.keys()):
        if before.get(name) == later.get(name):
            continue
        held, new = before.get(name, standby_spans.get(name, range(0))), later.get(name, range(0))
        parameters = sum(question.layers.layers[layer].parameters for layer in new if layer not in held)
        yield admin.MovedNode(
            peer_id=peers.get(name, ""),
            name=name,
            before=_span_text(held),
            after=_span_text(new),
            fetched_bytes=STATE_BYTES_PER_PARAMETER * parameters,
        )


def _spans(routes: tuple[NamedRoute, ...]) -> dict[str, range]:
    return {name: range(first, last + 1) for route in routes for name, first, last in route}


def _span_text(span: range) -> str:
    return f"{span.start}-{span.stop - 1}" if span else ""


def _name(state: State, peer: str) -> str:
    node = state.nodes.get(peer)
    return node.name if node else ""
