"""Builds the plan that members follow from routes: assignments, first samples, and limits on claims. Pure.

Only drivers (the nodes that hold the first layer) get samples. Until a round has committed, plans assign them: a driver
that stays keeps its samples, and a new driver gets the next ones. After that, manifests record the samples of each
driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from atoll.core.data_position import SampleRange, first_lease_samples
from atoll.core.plan import Assignment, Base, Plan, RouteName, stored_route_names
from atoll.core.run_spec import RunSpec


@dataclass(frozen=True)
class RoutePart:
    """One node's span in a route."""

    peer_id: str
    first: int
    last: int  # inclusive

    @property
    def span(self) -> range:
        """Its layers."""
        return range(self.first, self.last + 1)


Route = tuple[RoutePart, ...]


def build_plan(
    spec: RunSpec,
    *,
    version: int,
    routes: Sequence[Route],
    standbys: Mapping[str, range],
    reduce_rates: Mapping[str, int],
    previous: Plan | None,
    head_round: int,
    base: Base,
    issued_unix_ms: int,
    reason: str,
    on_probation: Set[str] = frozenset(),
) -> Plan:
    """Build the plan `version` with these routes (at least one), ordered by driver, and with the standbys' layers.

    A standby may claim no tokens and reduces nothing, so it can neither change nor delay a sum. A route that is also in
    `previous` keeps its name, unless the base changed. `head_round` is the newest committed round, 0 for none;
    `reduce_rates` are bytes per second by peer id.
    """
    ordered = sorted(routes, key=lambda route: route[0].peer_id)
    drivers = [route[0].peer_id for route in ordered]
    round_samples = -(-spec.sync.round_tokens // spec.data.sequence_length)
    lease = first_lease_samples(round_samples, len(drivers), len(cuts_of(ordered)) + 1)
    holdings = {} if head_round else _first_data_ranges(drivers, previous, lease)
    most_tokens = most_round_tokens(spec, len(ordered), cuts=len(cuts_of(ordered)))
    standing = [RoutePart(peer, span.start, span.stop - 1) for peer, span in standbys.items()]
    known = _names(previous) if previous is not None and previous.base == base else {}
    names, begun = _new_names(ordered, known, version, _routes_begun(previous))
    parts = sorted([*standing, *(part for route in ordered for part in route)], key=lambda part: part.peer_id)
    return Plan(
        run_id=spec.run.name,
        version=version,
        assignments=tuple(
            Assignment(
                peer_id=part.peer_id,
                first_layer=part.first,
                last_layer=part.last,
                data_ranges=holdings.get(part.peer_id, ()) if part.peer_id in drivers else (),
                max_round_tokens=0 if part.peer_id in standbys else most_tokens,
                max_reduce_bytes_per_second=reduce_rates.get(part.peer_id, 0),
                on_probation=part.peer_id in on_probation,
            )
            for part in parts
        ),
        routes=tuple(tuple(part.peer_id for part in route) for route in ordered),
        names=stored_route_names(version, names),
        routes_begun=begun,
        base=base,
        issued_unix_ms=issued_unix_ms,
        reason=reason,
    )


def routes_of(plan: Plan) -> tuple[Route, ...]:
    """The routes of a plan with their spans."""
    spans = {item.peer_id: RoutePart(item.peer_id, item.first_layer, item.last_layer) for item in plan.assignments}
    return tuple(tuple(spans[peer] for peer in route) for route in plan.routes)


def _names(plan: Plan) -> Mapping[Route, RouteName]:
    """Names of the plan's routes."""
    return {route: plan.name_of(number) for number, route in enumerate(routes_of(plan))}


def _new_names(
    routes: Sequence[Route], known: Mapping[Route, RouteName], version: int, begun: int
) -> tuple[tuple[RouteName, ...], int]:
    """Name routes; a new route's name is its place among all routes that ever began. Return names and their count."""
    names = []
    for route in routes:
        name = known.get(route)
        if name is None:
            name, begun = (version, begun), begun + 1
        names.append(name)
    return tuple(names), begun


def _routes_begun(previous: Plan | None) -> int:
    """Count the routes that began under `previous` or before.

    For plans of older coordinators: beyond all used numbers.
    """
    if previous is None:
        return 0
    numbers = (previous.name_of(at)[1] for at in range(len(previous.routes)))
    return max([previous.routes_begun, *(number + 1 for number in numbers)])


def cuts_of(routes: Sequence[Route]) -> tuple[int, ...]:
    """Layers at which a stage of any route starts, except layer 0, ascending."""
    return tuple(sorted({part.first for route in routes for part in route} - {0}))


def most_round_tokens(spec: RunSpec, routes: int, cuts: int = 0) -> int:
    """Largest number of tokens that one member may claim in a round: the number that makes the round due.

    If fragments take turns, as those between two cuts do, a member claims what it trained over the rounds of all
    fragments. Each round may be a little late, and none is due before every route has made a step.
    """
    sync = spec.sync
    fragments = max(sync.fragments, cuts + 1)  # no fragment lies across a cut
    if fragments == 1:
        return sync.round_tokens
    return 2 * max(sync.round_tokens, fragments * routes * spec.tokens_per_step)


def _first_data_ranges(
    drivers: Sequence[str], previous: Plan | None, samples_each: int
) -> Mapping[str, tuple[SampleRange, ...]]:
    """First samples of drivers: those of `previous`; for new drivers, the ones after its highest sample.

    Samples of drivers that left stay a gap; the first committed round assigns them again.
    """
    kept = {item.peer_id: item.data_ranges for item in previous.assignments if item.data_ranges} if previous else {}
    cursor = max((end for ranges in kept.values() for _, end in ranges), default=0)
    newcomers = [peer for peer in drivers if peer not in kept]
    first = {peer: ((cursor + i * samples_each, cursor + (i + 1) * samples_each),) for i, peer in enumerate(newcomers)}
    return {**kept, **first}
