"""Second copies: a stage with room has the layers of a neighbour, too, and takes both when that one is gone. Pure.

Where nobody stands by with a stage's layers, the stage before or behind it on the route fetches them, if both spans
together fit it: to its disk, where they follow the rounds (the node's `state/prepared`). It trains its own alone, and
no plan says more. A node has one such copy; stages with the fewest holders come first, and who has a copy keeps it
while the route stays. It is sent these layers anew each time that they are averaged; a pair whose links would take over
a quarter of the time between two rounds for that has none.

When the stage is gone, the plan that is issued at once gives both spans to who has the copy: the route is shorter by
one. The planner looks for better ones when it works again. A stage whose process is there again before it was missed is
waited for: it has loaded its layers as soon as another would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from atoll.coordinator.live import plan_issue, planner_question, stage_liveness, standbys
from atoll.coordinator.live.attendance import Attendance
from atoll.coordinator.live.pinning import pinned_span
from atoll.coordinator.live.plan_issue import STATE_BYTES_PER_PARAMETER, PlanNotes, issue_route_plan
from atoll.coordinator.live.span_fit import span_fits
from atoll.coordinator.planner.plan_builder import Route, routes_of
from atoll.coordinator.planner.question import has_planner_inputs
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.snapshot import Draft, PendingFetch, Policy, State
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

_UNCONFIRMED_TAKE_OVER_SECONDS = 60.0  # between take-overs on the word of nobody but who takes over
_SETTLE_SECONDS = 20.0  # that a route which became shorter has to work again, before the planner is asked
_MAX_LINK_SHARE = 0.25  # of the time between two rounds, to send or fetch what a copy needs
_DROP_LINK_SHARE = 0.4  # one that is there is given up
_CHECK_INTERVAL_SECONDS = 2.0  # between looks at who should have one
_REFRESH_INTERVAL_SECONDS = 10.0  # no more often is it written down that a copy is there


@dataclass(frozen=True)
class NeighbourPair:
    """Two stages that follow each other on a route: `holder` may have the layers of `stage`, too."""

    holder: str  # peer id
    stage: str  # peer id
    holder_span: range
    stage_span: range

    @property
    def joint_span(self) -> range:
        """The layers of both."""
        first, last = sorted((self.holder_span, self.stage_span), key=lambda span: span.start)
        return range(first.start, last.stop)


def take_over(draft: Draft, run_id: str, attendance: Attendance) -> bool:
    """Give the layers of stages that are gone to who has a copy. Whether any were given."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan = memory.plan
    taken = _take_overs(state, plan, attendance, now) if plan is not None else []
    if plan is None or not taken:
        return False
    copy_holders, gone_peers = {pair.holder: pair for pair in taken}, {pair.stage for pair in taken}
    routes = [_shorter(route, copy_holders, gone_peers) for route in routes_of(plan)]
    alone = [
        pair.holder
        for pair in taken
        if not stage_liveness.is_gone(state, plan, pair.stage, attendance, now, ignoring=pair.holder)
    ]
    draft.remember(
        run_id,
        copies={peer: it for peer, it in memory.copies.items() if peer not in copy_holders},
        unconfirmed_takeovers={**memory.unconfirmed_takeovers, **dict.fromkeys(alone, now)},
        no_question_before=now + _SETTLE_SECONDS,
    )
    told = sorted(
        f"{state.nodes[it.holder].name} takes the layers of {state.nodes[it.stage].name}, too" for it in taken
    )
    standing = standbys.kept(state, run_id, routes, [*attendance.eligible, *attendance.awaited])
    issue_route_plan(draft, run_id, routes, "; ".join(told), PlanNotes(left_out=memory.left_out), standbys=standing)
    return True


def is_set_aside_copy_needed(state: State, run_id: str, attendance: Attendance, now: float) -> bool:
    """Whether a stage is gone whose copy its keeper put aside, to fetch what a plan to come may give it."""
    memory = state.memory[run_id]
    if memory.plan is None or memory.preparation is None or not memory.copies:
        return False
    aside = memory.preparation.spans.keys() & memory.copies.keys()
    return any(
        pair.holder in aside
        and memory.copies[pair.holder].span == pair.joint_span
        and stage_liveness.is_gone(state, memory.plan, pair.stage, attendance, now)
        for pair in neighbour_pairs(memory.plan)
    )


