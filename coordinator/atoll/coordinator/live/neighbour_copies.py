"""Neighbour copies: a stage holds the layers of its neighbour on the route, which has no standby. Pure.

A *neighbour copy* (`second_copies` in the run spec) is for a stage without a standby. The previous or next stage of the
route fetches that stage's layers to disk, if both spans fit in its memory, and keeps them current (the node's
`state/prefetch`). It still trains only its own span, and the plan does not contain the copy. `stage_take_over.py` uses
the copy when the stage is gone.

Each node has at most one copy. Stages with the fewest holders come first. A copy stays while the route stays. A holder
fetches the copied layers again after each of their rounds. So there is no copy if that would use a link for more than a
quarter of the time between two rounds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from atoll.coordinator.live import plan_issue
from atoll.coordinator.live.attendance import Attendance
from atoll.coordinator.live.backup_fetches import (
    is_training,
    links_carry,
    may_fetch,
    may_hold,
    parameters_of,
    pending_fetches,
)
from atoll.coordinator.planner.plan_builder import routes_of
from atoll.coordinator.planner.question import STATE_BYTES_PER_PARAMETER
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_memory import PendingFetch
from atoll.coordinator.state.snapshot import Policy, State
from atoll.core.plan import Plan

_MAX_LINK_SHARE = 0.25  # of the time between two rounds, to send or fetch a copy's layers
_DROP_LINK_SHARE = 0.4  # an existing copy is dropped above this share
_CHECK_INTERVAL_SECONDS = 2.0  # between two decisions which nodes should have a copy
_REFRESH_INTERVAL_SECONDS = 10.0  # between updates of the time at which a copy was complete


@dataclass(frozen=True)
class NeighbourPair:
    """Two neighbours on a route: `holder` may hold the layers of `stage` in addition to its own."""

    holder: str  # peer id
    stage: str  # peer id
    holder_span: range
    stage_span: range

    @property
    def joint_span(self) -> range:
        """The layers of both."""
        first, last = sorted((self.holder_span, self.stage_span), key=lambda span: span.start)
        return range(first.start, last.stop)


def complete_copies(state: State, plan: Plan) -> Iterator[NeighbourPair]:
    """Pairs whose copy is complete and of the newest round or nearly."""
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
    """All pairs of neighbours along each route; for each stage, the previous stage comes first."""
    for route in routes_of(plan):
        spans = [(part.peer_id, part.span) for part in route]
        for place, (peer, span) in enumerate(spans):
            for holder, own in (*spans[max(0, place - 1) : place], *spans[place + 1 : place + 2]):
                yield NeighbourPair(holder, peer, own, span)


def choose_copies(able: Iterable[NeighbourPair]) -> dict[str, NeighbourPair]:
    """Choose pairs, by holder: one copy per holder and one per stage. Earlier pairs come first."""
    found: dict[str, NeighbourPair] = {}
    copied = set()
    for pair in able:
        if pair.holder not in found and pair.stage not in copied:
            found[pair.holder] = pair
            copied.add(pair.stage)
    return found


def update_copies(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> None:
    """Choose the nodes that hold a neighbour's layers. `prefetch.layers_to_fetch` tells them to fetch these."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan, checked_at = memory.plan, memory.copies_checked_at
    if plan is None or memory.no_plan_reason or (checked_at is not None and now - checked_at < _CHECK_INTERVAL_SECONDS):
        return
    draft.remember(run_id, copies_checked_at=now)
    settled = draft.now.unix_ms - plan.issued_unix_ms >= 1000 * policy.standby_seconds
    wanted = _wanted_copies(state, plan, attendance, now, settled=settled)
    before = {peer: _refreshed(state, peer, it, now) for peer, it in memory.copy_fetches.items()}
    spans = {peer: pair.joint_span for peer, pair in wanted.items()}
    copies = pending_fetches(draft, run_id, policy, spans, before)
    if copies == memory.copy_fetches:
        return
    for peer in sorted(copies.keys() - memory.copy_fetches.keys()):
        _log_wanted(draft, run_id, wanted[peer])
    draft.remember(run_id, copy_fetches=copies)


def _log_wanted(draft: Draft, run_id: str, pair: NeighbourPair) -> None:
    nodes, span = draft.state.nodes, pair.stage_span
    layers = f"layers {span.start}–{span.stop - 1} of {nodes[pair.stage].name}"
    draft.event("copy.wanted", run_id, pair.holder, f"{nodes[pair.holder].name} fetches a second copy of {layers}")


def drop_unusable_copies(draft: Draft, run_id: str) -> None:
    """Drop copies that fit no pair of the plan. Restart the deadline of a holder that fetches for a prepared plan."""
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
    """Pairs that should have a copy, by holder. New pairs only if the plan is `settled`.

    A stage needs no copy if a standby holds its span. It gets no new copy while a standby fetches its span.
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
        and may_fetch(state, run_id, pair.holder, now)
        and _links_carry_copy(state, pair, run_id, _MAX_LINK_SHARE)
    ]
    holders = {span: len(plan.holders(span)) for span in {pair.stage_span for pair in new}}
    # in a tie, in the order of the routes
    return choose_copies([*present, *sorted(new, key=lambda it: holders[it.stage_span])])


def _refreshed(state: State, peer: str, fetch: PendingFetch, now: float) -> PendingFetch:
    """While the copy is complete, restart its fetch deadline."""
    recent = now - fetch.since < _REFRESH_INTERVAL_SECONDS
    return fetch if recent or not prefetch.has_prefetched(state, peer, fetch.span) else PendingFetch(fetch.span, now)


def _links_carry_copy(state: State, pair: NeighbourPair, run_id: str, share: float) -> bool:
    """True if both links carry the state of the stage's layers in `share` of the time between two rounds."""
    sent_bytes = STATE_BYTES_PER_PARAMETER * parameters_of(state, run_id, pair.stage_span)
    seconds = share * plan_issue.round_seconds(state.memory[run_id])
    return links_carry(state, (pair.holder, pair.stage), sent_bytes, seconds)
