"""Data of the status page and of `/api/status`: one JSON object, built from the state and the logs. Pure.

`version` is incremented when a field changes its meaning.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from atoll.coordinator.rounds.source_losses import from_text
from atoll.coordinator.sanitize import enum_word
from atoll.coordinator.services import views
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.coordinator.store.records import Evaluation, Event, Node, Round, Run
from atoll.coordinator.store.store import RoundMeans
from atoll.core.node_reasons import is_failure, reason_words, telling_words
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

VERSION = 1
MAX_LOSSES = 400
RECENT_ROUNDS = 60
RECENT_EVENTS = 40
MAX_CONTRIBUTORS = 100


@dataclass(frozen=True)
class Logs:
    """Rows read from the store, by run."""

    evaluations: dict[str, tuple[Evaluation, ...]] = field(default_factory=dict)
    means: dict[str, tuple[RoundMeans, ...]] = field(default_factory=dict)  # of the evaluated rounds
    rounds: dict[str, tuple[Round, ...]] = field(default_factory=dict)
    events: tuple[Event, ...] = ()


def status(state: State, now: StepTime, logs: Logs, atoll_version: str) -> dict[str, object]:
    """The whole status, ready for JSON."""
    return {
        "version": VERSION,
        "unix_ms": now.unix_ms,
        "atoll_version": atoll_version,
        "runs": [_run(state, run, now, logs) for run in sorted(state.runs.values(), key=lambda run: run.created_ms)],
        "nodes": [
            _node(state, node, now) for node in sorted(state.present_nodes(), key=lambda node: (node.run_id, node.name))
        ],
        "events": [asdict(event) for event in reversed(logs.events)],
    }


def _run(state: State, run: Run, now: StepTime, logs: Logs) -> dict[str, object]:
    view = views.run_view(state, run, now.unix_ms)
    evaluations, rounds = logs.evaluations.get(run.run_id, ()), logs.rounds.get(run.run_id, ())
    means = {item.round: item for item in logs.means.get(run.run_id, ())}
    return {
        "run_id": run.run_id,
        "state": run.state.lower(),
        "head_round": view.head_round,
        "committed_tokens": view.committed_tokens,
        "stop_tokens": view.stop_tokens,
        "eta_unix_ms": view.eta_unix_ms if view.HasField("eta_unix_ms") else None,
        "rounds_opened": view.rounds_opened,
        "rounds_committed": view.rounds_committed,
        "plan_version": view.plan_version,
        "plan": _plan(state.memory[run.run_id].plan),
        "nodes_ready": view.nodes_ready,
        "min_nodes": view.min_nodes,
        "validation_loss": view.validation_loss,
        "parameters": sum(layer.parameters for layer in view.layers.layers),
        "losses": [
            {
                "round": item.round,
                "loss": item.loss,
                "committed_tokens": item.committed_tokens,
                **_means(means.get(item.round)),
                **_sources(item),
            }
            for item in evaluations
        ],
        "sources": [
            {"name": source.name, "loss": source.loss, "windows": source.windows, "tokens": source.tokens}
            for source in from_text(run.sources)
        ],
        "rounds": [_round(state, row) for row in rounds[-RECENT_ROUNDS:]],
        "contributors": _contributors(state, run.run_id),
    }


def _contributors(state: State, run_id: str) -> dict[str, object]:
    """The nodes that contributed most."""
    memory = state.memory[run_id]
    return {
        "nodes": len(memory.credit_ranks),
        "tokens": sum(item.tokens for item in memory.credits.values()),
        "first": [
            {
                "rank": item.rank,
                "peer_id": item.peer_id,
                "name": item.name,
                "tokens": item.tokens,
                "rounds": item.rounds,
                "first_unix_ms": item.first_unix_ms,
                "last_unix_ms": item.last_unix_ms,
            }
            for item in views.credit_views(state, run_id, MAX_CONTRIBUTORS)
        ],
    }


def _means(found: RoundMeans | None) -> dict[str, object]:
    """The nodes' metrics of the round, if they reported any."""
    if found is None:
        return {}
    loss = {"train_loss": found.train_loss} if found.train_loss else {}
    return {**loss, "tokens_per_second": found.tokens_per_second}


def _sources(item: Evaluation) -> dict[str, object]:
    """Losses by source, if the corpus has several."""
    found = {source.name: source.loss for source in from_text(item.sources)}
    return {"sources": found} if found else {}


def _plan(plan: Plan | None) -> dict[str, object] | None:
    """Placement of layers: routes as lists of stages, in order, and the standbys."""
    if plan is None:
        return None
    return {
        "version": plan.version,
        "layers": plan.layers,
        "routes": [[_stage(plan, peer) for peer in route] for route in plan.routes],
        "standbys": [_stage(plan, peer) for peer in plan.standbys],
    }


def _stage(plan: Plan, peer: str) -> dict[str, object]:
    span = plan.span(peer)
    return {"peer_id": peer, "first": span.start, "last": span.stop - 1}


def _round(state: State, row: Round) -> dict[str, object]:
    view = views.round_view(state, row)
    return {
        "number": row.number,
        "attempt": row.attempt,
        "plan_version": row.plan_version,
        "committed": row.committed,
        "reason": row.reason,
        "tokens": row.tokens,
        "members": row.members,
        "present": view.present,
        "partial": view.partial,
        "screened": list(view.screened),
        "codec": view.codec,
        "void": view.void,
        "seconds": row.seconds,
        "unix_ms": row.reported_ms,
        "parts_zeroed": row.parts_zeroed,
        "opener": row.opener,
    }


def _node(state: State, node: Node, now: StepTime) -> dict[str, object]:
    view = views.node_view(state, node, now.unix_ms, now.monotonic)
    plan = state.memory[node.run_id].plan
    return {
        "peer_id": node.peer_id,
        "name": node.name,
        "run_id": node.run_id,
        "roles": list(node.roles),
        "state": enum_word(mb.NodeState.DESCRIPTOR, view.status.state).replace("_", " "),
        "connected": view.connected,
        "banned": node.banned,
        "draining": node.draining,
        "on_probation": node.on_probation,
        "left": node.left,
        "reason": telling_words(view.status.reason) if view.connected else "",
        "failure": reason_words(view.ended) if is_failure(view.ended) else "",
        "ended_detail": node.ended_detail,
        "planned": plan is not None and node.peer_id in plan.members,
        "device": view.profile.device_name or view.profile.device,
        "device_memory_bytes": view.profile.device_memory_bytes,
        "tokens_per_second": view.status.tokens_per_second,
        "step_seconds": view.status.step_seconds,
        "steps": view.status.steps,
        "tokens": view.status.tokens,
        "train_loss": view.status.train_loss,
        "data_stall_share": view.status.data_stall_share,
        "data_bytes_fetched": view.status.data_bytes_fetched,
        "data_bytes_trained": view.status.data_bytes_trained,
        "head_round": view.status.head_round,
        "averaging_bytes_sent": view.status.averaging_bytes_sent,
        "averaging_bytes_fp32": view.status.averaging_bytes_fp32,
        "detail": view.status.detail,
        "last_seen_unix_ms": view.last_seen_unix_ms,
    }
