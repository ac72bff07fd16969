"""Fetches of layers outside the plan, for standbys and neighbour copies: which nodes may fetch, and for how long.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from atoll.coordinator.live import plan_issue
from atoll.coordinator.live.attendance import live_of
from atoll.coordinator.live.pinning import pinned_span
from atoll.coordinator.live.planner_question import UNPREPARED_HOLD_SECONDS
from atoll.coordinator.live.span_fit import span_fits
from atoll.coordinator.planner.question import STATE_BYTES_PER_PARAMETER, has_planner_inputs
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_memory import PendingFetch, RunMemory
from atoll.coordinator.state.snapshot import Policy, State
from atoll.v1 import membership_pb2 as mb


def pending_fetches(
    draft: Draft, run_id: str, policy: Policy, spans: Mapping[str, range], before: Mapping[str, PendingFetch]
) -> dict[str, PendingFetch]:
    """Fetches of `spans`. Those in `before` keep their start time. Late and refusing nodes are removed and recorded."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    pending = {
        peer: known if (known := before.get(peer)) and known.span == span else PendingFetch(span, now)
        for peer, span in spans.items()
    }
    failed = {
        peer
        for peer, it in pending.items()
        if _is_late(state, run_id, policy, peer, it, now) or prefetch.reports_no_room(state, peer, it.span)
    }
    if failed:
        draft.remember(run_id, fetch_timeouts={**memory.fetch_timeouts, **dict.fromkeys(failed, now)})
    return {peer: it for peer, it in pending.items() if peer not in failed}


def _is_late(state: State, run_id: str, policy: Policy, peer: str, fetch: PendingFetch, now: float) -> bool:
    fetched_bytes = STATE_BYTES_PER_PARAMETER * parameters_of(state, run_id, fetch.span)
    deadline_seconds = policy.prepare_seconds + fetched_bytes / prefetch.ASSUMED_MIN_BYTES_PER_SECOND
    return now - fetch.since >= deadline_seconds and not prefetch.has_prefetched(state, peer, fetch.span)


def may_hold(state: State, run_id: str, peer: str, span: range) -> bool:
    """True if a node has the memory for the span, as far as known, and is not pinned to other layers."""
    pinned = pinned_span(state.nodes[peer])
    return pinned in (None, (span.start, span.stop - 1)) and span_fits(state, run_id, peer, span)


def may_fetch(state: State, run_id: str, peer: str, now: float) -> bool:
    """True if a node reported its profile and was not too slow to fetch recently."""
    return has_planner_inputs(live_of(state, peer).profile) and not was_slow_recently(state.memory[run_id], peer, now)


def was_slow_recently(memory: RunMemory, peer: str, now: float) -> bool:
    at = memory.fetch_timeouts.get(peer)
    return at is not None and now - at < UNPREPARED_HOLD_SECONDS


def links_carry(state: State, peers: Iterable[str], sent_bytes: float, seconds: float) -> bool:
    """True if the uplink of each node can send `sent_bytes` in `seconds`. An unknown uplink counts as sufficient.

    Only uplinks are measured; home links receive faster than they send.
    """
    links = plan_issue.reported_links(state, peers).values()
    return all(sent_bytes / link.uplink <= seconds for link in links if link.uplink)


def parameters_of(state: State, run_id: str, span: range) -> float:
    weights = plan_issue.layer_weights(state.runs[run_id])
    return sum(weights[layer] for layer in span)


def is_training(state: State, peer: str) -> bool:
    """True if a node reports that it trains."""
    return live_of(state, peer).status.state == mb.NODE_STATE_TRAINING
