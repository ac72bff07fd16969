"""Which members a plan puts on probation, and whether a change of these requires a new plan. Pure.

A node is on probation if its token says so, if audits doubt its training, or if the operator orders it. It has little
weight in rounds (`core/probation.py`) until the operator vouches for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from atoll.coordinator.planner.plan_builder import Route, routes_of
from atoll.coordinator.state.known_nodes import is_on_probation, known_nodes
from atoll.coordinator.state.snapshot import State
from atoll.core.plan import Plan


def planned_probation(state: State, routes: Sequence[Route], standbys: Iterable[str]) -> frozenset[str]:
    """The members that a plan with these routes puts on probation.

    One stage on probation puts its whole route on probation, since it can corrupt what the others compute. If that
    would affect all routes although some contain known nodes, no member is on probation, because otherwise no round
    could commit. If only nodes on probation are present, the run waits for its known nodes, unless it has none.
    """
    found = {
        part.peer_id for route in routes if any(is_on_probation(state, it.peer_id) for it in route) for part in route
    }
    there = [part.peer_id for route in routes for part in route]
    if len(found) == len(there) and (known_nodes(state, there) or not there):
        return frozenset()
    return frozenset(found.union(peer for peer in standbys if is_on_probation(state, peer)))


def probation_changed(state: State, plan: Plan) -> bool:
    """Whether a plan with the same routes would now put other members on probation."""
    return planned_probation(state, routes_of(plan), plan.standbys) != plan.on_probation


def probation_text(state: State, plan: Plan) -> str:
    """The change of probation as text."""
    now = planned_probation(state, routes_of(plan), plan.standbys)
    changes = [(now - plan.on_probation, "on probation"), (plan.on_probation - now, "on probation no more")]
    return "; ".join(
        f"{', '.join(sorted(state.nodes[peer].name for peer in peers))} {words}" for peers, words in changes if peers
    )
