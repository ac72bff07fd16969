"""Preparation of a plan that moves layers: nodes fetch what they lack before the plan is issued. Pure.

First, the planner's answer is kept, and each node that lacks layers of its next span is told to fetch them
(`HeartbeatResponse.prepare`) while it follows the current plan. Once all nodes report that they have their layers, the
plan is issued. Then they fetch only the layers averaged since. The preparation is dropped, without any effect, if a
node of the new plan disconnects, reports less memory, is pinned, does not fetch in time or has no room. If a node of
the current plan is lost, the plan does not wait: a swarm that lacks a stage gets a new plan at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.state.run_memory import Preparation
from atoll.coordinator.state.snapshot import State

if TYPE_CHECKING:
    from atoll.core.plan import Plan

MAX_ROUNDS_BEHIND = 2  # one round in progress, and one whose report is on its way
ASSUMED_MIN_BYTES_PER_SECOND = 1e6  # assumed rate of the slowest link, for the deadline


def spans_to_fetch(plan: Plan, question: Question, answer: Answer) -> dict[str, range]:
    """Next spans, by peer id, of nodes that lack some of these layers under `plan`."""
    peers = question.peer_by_name()
    spans = {peers[name]: range(first, last + 1) for route in answer.routes for name, first, last in route}
    return {peer: span for peer, span in spans.items() if not _within(span, plan.span(peer))}


def fetch_deadline_seconds(preparation: Preparation, least: float) -> float:
    """Time limit: `least` seconds plus the largest fetch of one node over a slow link."""
    return least + max(preparation.answer.fetched_bytes.values(), default=0.0) / ASSUMED_MIN_BYTES_PER_SECOND


def peers_still_fetching(state: State, preparation: Preparation) -> tuple[str, ...]:
    """Peer ids of nodes that do not report yet that they hold their next span, ordered."""
    return tuple(peer for peer, span in sorted(preparation.spans.items()) if not has_prefetched(state, peer, span))


def layers_to_fetch(state: State, peer_id: str) -> range:
    """Layers that a node should fetch; empty if none."""
    node = state.nodes[peer_id]
    memory = state.memory.get(node.run_id)
    if memory is None:
        return range(0)
    pending = memory.standby_fetches.get(peer_id) or memory.copy_fetches.get(peer_id)
    outside_plan = pending.span if pending is not None else range(0)
    return memory.preparation.spans.get(peer_id, outside_plan) if memory.preparation is not None else outside_plan


def has_prefetched(state: State, peer: str, span: range) -> bool:
    """True if a node reports that it holds these layers, at most two rounds old."""
    live = state.live.get(peer)
    if live is None or not live.connected or not live.status.HasField("prepared"):
        return False
    newest = state.runs[state.nodes[peer].run_id].head_round
    recent = live.status.prepared_round + MAX_ROUNDS_BEHIND >= newest
    return recent and _within(span, range(live.status.prepared.first, live.status.prepared.last + 1))


def reports_no_room(state: State, peer: str, span: range) -> bool:
    """True if a node reports that it has no room for these layers, although it was ordered to fetch them."""
    live = state.live.get(peer)
    if live is None or not live.connected or not live.status.HasField("refused"):
        return False
    return span == range(live.status.refused.first, live.status.refused.last + 1)


def _within(span: range, held: range) -> bool:
    return held.start <= span.start and span.stop <= held.stop
