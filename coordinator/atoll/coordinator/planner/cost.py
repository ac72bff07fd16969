"""Evaluates a layout: the only evaluator, used by every solver, the explanation and the benchmarks. Pure.

A route trains in flushes of M micro-batches of m tokens. The first micro-batch takes `through` seconds: the sum over
stages and hops, forward and backward. The others follow one `period` apart. The period is the longest of three: the
slowest stage, the slowest link, and the lower bound from micro-batches in flight (`in_flight_limit`):

    flush = through + (M − 1) · period

A flush is never shorter than the minimum step that an owner of the route's machines set.

Routes do not wait for each other, so the swarm's rate is the sum over routes, each less the cost of failures. Every
`round_tokens` tokens the holders of each layer average it while training continues. The exchange shares the links with
activations. It costs nothing while it is shorter than the training of those tokens; otherwise the round is late for
all routes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.exchange_time import (
    finish_seconds_per_byte,
    largest_shares,
    link_seconds_per_byte,
    reducer_mask,
)
from atoll.coordinator.planner.problem import Goal, IntArray, Layout, Route, Training


@dataclass(frozen=True)
class InFlightLimit:
    """The two stages with the largest lower bound of the period, or none: 0 seconds."""

    period_seconds: float = 0.0
    first: int = 0
    last: int = 0
    in_flight: int = 0  # largest number of micro-batches between them

    @property
    def round_trip_seconds(self) -> float:
        """Time from the first stage to the last and back, compute included."""
        return self.period_seconds * self.in_flight


NO_IN_FLIGHT_LIMIT = InFlightLimit()


@dataclass(frozen=True)
class RouteCost:
    """Costs of one route. `score_rate` is its rate with a penalty for round trips above the cap."""

    period_seconds: float  # of its slowest stage or link
    in_flight_limit: InFlightLimit  # the limit that makes the period longer
    flush_seconds: float
    tokens_per_second: float  # expected, with failures
    score_rate: float
    price_per_second: float


@dataclass(frozen=True)
class RoundCost:
    """Costs of a layout's outer round."""

    interval_seconds: float  # in which the swarm trains `round_tokens`
    seconds: float  # between two rounds: the interval, or longer if a link needs more time
    busiest: int | None  # the machine whose link finishes last; None: no exchange
    busy_seconds: dict[int, float]  # by machine: time of its link for the exchange and activations of one round


@dataclass(frozen=True)
class Evaluation:
    """Costs of a layout. Solvers maximise `score`: tokens per second, or tokens per money, less discounts."""

    layout: Layout
    routes: tuple[RouteCost, ...]
    round: RoundCost
    tokens_per_second: float
    price_per_second: float
    score: float

    @property
    def price_per_token(self) -> float:
        """Money per token; infinite if nothing is trained."""
        return self.price_per_second / self.tokens_per_second if self.tokens_per_second else math.inf


def flush_seconds(tables: CostTables, through: float, period: float, machines: Collection[int]) -> float:
    """Seconds of one inner step of a route over these machines; infinite if the route is infeasible."""
    if not math.isfinite(through):
        return math.inf  # not NaN, which 0 · inf would give if M is 1
    return max(tables.least_step_seconds(machines), through + (tables.problem.training.micro_batches - 1) * period)


def period_lower_bound(tables: CostTables, through: float, period: float, stages: int) -> float:
    """Lower bound of the period before the split is known: the in-flight limit between first and last stage."""
    training = tables.problem.training
    credits = training.in_flight(stages)
    return max(period, through / credits) if credits < training.micro_batches else period


def route_rate(tables: CostTables, flush: float, machines: Sequence[int]) -> float:
    """Expected tokens per second of a route.

    A failure costs the recovery time and half a flush. The planner replaces a machine that stays away, so a route
    loses only the average share of time that its machines are absent.
    """
    if not math.isfinite(flush):
        return 0.0
    training, members = tables.problem.training, list(machines)
    present = float(tables.availability[members].sum()) / len(members)
    lost = float(tables.failures_per_second[members].sum()) * (tables.problem.wishes.recovery_seconds + flush / 2)
    return training.micro_batches * training.micro_batch_tokens / flush * present / (1 + lost)


