"""Which stages have no part in training any more, though nobody counts them as lost yet. Pure."""

from __future__ import annotations

from atoll.coordinator.live.attendance import Attendance
from atoll.coordinator.state.snapshot import State
from atoll.core.plan import Plan
from atoll.v1 import membership_pb2 as mb

_MIN_OUTAGE_SECONDS = 1.0  # of a broken line to the coordinator that say nothing


def can_be_replaced(state: State, plan: Plan, peer: str, attendance: Attendance, now: float) -> bool:
    """Whether a stage is gone, or its process was started again: what it had not averaged yet is lost anyway."""
    return _was_restarted(state, peer, attendance) or is_gone(state, plan, peer, attendance, now)


def is_gone(state: State, plan: Plan, peer: str, attendance: Attendance, now: float, *, ignoring: str = "") -> bool:
    """Whether a stage may have no part any more, or its line broke and a neighbour on its route cannot reach it.

    The word of `ignoring`, a peer id, does not count.
    """
    if peer not in attendance.present_peers:
        return True
    live = state.live.get(peer)
    if peer not in attendance.awaited or live is None or live.connected or not live.profile.device:
        return False  # the last: it was not heard of since the coordinator began
    route = next(route for route in plan.routes if peer in route)
    others = [state.live[other] for other in route if other not in (peer, ignoring) and other in state.live]
    missed = any(other.connected and other.seen > live.seen and other.status.missing_stage == peer for other in others)
    return missed and now - live.seen >= _MIN_OUTAGE_SECONDS


def _was_restarted(state: State, peer: str, attendance: Attendance) -> bool:
    live = state.live.get(peer)
    if peer not in attendance.awaited or live is None or not (live.connected or not live.profile.device):
        return False
    return live.status.state == mb.NODE_STATE_JOINING
