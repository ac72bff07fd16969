"""Backup spans: layers of a stage that a second node holds, so that a route outlives the stage. Pure.

`stage_take_over.py` uses them when a stage is gone; this module decides which nodes hold which.

A *standby* is a node without a place on a route that holds the span of one stage. It is a member of the plan: it takes
part in the rounds of its layers without contributing, so it is always at the newest round. Each span has at most one
standby; spans with the fewest holders come first. A standby keeps its span while some stage has the same span. A new
one fetches its layers before it becomes a member. A node whose link would not carry the rounds of its layers does not
stand by. A node that leaves and returns waits longer each time.

A *neighbour copy* (`second_copies` in the run spec) is for a stage without a standby: the stage before or behind it on
the route fetches its layers to disk, if both spans fit, and follows their rounds there (the node's `state/prefetch`).
It trains its own span alone, and the plan does not show the copy. Each node has at most one copy; stages with the
fewest holders come first; a copy stays while the route stays. A holder is sent these layers anew at each of their
rounds, so a pair has no copy where that would take over a quarter of the time between two rounds on one of its links.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from atoll.coordinator.live import plan_issue, plan_spacing, quorum_guard
from atoll.coordinator.live.attendance import Attendance, live_of, recent_joins
from atoll.coordinator.live.pinning import pinned_span
from atoll.coordinator.live.plan_issue import PlanNotes, issue_route_plan
from atoll.coordinator.live.planner_question import UNPREPARED_HOLD_SECONDS
from atoll.coordinator.live.span_fit import span_fits, span_memory_of
from atoll.coordinator.planner.plan_builder import Route, RoutePart, routes_of
from atoll.coordinator.planner.question import STATE_BYTES_PER_PARAMETER, has_planner_inputs
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_memory import PendingFetch, RunMemory
from atoll.coordinator.state.snapshot import Policy, State
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

_BATCH_WAIT_SECONDS = 30.0  # for other new standbys to be ready: each plan disturbs every node
_MAX_STANDBY_DELAY_SECONDS = 600.0  # before a node that left and returned stands by again
_MAX_LINK_SHARE = 0.25  # of the time between two rounds, to send or fetch a copy's layers
_DROP_LINK_SHARE = 0.4  # above this share an existing copy is dropped
_CHECK_INTERVAL_SECONDS = 2.0  # between checks which nodes should have a copy
_REFRESH_INTERVAL_SECONDS = 10.0  # between updates of the time at which a copy was complete


@dataclass(frozen=True)
class NeighbourPair:
    """Two neighbours on a route: `holder` may hold the layers of `stage` beside its own."""

    holder: str  # peer id
    stage: str  # peer id
    holder_span: range
    stage_span: range

    @property
    def joint_span(self) -> range:
        """The layers of both."""
        first, last = sorted((self.holder_span, self.stage_span), key=lambda span: span.start)
        return range(first.start, last.stop)


def remaining_standbys(
    state: State, run_id: str, routes: Sequence[Route], present_peers: Collection[str]
) -> dict[str, range]:
    """Spans of the present standbys that can continue with these routes, by peer id."""
    plan = state.memory[run_id].plan
    standing = standby_spans(plan) if plan is not None else {}
    return _possible_standbys(state, run_id, routes, present_peers, standing)


def complete_copies(state: State, plan: Plan) -> Iterator[NeighbourPair]:
    """Pairs whose copy is complete, as of the newest round or nearly."""
    copies = state.memory[plan.run_id].copy_fetches
    for pair in neighbour_pairs(plan):
        fetch = copies.get(pair.holder)
        if (
            fetch is not None
            and fetch.span == pair.joint_span
            and prefetch.has_prefetched(state, pair.holder, pair.joint_span)
        ):
            yield pair


def neighbour_pairs(plan: Plan) -> Iterator[NeighbourPair]:
    """All pairs of neighbours, along each route; for each stage, the one before it first."""
    for route in routes_of(plan):
        spans = [(part.peer_id, part_span(part)) for part in route]
        for place, (peer, span) in enumerate(spans):
            for holder, own in (*spans[max(0, place - 1) : place], *spans[place + 1 : place + 2]):
                yield NeighbourPair(holder, peer, own, span)


def choose_copies(able: Iterable[NeighbourPair]) -> dict[str, NeighbourPair]:
    """Choose pairs by holder: one copy per holder and one per stage; earlier pairs first."""
    found: dict[str, NeighbourPair] = {}
    copied = set()
    for pair in able:
        if pair.holder not in found and pair.stage not in copied:
            found[pair.holder] = pair
            copied.add(pair.stage)
    return found


# --- standbys ----------------------------------------------------------------------------------------


def update_standbys(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> None:
    """Choose nodes that fetch spans, and issue a plan with them as members once they have their layers."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan = memory.plan
    if plan is None or memory.no_plan_reason:  # then a stage may be gone, and members keep the plan that they have
        return
    wanted = _wanted_standbys(state, run_id, plan, attendance, now)
    voters = _only_voters(state, plan, wanted)
    standing = {peer: span for peer, span in standby_spans(plan).items() if peer not in voters}
    new = {peer: span for peer, span in wanted.items() if standing.get(peer) != span}
    pending = _pending_fetches(draft, run_id, policy, new, memory.standby_fetches)
    waited = {
        peer: now - it.since
        for peer, it in pending.items()
        if prefetch.has_prefetched(state, peer, it.span)
        and now - it.since >= _standby_delay_seconds(memory, peer, policy, now)
    }
    longest = max(waited.values(), default=0.0)
    enough = waited and (len(waited) == len(pending) or longest >= policy.standby_seconds + _BATCH_WAIT_SECONDS)
    staying = {peer: span for peer, span in standing.items() if wanted.get(peer) == span}
    due = enough or staying.keys() != standing.keys()
    if due and plan_spacing.may_issue(state, run_id, policy, attendance, now):
        after = staying | {peer: pending.pop(peer).span for peer in sorted(waited)}
        if issue_with_standbys(draft, run_id, routes_of(plan), after, _change_text(state, standing, after)):
            draft.remember(run_id, standby_fetches=pending)
    elif pending != memory.standby_fetches:
        draft.remember(run_id, standby_fetches=pending)


