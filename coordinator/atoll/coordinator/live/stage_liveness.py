"""Which stages have no part in training any more, though nobody counts them as lost yet. Pure."""

from __future__ import annotations

from atoll.coordinator.live.attendance import Present
from atoll.coordinator.state.snapshot import State
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

_BLINK_SECONDS = 1.0  # of a broken line to the coordinator that say nothing


def has_no_part(state: State, plan: Plan, peer: str, here: Present, now: float) -> bool:
    """Whether a stage is gone, or its process was started again: what it had not averaged yet is lost anyway."""
    return _was_started_again(state, peer, here) or is_gone(state, plan, peer, here, now)


def is_gone(state: State, plan: Plan, peer: str, here: Present, now: float, *, but: str = "") -> bool:
    """Whether a stage may have no part any more, or its line broke and a neighbour on its route cannot reach it.

    The word of `but`, a peer id, does not count.
    """
    if peer not in here.there:
        return True
    live = state.live.get(peer)
    if peer not in here.silent or live is None or live.connected or not live.profile.device:
        return False  # the last: it was not heard of since the coordinator began
    route = next(route for route in plan.routes if peer in route)
    others = [state.live[other] for other in route if other not in (peer, but) and other in state.live]
    missed = any(other.connected and other.seen > live.seen and other.status.missing_stage == peer for other in others)
    return missed and now - live.seen >= _BLINK_SECONDS


def _was_started_again(state: State, peer: str, here: Present) -> bool:
    live = state.live.get(peer)
    if peer not in here.silent or live is None or not (live.connected or not live.profile.device):
        return False
    return live.status.state == mb.NODE_STATE_JOINING
