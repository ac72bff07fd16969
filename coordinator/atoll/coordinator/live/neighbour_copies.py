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
from atoll.coordinator.live.attendance import Present
from atoll.coordinator.live.pinning import span_of
from atoll.coordinator.live.plan_issue import STATE_BYTES_PER_PARAMETER, Notes, issue_routes
from atoll.coordinator.live.span_fit import has_room
from atoll.coordinator.planner.plan_builder import Route, routes_of
from atoll.coordinator.planner.question import is_known
from atoll.coordinator.state import prefetch
from atoll.coordinator.state.snapshot import Coming, Draft, Policy, State
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

_ALONE_SECONDS = 60.0  # between take-overs on the word of nobody but who takes over
_UNDISTURBED_SECONDS = 20.0  # that a route which became shorter has to work again, before the planner is asked
_MOST_OF_A_LINK = 0.25  # of the time between two rounds, to send or fetch what a copy needs
_TOO_MUCH_OF_A_LINK = 0.4  # one that is there is given up
_LOOK_SECONDS = 2.0  # between looks at who should have one
_FRESH_SECONDS = 10.0  # no more often is it written down that a copy is there


@dataclass(frozen=True)
class Pair:
    """Two stages that follow each other on a route: `keeper` may have the layers of `of`, too."""

    keeper: str  # peer id
    of: str  # peer id
    keeper_span: range
    of_span: range

    @property
    def both(self) -> range:
        """The layers of both."""
        first, last = sorted((self.keeper_span, self.of_span), key=lambda span: span.start)
        return range(first.start, last.stop)