def route_cost(tables: CostTables, route: Route) -> RouteCost:
    """Evaluate one route by itself. An infeasible route has rate 0."""
    period = 0.0
    totals: list[float] = []
    hops: list[float] = []
    penalties: list[float] = []
    before: int | None = None
    cut_bytes = tables.spans.cut_bytes_per_token
    for stage in route:
        table, a, b = tables.stage(stage.machine), stage.first, stage.last + 1
        totals.append(float(table.total[a, b]))
        period = max(period, float(table.period[a, b]))
        if before is not None:
            pair = before, stage.machine
            hops.append(float(cut_bytes[a] * tables.hops.total_per_byte[pair] + tables.hops.latency[pair]))
            penalties.append(float(tables.hops.penalty[pair]))
            period = max(period, float(cut_bytes[a] * tables.hops.period_per_byte[pair]))
        before = stage.machine
    machines = [stage.machine for stage in route]
    through, penalty = math.fsum((*totals, *hops)), math.fsum(penalties)
    binds = in_flight_limit(tables.problem.training, totals, hops, period)
    flush = flush_seconds(tables, through, max(period, binds.period_seconds), machines)
    score_flush = flush
    if penalty:
        far = [hop + more for hop, more in zip(hops, penalties, strict=True)]
        longer = in_flight_limit(tables.problem.training, totals, far, period).period_seconds
        score_flush = flush_seconds(tables, through + penalty, max(period, longer), machines)
    return RouteCost(
        period_seconds=period,
        in_flight_limit=binds,
        flush_seconds=flush,
        tokens_per_second=route_rate(tables, flush, machines),
        score_rate=route_rate(tables, score_flush, machines),
        price_per_second=float(tables.price_per_second[machines].sum()),
    )


def in_flight_limit(training: Training, stages: Sequence[float], hops: Sequence[float], period: float) -> InFlightLimit:
    """Find the in-flight limit that makes the period longer than `period`, if any.

    `stages` are the seconds that a micro-batch spends in each stage; `hops`, the seconds between stages, both ways.

    A stage with c credits starts micro-batch k + c only after micro-batch k came back (1F1B; Narayanan et al.,
    *Memory-efficient pipeline-parallel DNN training*, ICML 2021, §2.2). Each stage has 1 + `ahead` more credits than
    the next stage. So between stage s and a later stage e at most (e − s) · (1 + ahead) + 1 micro-batches are in
    flight, each for the time from s to e and back. The largest quotient, time over micro-batches, is a lower bound of
    the period (the greatest cycle ratio of the schedule's event graph; Baccelli et al., *Synchronization and
    linearity*, 1992, §2.5). A stage that may start all micro-batches of the flush at once waits for none of them.
    """
    step = 1 + training.ahead
    if (sum(stages) + sum(hops)) / (step + 1) <= period:
        return NO_IN_FLIGHT_LIMIT
    found, worst = NO_IN_FLIGHT_LIMIT, period
    for first in range(len(stages) - 1):
        if (len(stages) - 1 - first) * step + 1 >= training.micro_batches:
            continue
        round_trip = stages[first]
        for last in range(first + 1, len(stages)):
            round_trip += hops[last - 1] + stages[last]
            count = (last - first) * step + 1
            if round_trip > worst * count:
                worst = round_trip / count
                found = InFlightLimit(worst, first, last, count)
    return found