def follow(draft: Draft, run_id: str, policy: Policy, attendance: Attendance) -> None:
    """Who should have a copy of which layers; each is told to fetch them (`preparation.told`)."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan, looked = memory.plan, memory.copies_checked_at
    if plan is None or memory.missing or (looked is not None and now - looked < _CHECK_INTERVAL_SECONDS):
        return
    draft.remember(run_id, copies_checked_at=now)
    settled = draft.now.unix_ms - plan.issued_unix_ms >= 1000 * policy.standby_seconds
    wanted = _wanted(state, plan, attendance, now, settled=settled)
    copies = {peer: _refreshed(state, peer, pair, memory.copies.get(peer), now) for peer, pair in wanted.items()}
    lacking = {peer: it for peer, it in copies.items() if not prefetch.has_prefetched(state, peer, it.span)}
    late = {
        peer
        for peer, it in lacking.items()
        if now - it.since >= standbys.fetch_deadline_seconds(state, run_id, it, policy)
    }
    late |= {peer for peer, it in copies.items() if prefetch.reports_no_room(state, peer, it.span)}
    if late:
        draft.remember(run_id, fetch_timeouts={**memory.fetch_timeouts, **dict.fromkeys(late, now)})
    copies = {peer: it for peer, it in copies.items() if peer not in late}
    if copies == memory.copies:
        return
    for peer in sorted(copies.keys() - memory.copies.keys()):
        pair = wanted[peer]
        told = f"layers {pair.stage_span.start}–{pair.stage_span.stop - 1} of {state.nodes[pair.stage].name}"
        draft.event("copy.wanted", run_id, peer, f"{state.nodes[peer].name} fetches a second copy of {told}")
    draft.remember(run_id, copies=copies)


def drop_unusable_copies(draft: Draft, run_id: str) -> None:
    """Of copies that another plan made useless. Who fetches what a plan to come may give it is not late meanwhile."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.copies and memory.plan is not None:
        useful = {(pair.holder, pair.joint_span) for pair in neighbour_pairs(memory.plan)}
        busy = memory.preparation.spans if memory.preparation is not None else {}
        copies = {
            peer: PendingFetch(it.span, now) if peer in busy and now - it.since >= _REFRESH_INTERVAL_SECONDS else it
            for peer, it in memory.copies.items()
            if (peer, it.span) in useful
        }
        if copies != memory.copies:
            draft.remember(run_id, copies=copies)


def kept(state: State, plan: Plan) -> Iterator[NeighbourPair]:
    """Copies that are there, as of the newest round or nearly."""
    copies = state.memory[plan.run_id].copies
    for pair in neighbour_pairs(plan):
        coming = copies.get(pair.holder)
        if (
            coming is not None
            and coming.span == pair.joint_span
            and prefetch.has_prefetched(state, pair.holder, pair.joint_span)
        ):
            yield pair


def neighbour_pairs(plan: Plan) -> Iterator[NeighbourPair]:
    """Neighbours on routes, along each, the stage before first."""
    for route in routes_of(plan):
        spans = [(part.peer_id, range(part.first, part.last + 1)) for part in route]
        for place, (peer, span) in enumerate(spans):
            for holder, own in (*spans[max(0, place - 1) : place], *spans[place + 1 : place + 2]):
                yield NeighbourPair(holder, peer, own, span)


def choose_copies(able: Iterable[NeighbourPair]) -> dict[str, NeighbourPair]:
    """By who has it: one copy each, and one of each stage; earlier pairs first."""
    found: dict[str, NeighbourPair] = {}
    copied = set()
    for pair in able:
        if pair.holder not in found and pair.stage not in copied:
            found[pair.holder] = pair
            copied.add(pair.stage)
    return found


# --- a stage is gone ---------------------------------------------------------------------------------


def _take_overs(state: State, plan: Plan, attendance: Attendance, now: float) -> list[NeighbourPair]:
    """Whose layers are taken by whom: each stage's once, and one stage's by each keeper."""
    found: list[NeighbourPair] = []
    copy_holders: set[str] = set()
    without: set[str] = set()
    for pair in kept(state, plan):
        free = pair.stage not in without and pair.holder not in copy_holders and pair.holder not in without
        if (
            free
            and stage_liveness.is_gone(state, plan, pair.stage, attendance, now)
            and _can_take(state, plan, pair, attendance, now)
        ):
            found.append(pair)
            copy_holders.add(pair.holder)
            without.add(pair.stage)
    return found


def _can_take(state: State, plan: Plan, pair: NeighbourPair, attendance: Attendance, now: float) -> bool:
    """Whether this node trains and has room, its copy is good, and it is believed."""
    trains = pair.holder in attendance.eligible and _trains(state, pair.holder)
    if not (trains and _can_hold_both(state, plan.run_id, pair) and _is_newest(state, pair, attendance)):
        return False
    before = state.memory[plan.run_id].unconfirmed_takeovers.get(pair.holder)
    lately = before is not None and now - before < _UNCONFIRMED_TAKE_OVER_SECONDS
    return not lately or stage_liveness.is_gone(state, plan, pair.stage, attendance, now, ignoring=pair.holder)


