"""Two phases of a plan that moves layers: who lacks some fetches them first, under the plan that stands. Pure.

Prepare: the answer of the planner is kept, and each node that lacks layers of its next span is told to fetch them
(`HeartbeatResponse.prepare`). Commit: once all say that they have them, the plan is issued; only what was averaged
since is fetched then. Somebody of the new plan who is gone, shrank or was pinned meanwhile, or does not come to have
its layers in time or has no room for them, ends it: nothing has changed for anybody. Where somebody of the present plan
is gone nobody waits: a swarm that lacks a stage is mended at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.coordinator.planner.question import Answer, Question
from atoll.coordinator.state.snapshot import Preparation, State

if TYPE_CHECKING:
    from atoll.core.plan import Plan

MAX_ROUNDS_BEHIND = 2  # rounds: one that is being followed, one that was told before that
ASSUMED_MIN_BYTES_PER_SECOND = 1e6  # that a preparation allows for


def spans_to_fetch(plan: Plan, question: Question, answer: Answer) -> dict[str, range]:
    """By peer id, the spans of an answer whose nodes do not hold all of it under `plan`."""
    peers = question.peer_by_name()
    spans = {peers[name]: range(first, last + 1) for route in answer.routes for name, first, last in route}
    return {peer: span for peer, span in spans.items() if not _within(span, plan.span(peer))}


def fetch_deadline_seconds(preparation: Preparation, least: float) -> float:
    """Seconds that it may take: `least`, and what the most that one node fetches needs on a slow link."""
    return least + max(preparation.answer.fetched_bytes.values(), default=0.0) / ASSUMED_MIN_BYTES_PER_SECOND


def peers_still_fetching(state: State, preparation: Preparation) -> tuple[str, ...]:
    """Peer ids of those that do not say yet that they hold their next span, ordered."""
    return tuple(peer for peer, span in sorted(preparation.spans.items()) if not has_prefetched(state, peer, span))


def layers_to_fetch(state: State, peer_id: str) -> range:
    """What a node is to fetch; empty: nothing."""
    node = state.nodes[peer_id]
    memory = state.memory.get(node.run_id)
    if memory is None:
        return range(0)
    coming = memory.standbys.get(peer_id) or memory.copies.get(peer_id)
    beside = coming.span if coming is not None else range(0)
    return memory.preparation.spans.get(peer_id, beside) if memory.preparation is not None else beside


def has_prefetched(state: State, peer: str, span: range) -> bool:
    """Whether a node says that it has these layers as they are now, or nearly."""
    live = state.live.get(peer)
    if live is None or not live.connected or not live.status.HasField("prepared"):
        return False
    newest = state.runs[state.nodes[peer].run_id].head_round
    recent = live.status.prepared_round + MAX_ROUNDS_BEHIND >= newest
    return recent and _within(span, range(live.status.prepared.first, live.status.prepared.last + 1))


def reports_no_room(state: State, peer: str, span: range) -> bool:
    """Whether a node says that it has no room for these layers, which it was told to fetch."""
    live = state.live.get(peer)
    if live is None or not live.connected or not live.status.HasField("refused"):
        return False
    return span == range(live.status.refused.first, live.status.refused.last + 1)


def _within(span: range, held: range) -> bool:
    return held.start <= span.start and span.stop <= held.stop
