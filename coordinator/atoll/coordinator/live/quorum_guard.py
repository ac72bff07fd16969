"""Prevents plans under which no quorum can decide the next round. Pure.

`plan_issue.py` calls `keep_voters` for every plan. If a plan's members are no quorum of the next round's electorate, it
keeps the other connected voters: they become standbys, which vote but do not train. They stay until a committed round
names an electorate without them. If they are too few, no plan is issued. Members keep their current plan, and one event
names the missing nodes and what the operator can do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from atoll.coordinator.live.attendance import ELIGIBLE_STATES, live_of, only_strangers_are_there
from atoll.coordinator.live.span_fit import span_fits
from atoll.coordinator.state import deciding
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.snapshot import State
from atoll.core.plan import Base
from atoll.core.quorum import COORDINATOR, Electorate

_MAX_NAMED_NODES = 5  # in one event
# for which a reason stays, because a wanted plan without a quorum is tried again several times a second
_REASON_SECONDS = 5.0


def keep_voters(
    draft: Draft, run_id: str, spans: Mapping[str, range], base: Base | None = None
) -> dict[str, range] | None:
    """Layers, by peer id, of the voters that a plan with the members `spans` must also keep; usually none.

    Returns None if the plan must not be issued because its members could not decide the next round; an event is logged.
    `base`: the base that the plan sets, if any. Such a plan is a recovery and is never refused.
    """
    state = draft.state
    kept = voters_to_keep(state, run_id, spans, base)
    reason = "" if base is not None else _why_undecidable(state, run_id, {*spans, *kept})
    _note_undecidable(draft, run_id, reason)
    return None if reason else kept


def _note_undecidable(draft: Draft, run_id: str, reason: str) -> None:
    before = draft.state.memory[run_id].undecidable_reason
    if reason and reason != before:
        draft.event("plan.undecidable", run_id, run_id, f"no new plan: {reason}")
    if reason:
        draft.remember(run_id, undecidable_reason=reason, undecidable_at=draft.now.monotonic)
    elif before:
        draft.remember(run_id, undecidable_reason="")


def voters_to_keep(state: State, run_id: str, spans: Mapping[str, range], base: Base | None = None) -> dict[str, range]:
    """Layers, by peer id, of connected voters outside `spans`; none if the members of `spans` are a quorum."""
    electorate = _electorate(state, run_id, base)
    if electorate is None or deciding.decides(state, run_id, electorate, spans):
        return {}
    others = sorted(peer for peer in electorate.members if peer not in spans and deciding.can_vote(state, run_id, peer))
    planned = sorted(set(spans.values()), key=lambda span: (len(span), span.start))
    found = ((peer, _span(state, run_id, peer, planned)) for peer in others)
    return {peer: span for peer, span in found if span}


def can_present_plan_decide(state: State, run_id: str, present_peers: Iterable[str]) -> bool:
    """True if the remaining members of the current plan can decide the next round, as far as is known here.

    `present_peers` count, and so do paused members.
    """
    plan, electorate = state.memory[run_id].plan, deciding.next_electorate(state, run_id)
    if plan is None or electorate is None or deciding.is_behind(state, run_id):
        return True
    left = set(present_peers) | {peer for peer in electorate.members if deciding.can_vote(state, run_id, peer)}
    return deciding.decides(state, run_id, electorate, left & set(plan.members))


def forget_old_reason(draft: Draft, run_id: str) -> None:
    """Clear the reason why no plan could be issued, once no plan was refused for a while."""
    memory = draft.state.memory[run_id]
    if memory.undecidable_reason and draft.now.monotonic - memory.undecidable_at > _REASON_SECONDS:
        draft.remember(run_id, undecidable_reason="")


def _electorate(state: State, run_id: str, base: Base | None) -> Electorate | None:
    """The members that decide the round after the plan's base, or after the newest round; None for the first plan."""
    if base is not None:
        return Electorate(frozenset(base.seats))
    return deciding.next_electorate(state, run_id) if state.memory[run_id].plan is not None else None


def _span(state: State, run_id: str, peer: str, planned: Sequence[range]) -> range:
    """Layers that a voter may keep: those of the current plan, otherwise one of `planned`; empty if none fits.

    A paused node loads no new layers.
    """
    plan = state.memory[run_id].plan
    held = plan.span(peer) if plan is not None else range(0)
    loads = live_of(state, peer).status.state in ELIGIBLE_STATES or len(planned) == 1
    choices = [*([held] if held else []), *(planned if loads else [])]
    return next((span for span in choices if span_fits(state, run_id, peer, span)), range(0))


def _why_undecidable(state: State, run_id: str, members: set[str]) -> str:
    """Why members could not decide the next round, as text; empty if they can, or if the coordinator cannot tell."""
    electorate = _electorate(state, run_id, None)
    if electorate is None or deciding.decides(state, run_id, electorate, members) or deciding.is_behind(state, run_id):
        return ""
    voting = electorate.members & {*members, *deciding.coordinator_vote(state, run_id)}
    missing = sorted(_name(state, peer) for peer in electorate.members - voting)
    more = f" and {len(missing) - _MAX_NAMED_NODES} more" if len(missing) > _MAX_NAMED_NODES else ""
    number = state.runs[run_id].head_round + 1
    first = "`atollctl node vouch` for a node that is there, then " if only_strangers_are_there(state, run_id) else ""
    return (
        f"{len(electorate.members)} seats decide round {number}, and {len(voting)} of them "
        f"can vote, which is no majority. Missing: {', '.join(missing[:_MAX_NAMED_NODES])}{more}. The present plan "
        f"stays until enough of them are back; if they are lost for good: {first}`atollctl run recover`"
    )


def _name(state: State, peer: str) -> str:
    node = state.nodes.get(peer)
    if node is not None:
        return node.name
    return "the coordinator's own vote" if peer == COORDINATOR else peer