def evaluate(tables: CostTables, layout: Layout) -> Evaluation:
    """Evaluate a whole layout. Routes must be valid (`checks.check_layout`); an infeasible route trains nothing."""
    routes = tuple(route_cost(tables, route) for route in layout.routes)
    rate = math.fsum(cost.tokens_per_second for cost in routes)
    outer = round_cost(tables, layout, [cost.tokens_per_second for cost in routes])
    kept = outer.interval_seconds / outer.seconds if rate else 0.0
    price = math.fsum(cost.price_per_second for cost in routes)
    score_rate = math.fsum(cost.score_rate for cost in routes) * kept
    return Evaluation(
        layout, routes, outer, rate * kept, price, score(tables, score_rate, price, len(routes), layout.machines)
    )


def score(tables: CostTables, rate: float, price_per_second: float, routes: int, machines: Sequence[int]) -> float:
    """Compute the score that solvers maximise, from sums over routes."""
    wishes = tables.problem.wishes
    placed = {tables.problem.machines[machine].name for machine in machines} if tables.pins else set()
    unused = sum(span is not None and name not in placed for name, span in tables.pins.items())
    kept = (1 - wishes.sole_holder_discount if routes < 2 else 1.0) * wishes.unused_pin_discount**unused
    value = rate * kept
    return value / price_per_second if wishes.goal is Goal.PRICE and rate else value


def round_cost(tables: CostTables, layout: Layout, rates: Sequence[float]) -> RoundCost:
    """Compute the outer round of a layout whose routes train `rates` tokens per second."""
    total, training = math.fsum(rates), tables.problem.training
    if not total:
        return RoundCost(math.inf, math.inf, None, {})
    interval = training.round_tokens / total
    outer = exchange_seconds(tables, layout)
    busy = {}
    for route, rate in zip(layout.routes, rates, strict=True):
        for stage in route:
            of_activations = (
                training.round_tokens * rate / total * link_seconds(tables, stage.machine, stage.first, stage.last + 1)
            )
            busy[stage.machine] = outer.get(stage.machine, 0.0) + of_activations
    busiest = max(busy, key=lambda machine: busy[machine]) if outer else None
    return RoundCost(interval, max(interval, busy[busiest]) if busiest is not None else interval, busiest, busy)


def exchange_seconds(tables: CostTables, layout: Layout) -> dict[int, float]:
    """Seconds that one exchange keeps each machine's link busy; empty if nothing is averaged."""
    if len(layout.routes) < 2:
        return {}
    holders = layer_holders(tables, layout)
    rates, dialable = tables.link_bytes_per_second[holders], reducer_mask(tables.dialable[holders])
    level = finish_seconds_per_byte(rates, dialable)[:, None]
    per_byte = link_seconds_per_byte(level, rates, dialable, largest_shares(dialable), len(layout.routes))
    ends = np.concatenate(
        [np.zeros((1, len(layout.routes))), np.cumsum(per_byte * tables.layer_bytes[:, None], axis=0)]
    )
    waiting = round_latency(tables, layout.machines)
    return {
        stage.machine: float(ends[stage.last + 1, column] - ends[stage.first, column]) + waiting
        for column, route in enumerate(layout.routes)
        for stage in route
    }


def layer_holders(tables: CostTables, layout: Layout) -> IntArray:
    """The machine that holds each layer in each route, [L, R]."""
    holders = np.empty((tables.layers, len(layout.routes)), dtype=np.int64)
    for column, route in enumerate(layout.routes):
        for stage in route:
            holders[stage.first : stage.last + 1, column] = stage.machine
    return holders


def round_latency(tables: CostTables, machines: Sequence[int]) -> float:
    """Seconds of an outer round that are spent waiting for replies, not on transfers."""
    rtt = tables.problem.links.rtt_seconds[np.ix_(machines, machines)].max()
    return tables.problem.training.protocol_round_trips * float(rtt)


def link_seconds(tables: CostTables, machine: int, a: int, b: int) -> float:
    """Seconds per token of the route that activations and gradients keep the machine's link busy."""
    spans = tables.spans
    return float(
        max(
            spans.sent_bytes_per_token[a, b] / tables.uplink[machine],
            spans.received_bytes_per_token[a, b] / tables.downlink[machine],
        )
    )