def standby_spans(plan: Plan) -> dict[str, range]:
    """Layers of each standby, by peer id."""
    return {peer: plan.span(peer) for peer in plan.standbys}


def _wanted_standbys(state: State, run_id: str, plan: Plan, attendance: Attendance, now: float) -> dict[str, range]:
    """Spans by peer id of the nodes that should stand by: present standbys, then fetching nodes, then new ones."""
    memory, routes = state.memory[run_id], routes_of(plan)
    staying = remaining_standbys(state, run_id, routes, attendance.plannable)
    found = {span: peer for peer, span in sorted(staying.items(), reverse=True)}
    fetching = {
        peer: it.span for peer, it in memory.standby_fetches.items() if not _was_slow_recently(memory, peer, now)
    }
    for peer, span in sorted(_possible_standbys(state, run_id, routes, attendance.eligible, fetching).items()):
        found.setdefault(span, peer)
    open_spans = [span for span in _stage_spans(routes) if span not in found]
    if open_spans:
        taken = {*found.values(), *plan.stages}
        free = [peer for peer in attendance.eligible if peer not in taken and _may_fetch(state, run_id, peer, now)]
        for span in sorted(open_spans, key=lambda it: (len(plan.holders(it)), -len(it), it.start)):
            able = [peer for peer in free if _can_stand_by(state, run_id, peer, span)]
            if able:
                found[span] = min(able, key=lambda peer: _preference(state, peer, span))
                free.remove(found[span])
    return {peer: span for span, peer in found.items()}


def _possible_standbys(
    state: State, run_id: str, routes: Sequence[Route], present_peers: Collection[str], spans: Mapping[str, range]
) -> dict[str, range]:
    """Those of `spans` (by peer id) that are a stage's, with a node that is present, unplaced, and has the memory."""
    stages, placed = _stage_spans(routes), {part.peer_id for route in routes for part in route}
    return {
        peer: span
        for peer, span in spans.items()
        if span in stages and peer in present_peers and peer not in placed and may_hold(state, run_id, peer, span)
    }


def _stage_spans(routes: Collection[Route]) -> frozenset[range]:
    return frozenset(part_span(part) for route in routes if len(route) > 1 for part in route)


def _can_stand_by(state: State, run_id: str, peer: str, span: range) -> bool:
    """True where a node may hold the span, and its link carries the averages of its layers between two rounds."""
    if not may_hold(state, run_id, peer, span):
        return False
    model = span_memory_of(state, run_id)
    if model is None:
        return True
    sent_bytes = model.training.outer_bytes_per_parameter * _parameters(state, run_id, span)
    return _links_carry(state, (peer,), sent_bytes, plan_issue.round_seconds(state.memory[run_id]))


def _preference(state: State, peer: str, span: range) -> tuple[bool, int, str]:
    """Sort key: nodes with a checkpoint of the span first, then small devices, as large ones suit more spans."""
    saved = any(set(span) <= set(item.layers) for item in state.checkpoints.get(peer, ()))
    return not saved, live_of(state, peer).profile.device_memory_bytes, peer