def _is_newest(state: State, pair: NeighbourPair, attendance: Attendance) -> bool:
    """Whether a copy is of the newest round. One that is nearly is enough once its stage cannot bring its own back."""
    newest = state.runs[state.nodes[pair.holder].run_id].head_round
    return (
        pair.stage not in attendance.present_peers
        or planner_question.live_of(state, pair.holder).status.prepared_round >= newest
    )


def _shorter(route: Route, copy_holders: Mapping[str, NeighbourPair], without: Collection[str]) -> Route:
    """The route in which keepers have both spans."""
    left = (part for part in route if part.peer_id not in without)
    return tuple(
        replace(part, first=pair.joint_span.start, last=pair.joint_span.stop - 1)
        if (pair := copy_holders.get(part.peer_id))
        else part
        for part in left
    )


# --- who should have one -----------------------------------------------------------------------------


def _wanted(state: State, plan: Plan, attendance: Attendance, now: float, *, settled: bool) -> dict[str, NeighbourPair]:
    """By peer id of who has it, or should: new ones under a plan that is `settled`.

    Who stands by makes a copy of the same layers needless.
    """
    run_id, memory = plan.run_id, state.memory[plan.run_id]
    if not memory.spec.pipeline.second_copies:
        return {}
    standing = {plan.span(peer) for peer in plan.standbys}
    coming = {it.span for it in memory.standbys.values()}
    present_peers, weights = {*attendance.eligible, *attendance.awaited}, plan_issue.layer_weights(state.runs[run_id])
    open_pairs = [
        pair for pair in neighbour_pairs(plan) if pair.stage_span not in standing and pair.holder in present_peers
    ]
    possible = [pair for pair in open_pairs if _can_hold_both(state, run_id, pair)]
    held = [
        pair
        for pair in possible
        if (it := memory.copies.get(pair.holder)) is not None
        and it.span == pair.joint_span
        and _links_carry(state, pair, weights, _DROP_LINK_SHARE * plan_issue.round_seconds(memory))
    ]
    able = [
        pair
        for pair in possible
        if settled
        and pair.stage in present_peers
        and pair.stage_span not in coming
        and _can_fetch(state, run_id, pair, attendance, now)
        and _links_carry(state, pair, weights, _MAX_LINK_SHARE * plan_issue.round_seconds(memory))
    ]
    holders = {span: len(plan.holders(span)) for span in {pair.stage_span for pair in able}}
    return choose_copies([*held, *sorted(able, key=lambda it: holders[it.stage_span])])  # of equals along the route


def _refreshed(state: State, peer: str, pair: NeighbourPair, before: PendingFetch | None, now: float) -> PendingFetch:
    """A copy that is there is not late: its time begins anew."""
    if before is None or before.span != pair.joint_span:
        return PendingFetch(pair.joint_span, now)
    fresh = now - before.since < _REFRESH_INTERVAL_SECONDS or not prefetch.has_prefetched(state, peer, pair.joint_span)
    return before if fresh else PendingFetch(pair.joint_span, now)


def _can_hold_both(state: State, run_id: str, pair: NeighbourPair) -> bool:
    """Whether who keeps it has room for both spans and is not pinned to its own."""
    pinned = pinned_span(state.nodes[pair.holder])
    joint_span = pair.joint_span.start, pair.joint_span.stop - 1
    return pinned in (None, joint_span) and span_fits(state, run_id, pair.holder, pair.joint_span)


def _can_fetch(state: State, run_id: str, pair: NeighbourPair, attendance: Attendance, now: float) -> bool:
    """Whether this node trains, told what it computes with, and was not too slow lately."""
    slow = planner_question.lately(state.memory[run_id].fetch_timeouts, pair.holder, now)
    known = has_planner_inputs(planner_question.live_of(state, pair.holder).profile)
    trains = pair.holder in attendance.eligible and _trains(state, pair.holder)
    return trains and known and not slow


def _links_carry(state: State, pair: NeighbourPair, weights: Sequence[float], seconds: float) -> bool:
    """Whether both links, where they are known, carry what a copy takes in that time.

    Only what nodes send was ever measured; homes receive faster.
    """
    sent = STATE_BYTES_PER_PARAMETER * sum(weights[layer] for layer in pair.stage_span)
    uplinks = [it.uplink for it in plan_issue.reported_links(state, (pair.holder, pair.stage)).values() if it.uplink]
    return all(sent / uplink <= seconds for uplink in uplinks)


def _trains(state: State, peer: str) -> bool:
    return planner_question.live_of(state, peer).status.state == mb.NODE_STATE_TRAINING
