"""No plan is issued under which nobody can decide the next round. Pure.

`plan_issue.py` asks `keep_voters` about every plan. Where the members of a plan are no quorum of those that decide the
next round, it keeps the other voters that are connected: they become standbys, which vote and train nothing. They stay
until a round commits without them in its electorate. Where they are too few, there is no plan; members keep the one
that they have, and one event says which nodes are missing and what the operator can do.
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
_REASON_SECONDS = 5.0  # a plan that is wanted and cannot decide is tried again several times a second


def keep_voters(
    draft: Draft, run_id: str, spans: Mapping[str, range], base: Base | None = None
) -> dict[str, range] | None:
    """Layers, by peer id, of the voters that a plan of the members `spans` must keep; mostly none.

    None: the plan could not decide the next round, so it must not be issued; an event said so. `base`: the plan's own,
    if it sets one; such a plan is the operator's recovery, and is never refused.
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
    """Layers by peer id of connected voters outside `spans`; none where the members of `spans` are a quorum."""
    electorate = _electorate(state, run_id, base)
    if electorate is None or deciding.decides(state, run_id, electorate, spans):
        return {}
    others = sorted(peer for peer in electorate.members if peer not in spans and deciding.can_vote(state, run_id, peer))
    planned = sorted(set(spans.values()), key=lambda span: (len(span), span.start))
    found = ((peer, _span(state, run_id, peer, planned)) for peer in others)
    return {peer: span for peer, span in found if span}


def can_present_plan_decide(state: State, run_id: str, present_peers: Iterable[str]) -> bool:
    """True where the members that are left of the present plan can decide the next round, as far as is known here.

    `present_peers` count, and so do members that rest.
    """
    plan, electorate = state.memory[run_id].plan, deciding.next_electorate(state, run_id)
    if plan is None or electorate is None or deciding.is_behind(state, run_id):
        return True
    left = set(present_peers) | {peer for peer in electorate.members if deciding.can_vote(state, run_id, peer)}
    return deciding.decides(state, run_id, electorate, left & set(plan.members))


def forget_old_reason(draft: Draft, run_id: str) -> None:
    """Forget why there was no new plan, once none is wanted any more: the missing voters are back."""
    memory = draft.state.memory[run_id]
    if memory.undecidable_reason and draft.now.monotonic - memory.undecidable_at > _REASON_SECONDS:
        draft.remember(run_id, undecidable_reason="")


def _electorate(state: State, run_id: str, base: Base | None) -> Electorate | None:
    """The members that decide the round after the plan's base, or after the newest round; None for the first plan."""
    if base is not None:
        return Electorate(frozenset(base.seats))
    return deciding.next_electorate(state, run_id) if state.memory[run_id].plan is not None else None


def _span(state: State, run_id: str, peer: str, planned: Sequence[range]) -> range:
    """Layers that a voter may keep: those that it has under the present plan, else some of `planned`; empty: none.

    A node that rests loads no other layers than it has.
    """
    plan = state.memory[run_id].plan
    held = plan.span(peer) if plan is not None else range(0)
    loads = live_of(state, peer).status.state in ELIGIBLE_STATES or len(planned) == 1
    choices = [*([held] if held else []), *(planned if loads else [])]
    return next((span for span in choices if span_fits(state, run_id, peer, span)), range(0))


def _why_undecidable(state: State, run_id: str, members: set[str]) -> str:
    """What a plan of these members lacks, for people; empty where it can decide, or where nobody here can tell."""
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