def take_over(draft: Draft, run_id: str, here: Present) -> bool:
    """Give the layers of stages that are gone to who has a copy. Whether any were given."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan = memory.plan
    taken = _taken(state, plan, here, now) if plan is not None else []
    if plan is None or not taken:
        return False
    keepers, gone_peers = {pair.keeper: pair for pair in taken}, {pair.of for pair in taken}
    routes = [_shorter(route, keepers, gone_peers) for route in routes_of(plan)]
    alone = [
        pair.keeper for pair in taken if not stage_liveness.is_gone(state, plan, pair.of, here, now, but=pair.keeper)
    ]
    draft.remember(
        run_id,
        copies={peer: it for peer, it in memory.copies.items() if peer not in keepers},
        took_over={**memory.took_over, **dict.fromkeys(alone, now)},
        undisturbed_until=now + _UNDISTURBED_SECONDS,
    )
    told = sorted(f"{state.nodes[it.keeper].name} takes the layers of {state.nodes[it.of].name}, too" for it in taken)
    standing = standbys.kept(state, run_id, routes, [*here.fit, *here.silent])
    issue_routes(draft, run_id, routes, "; ".join(told), Notes(left_out=memory.left_out), standbys=standing)
    return True


def are_needed(state: State, run_id: str, here: Present, now: float) -> bool:
    """Whether a stage is gone whose copy its keeper put aside, to fetch what a plan to come may give it."""
    memory = state.memory[run_id]
    if memory.plan is None or memory.preparation is None or not memory.copies:
        return False
    aside = memory.preparation.spans.keys() & memory.copies.keys()
    return any(
        pair.keeper in aside
        and memory.copies[pair.keeper].span == pair.both
        and stage_liveness.is_gone(state, memory.plan, pair.of, here, now)
        for pair in pairs(memory.plan)
    )


def follow(draft: Draft, run_id: str, policy: Policy, here: Present) -> None:
    """Who should have a copy of which layers; each is told to fetch them (`preparation.told`)."""
    state, memory, now = draft.state, draft.state.memory[run_id], draft.now.monotonic
    plan, looked = memory.plan, memory.copies_looked_at
    if plan is None or memory.missing or (looked is not None and now - looked < _LOOK_SECONDS):
        return
    draft.remember(run_id, copies_looked_at=now)
    settled = draft.now.unix_ms - plan.issued_unix_ms >= 1000 * policy.standby_seconds
    wanted = _wanted(state, plan, here, now, settled=settled)
    copies = {peer: _since(state, peer, pair, memory.copies.get(peer), now) for peer, pair in wanted.items()}
    lacking = {peer: it for peer, it in copies.items() if not prefetch.holds(state, peer, it.span)}
    late = {peer for peer, it in lacking.items() if now - it.since >= standbys.patience(state, run_id, it, policy)}
    late |= {peer for peer, it in copies.items() if prefetch.refuses(state, peer, it.span)}
    if late:
        draft.remember(run_id, slow_to_fetch={**memory.slow_to_fetch, **dict.fromkeys(late, now)})
    copies = {peer: it for peer, it in copies.items() if peer not in late}
    if copies == memory.copies:
        return
    for peer in sorted(copies.keys() - memory.copies.keys()):
        pair = wanted[peer]
        told = f"layers {pair.of_span.start}–{pair.of_span.stop - 1} of {state.nodes[pair.of].name}"
        draft.event("copy.wanted", run_id, peer, f"{state.nodes[peer].name} fetches a second copy of {told}")
    draft.remember(run_id, copies=copies)


def let_go(draft: Draft, run_id: str) -> None:
    """Of copies that another plan made useless. Who fetches what a plan to come may give it is not late meanwhile."""
    memory, now = draft.state.memory[run_id], draft.now.monotonic
    if memory.copies and memory.plan is not None:
        useful = {(pair.keeper, pair.both) for pair in pairs(memory.plan)}
        busy = memory.preparation.spans if memory.preparation is not None else {}
        copies = {
            peer: Coming(it.span, now) if peer in busy and now - it.since >= _FRESH_SECONDS else it
            for peer, it in memory.copies.items()
            if (peer, it.span) in useful
        }
        if copies != memory.copies:
            draft.remember(run_id, copies=copies)


def kept(state: State, plan: Plan) -> Iterator[Pair]:
    """Copies that are there, as of the newest round or nearly."""
    copies = state.memory[plan.run_id].copies
    for pair in pairs(plan):
        coming = copies.get(pair.keeper)
        if coming is not None and coming.span == pair.both and prefetch.holds(state, pair.keeper, pair.both):
            yield pair


def pairs(plan: Plan) -> Iterator[Pair]:
    """Neighbours on routes, along each, the stage before first."""
    for route in routes_of(plan):
        spans = [(part.peer_id, range(part.first, part.last + 1)) for part in route]
        for place, (peer, span) in enumerate(spans):
            for keeper, own in (*spans[max(0, place - 1) : place], *spans[place + 1 : place + 2]):
                yield Pair(keeper, peer, own, span)


def chosen(able: Iterable[Pair]) -> dict[str, Pair]:
    """By who has it: one copy each, and one of each stage; earlier pairs first."""
    found: dict[str, Pair] = {}
    copied = set()
    for pair in able:
        if pair.keeper not in found and pair.of not in copied:
            found[pair.keeper] = pair
            copied.add(pair.of)
    return found


# --- a stage is gone ---------------------------------------------------------------------------------


def _taken(state: State, plan: Plan, here: Present, now: float) -> list[Pair]:
    """Whose layers are taken by whom: each stage's once, and one stage's by each keeper."""
    found: list[Pair] = []
    keepers: set[str] = set()
    without: set[str] = set()
    for pair in kept(state, plan):
        free = pair.of not in without and pair.keeper not in keepers and pair.keeper not in without
        if free and stage_liveness.is_gone(state, plan, pair.of, here, now) and _can_take(state, plan, pair, here, now):
            found.append(pair)
            keepers.add(pair.keeper)
            without.add(pair.of)
    return found


def _can_take(state: State, plan: Plan, pair: Pair, here: Present, now: float) -> bool:
    """Whether this node trains and has room, its copy is good, and it is believed."""
    trains = pair.keeper in here.fit and _trains(state, pair.keeper)
    if not (trains and _may(state, plan.run_id, pair) and _is_newest(state, pair, here)):
        return False
    before = state.memory[plan.run_id].took_over.get(pair.keeper)
    lately = before is not None and now - before < _ALONE_SECONDS
    return not lately or stage_liveness.is_gone(state, plan, pair.of, here, now, but=pair.keeper)


def _is_newest(state: State, pair: Pair, here: Present) -> bool:
    """Whether a copy is of the newest round. One that is nearly is enough once its stage cannot bring its own back."""
    newest = state.runs[state.nodes[pair.keeper].run_id].head_round
    return pair.of not in here.there or planner_question.live_of(state, pair.keeper).status.prepared_round >= newest


def _shorter(route: Route, keepers: Mapping[str, Pair], without: Collection[str]) -> Route:
    """The route in which keepers have both spans."""
    left = (part for part in route if part.peer_id not in without)
    return tuple(
        replace(part, first=pair.both.start, last=pair.both.stop - 1) if (pair := keepers.get(part.peer_id)) else part
        for part in left
    )


# --- who should have one -----------------------------------------------------------------------------


def _wanted(state: State, plan: Plan, here: Present, now: float, *, settled: bool) -> dict[str, Pair]:
    """By peer id of who has it, or should: new ones under a plan that is `settled`.

    Who stands by makes a copy of the same layers needless.
    """
    run_id, memory = plan.run_id, state.memory[plan.run_id]
    if not memory.spec.pipeline.second_copies:
        return {}
    standing = {plan.span(peer) for peer in plan.standbys}
    coming = {it.span for it in memory.standbys.values()}
    there, weights = {*here.fit, *here.silent}, plan_issue.layer_weights(state.runs[run_id])
    open_pairs = [pair for pair in pairs(plan) if pair.of_span not in standing and pair.keeper in there]
    possible = [pair for pair in open_pairs if _may(state, run_id, pair)]
    held = [
        pair
        for pair in possible
        if (it := memory.copies.get(pair.keeper)) is not None
        and it.span == pair.both
        and _links_carry(state, pair, weights, _TOO_MUCH_OF_A_LINK * plan_issue.round_seconds(memory))
    ]
    able = [
        pair
        for pair in possible
        if settled
        and pair.of in there
        and pair.of_span not in coming
        and _can_fetch(state, run_id, pair, here, now)
        and _links_carry(state, pair, weights, _MOST_OF_A_LINK * plan_issue.round_seconds(memory))
    ]
    holders = {span: len(plan.holders(span)) for span in {pair.of_span for pair in able}}
    return chosen([*held, *sorted(able, key=lambda it: holders[it.of_span])])  # of equals along the route


def _since(state: State, peer: str, pair: Pair, before: Coming | None, now: float) -> Coming:
    """A copy that is there is not late: its time begins anew."""
    if before is None or before.span != pair.both:
        return Coming(pair.both, now)
    fresh = now - before.since < _FRESH_SECONDS or not prefetch.holds(state, peer, pair.both)
    return before if fresh else Coming(pair.both, now)


def _may(state: State, run_id: str, pair: Pair) -> bool:
    """Whether who keeps it has room for both spans and is not pinned to its own."""
    pinned = span_of(state.nodes[pair.keeper])
    both = pair.both.start, pair.both.stop - 1
    return pinned in (None, both) and has_room(state, run_id, pair.keeper, pair.both)


def _can_fetch(state: State, run_id: str, pair: Pair, here: Present, now: float) -> bool:
    """Whether this node trains, told what it computes with, and was not too slow lately."""
    slow = planner_question.lately(state.memory[run_id].slow_to_fetch, pair.keeper, now)
    known = is_known(planner_question.live_of(state, pair.keeper).profile)
    trains = pair.keeper in here.fit and _trains(state, pair.keeper)
    return trains and known and not slow


def _links_carry(state: State, pair: Pair, weights: Sequence[float], seconds: float) -> bool:
    """Whether both links, where they are known, carry what a copy takes in that time.

    Only what nodes send was ever measured; homes receive faster.
    """
    sent = STATE_BYTES_PER_PARAMETER * sum(weights[layer] for layer in pair.of_span)
    uplinks = [it.uplink for it in plan_issue.links(state, (pair.keeper, pair.of)).values() if it.uplink]
    return all(sent / uplink <= seconds for uplink in uplinks)


def _trains(state: State, peer: str) -> bool:
    return planner_question.live_of(state, peer).status.state == mb.NODE_STATE_TRAINING