def _standby_delay_seconds(memory: RunMemory, peer: str, policy: Policy, now: float) -> float:
    """Seconds without a place before a node stands by: doubled by each recent join into the plan."""
    doublings = max(0, recent_joins(memory, peer, now) - 1)
    return min(_MAX_STANDBY_DELAY_SECONDS, policy.standby_seconds * 2.0**doublings)


def issue_with_standbys(
    draft: Draft, run_id: str, routes: Sequence[Route], standbys: Mapping[str, range], reason: str
) -> bool:
    """Issue a plan with other standbys or other holders: the predicted pace of the present plan still counts.

    False: nobody could decide under it, so there is no plan.
    """
    memory = draft.state.memory[run_id]
    predicted = memory.figures.predicted_tokens_per_second if memory.figures else 0.0
    notes = PlanNotes(predicted, 0.0, memory.left_out)
    if not issue_route_plan(draft, run_id, routes, reason, notes, standbys=standbys):
        return False
    left_out = {peer: why for peer, why in memory.left_out.items() if peer not in standbys}
    draft.remember(run_id, left_out=left_out)
    return True


def _only_voters(state: State, plan: Plan, wanted: Mapping[str, range]) -> Collection[str]:
    """Peer ids that stay members only because nobody could decide the next round without their votes."""
    members = (*plan.stages, *(peer for peer, span in wanted.items() if plan.span(peer) == span))
    spans = {peer: plan.span(peer) for peer in members}
    return quorum_guard.voters_to_keep(state, plan.run_id, spans)


def _change_text(state: State, before: Mapping[str, range], after: Mapping[str, range]) -> str:
    new = [
        f"{state.nodes[peer].name} stands by with layers {span.start}–{span.stop - 1}"
        for peer, span in sorted(after.items())
        if before.get(peer) != span
    ]
    ended = [f"{state.nodes[peer].name} stands by no more" for peer in sorted(before.keys() - after.keys())]
    return "; ".join(new + ended)


# --- neighbour copies --------------------------------------------------------------------------------


def update_copies(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> None:
    """Choose the nodes that hold a neighbour's layers; `prefetch.layers_to_fetch` makes them fetch these."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan, checked_at = memory.plan, memory.copies_checked_at
    if plan is None or memory.no_plan_reason or (checked_at is not None and now - checked_at < _CHECK_INTERVAL_SECONDS):
        return
    draft.remember(run_id, copies_checked_at=now)
    settled = draft.now.unix_ms - plan.issued_unix_ms >= 1000 * policy.standby_seconds
    wanted = _wanted_copies(state, plan, attendance, now, settled=settled)
    before = {peer: _refreshed(state, peer, it, now) for peer, it in memory.copy_fetches.items()}
    spans = {peer: pair.joint_span for peer, pair in wanted.items()}
    copies = _pending_fetches(draft, run_id, policy, spans, before)
    if copies == memory.copy_fetches:
        return
    for peer in sorted(copies.keys() - memory.copy_fetches.keys()):
        pair = wanted[peer]
        layers = f"layers {pair.stage_span.start}–{pair.stage_span.stop - 1} of {state.nodes[pair.stage].name}"
        draft.event("copy.wanted", run_id, peer, f"{state.nodes[peer].name} fetches a second copy of {layers}")
    draft.remember(run_id, copy_fetches=copies)


def drop_unusable_copies(draft: Draft, run_id: str) -> None:
    """Drop copies that fit no pair of the plan. The time of a holder that fetches for a prepared plan starts anew."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.copy_fetches and memory.plan is not None:
        usable = {(pair.holder, pair.joint_span) for pair in neighbour_pairs(memory.plan)}
        busy = memory.preparation.spans if memory.preparation is not None else {}
        copies = {
            peer: PendingFetch(it.span, now) if peer in busy and now - it.since >= _REFRESH_INTERVAL_SECONDS else it
            for peer, it in memory.copy_fetches.items()
            if (peer, it.span) in usable
        }
        if copies != memory.copy_fetches:
            draft.remember(run_id, copy_fetches=copies)


def _wanted_copies(
    state: State, plan: Plan, attendance: Attendance, now: float, *, settled: bool
) -> dict[str, NeighbourPair]:
    """Pairs that should have a copy, by holder; new ones only under a plan that is `settled`.

    A stage whose span a standby holds needs no copy. A stage whose span a standby fetches gets no new one.
    """
    run_id, memory = plan.run_id, state.memory[plan.run_id]
    if not memory.spec.pipeline.second_copies:
        return {}
    held_by_standbys = {plan.span(peer) for peer in plan.standbys}
    fetched_by_standbys = {it.span for it in memory.standby_fetches.values()}
    possible = [
        pair
        for pair in neighbour_pairs(plan)
        if pair.stage_span not in held_by_standbys
        and pair.holder in attendance.plannable
        and may_hold(state, run_id, pair.holder, pair.joint_span)
    ]
    present = [
        pair
        for pair in possible
        if (it := memory.copy_fetches.get(pair.holder)) is not None
        and it.span == pair.joint_span
        and _links_carry_copy(state, pair, run_id, _DROP_LINK_SHARE)
    ]
    new = [
        pair
        for pair in possible
        if settled
        and pair.stage in attendance.plannable
        and pair.stage_span not in fetched_by_standbys
        and pair.holder in attendance.eligible
        and is_training(state, pair.holder)
        and _may_fetch(state, run_id, pair.holder, now)
        and _links_carry_copy(state, pair, run_id, _MAX_LINK_SHARE)
    ]
    holders = {span: len(plan.holders(span)) for span in {pair.stage_span for pair in new}}
    return choose_copies([*present, *sorted(new, key=lambda it: holders[it.stage_span])])  # of equals along the route


def _refreshed(state: State, peer: str, fetch: PendingFetch, now: float) -> PendingFetch:
    """Restart the time of a complete copy, so that it is never late."""
    recent = now - fetch.since < _REFRESH_INTERVAL_SECONDS
    return fetch if recent or not prefetch.has_prefetched(state, peer, fetch.span) else PendingFetch(fetch.span, now)


def _links_carry_copy(state: State, pair: NeighbourPair, run_id: str, share: float) -> bool:
    """True where both links carry the state of the stage's layers in that share of the time between two rounds."""
    sent_bytes = STATE_BYTES_PER_PARAMETER * _parameters(state, run_id, pair.stage_span)
    seconds = share * plan_issue.round_seconds(state.memory[run_id])
    return _links_carry(state, (pair.holder, pair.stage), sent_bytes, seconds)


# --- both --------------------------------------------------------------------------------------------


def _pending_fetches(
    draft: Draft, run_id: str, policy: Policy, spans: Mapping[str, range], before: Mapping[str, PendingFetch]
) -> dict[str, PendingFetch]:
    """Fetches of `spans`; those of `before` keep their start. Nodes that are late or refuse are left out, and noted."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    pending = {
        peer: known if (known := before.get(peer)) and known.span == span else PendingFetch(span, now)
        for peer, span in spans.items()
    }
    late = {
        peer
        for peer, it in pending.items()
        if now - it.since >= _fetch_deadline_seconds(state, run_id, it.span, policy)
        and not prefetch.has_prefetched(state, peer, it.span)
    }
    failed = late | {peer for peer, it in pending.items() if prefetch.reports_no_room(state, peer, it.span)}
    if failed:
        draft.remember(run_id, fetch_timeouts={**memory.fetch_timeouts, **dict.fromkeys(failed, now)})
    return {peer: it for peer, it in pending.items() if peer not in failed}


def _fetch_deadline_seconds(state: State, run_id: str, span: range, policy: Policy) -> float:
    fetched_bytes = STATE_BYTES_PER_PARAMETER * _parameters(state, run_id, span)
    return policy.prepare_seconds + fetched_bytes / prefetch.ASSUMED_MIN_BYTES_PER_SECOND


def may_hold(state: State, run_id: str, peer: str, span: range) -> bool:
    """True where a node has the memory for the span, as far as it reported, and no pin to other layers."""
    pinned = pinned_span(state.nodes[peer])
    return pinned in (None, (span.start, span.stop - 1)) and span_fits(state, run_id, peer, span)


def _may_fetch(state: State, run_id: str, peer: str, now: float) -> bool:
    """True where a node reported its profile, and was not too slow to fetch recently."""
    return has_planner_inputs(live_of(state, peer).profile) and not _was_slow_recently(state.memory[run_id], peer, now)


def _was_slow_recently(memory: RunMemory, peer: str, now: float) -> bool:
    at = memory.fetch_timeouts.get(peer)
    return at is not None and now - at < UNPREPARED_HOLD_SECONDS


def _links_carry(state: State, peers: Iterable[str], sent_bytes: float, seconds: float) -> bool:
    """True where the uplink of each of these nodes sends that much in that time; an unknown uplink counts as enough.

    Only uplinks are measured; home links receive faster than they send.
    """
    links = plan_issue.reported_links(state, peers).values()
    return all(sent_bytes / link.uplink <= seconds for link in links if link.uplink)


def _parameters(state: State, run_id: str, span: range) -> float:
    weights = plan_issue.layer_weights(state.runs[run_id])
    return sum(weights[layer] for layer in span)


def part_span(part: RoutePart) -> range:
    """Layers of a route's part."""
    return range(part.first, part.last + 1)


def is_training(state: State, peer: str) -> bool:
    """True where a node reports that it trains."""
    return live_of(state, peer).status.state == mb.NODE_STATE_TRAINING
