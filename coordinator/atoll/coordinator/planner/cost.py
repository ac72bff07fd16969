"""What a layout is worth: the one evaluator that every solver, the explanation and the benchmarks ask. Pure.

A route trains in flushes of M micro-batches of m tokens. The first one takes `through` seconds, the sum over its stages
and hops there and back; the others follow one `period` apart, the slowest of its stages, links and of the way between
two stages, there and back, over the micro-batches that may be between them (`in_flight_limit.py`):

    flush = through + (M − 1) · period

and no less than the owner of any of its machines lets an inner step take.

Routes do not wait for each other, so the swarm's rate is the sum of theirs, each less what failures cost. Every
`round_tokens` each layer is averaged among its holders while training goes on; that costs nothing unless the transfer,
beside the activations on the same links, takes longer than the tokens do, and then the round is late for all.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.coordinator.planner.cost_tables import CostTables
from atoll.coordinator.planner.exchange_time import busy_seconds, finish_seconds_per_byte, largest_shares, reducer_mask
from atoll.coordinator.planner.in_flight_limit import InFlightLimit, in_flight_limit
from atoll.coordinator.planner.problem import Goal, IntArray, Layout, Route


@dataclass(frozen=True)
class RouteCost:
    """One route's figures. `score_rate` is the rate with what is above the cap of round trips counted more."""

    through_seconds: float
    period_seconds: float  # of its slowest stage or link
    in_flight_limit: InFlightLimit  # that makes it longer
    flush_seconds: float
    tokens_per_second: float  # less what failures cost
    score_rate: float
    price_per_second: float


@dataclass(frozen=True)
class RoundCost:
    """The outer round that a layout leads to."""

    interval_seconds: float  # in which the swarm trains `round_tokens`
    seconds: float  # between two rounds: the interval, or longer where a link is not done by then
    busiest: int | None  # the machine whose link is done last; None: nothing is exchanged
    busy_seconds: dict[int, float]  # by machine: its link, for exchange and activations of one round


@dataclass(frozen=True)
class Evaluation:
    """A layout's worth. `score` is what solvers make large: tokens per second, or tokens per money, less discounts."""

    layout: Layout
    routes: tuple[RouteCost, ...]
    round: RoundCost
    tokens_per_second: float
    price_per_second: float
    score: float

    @property
    def price_per_token(self) -> float:
        """Infinite where nothing is trained."""
        return self.price_per_second / self.tokens_per_second if self.tokens_per_second else math.inf


def flush_seconds(tables: CostTables, through: float, period: float, machines: Collection[int]) -> float:
    """Seconds of one inner step of a route over these; infinite where it cannot be."""
    if not math.isfinite(through):
        return math.inf  # and not NaN, which 0 · inf would be where M is 1
    return max(tables.least_step_seconds(machines), through + (tables.problem.training.micro_batches - 1) * period)


def period_lower_bound(tables: CostTables, through: float, period: float, stages: int) -> float:
    """What is known of a period with its window before the route is: from its first stage to its last and back."""
    training = tables.problem.training
    credits = training.in_flight(stages)
    return max(period, through / credits) if credits < training.micro_batches else period


def route_rate(tables: CostTables, flush: float, machines: Sequence[int]) -> float:
    """Expected tokens per second. A failure costs its recovery and half a flush; who is away longer is planned around,

    so that a route loses the share of time that its machines, on average, are not there.
    """
    if not math.isfinite(flush):
        return 0.0
    training, members = tables.problem.training, list(machines)
    present = float(tables.availability[members].sum()) / len(members)
    lost = float(tables.failures_per_second[members].sum()) * (tables.problem.wishes.recovery_seconds + flush / 2)
    return training.micro_batches * training.micro_batch_tokens / flush * present / (1 + lost)


def route_cost(tables: CostTables, route: Route) -> RouteCost:
    """One route, whatever the others do. A route that cannot be has no rate."""
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
            hops.append(float(cut_bytes[a] * tables.hop_total_per_byte[pair] + tables.hop_latency[pair]))
            penalties.append(float(tables.hop_penalty[pair]))
            period = max(period, float(cut_bytes[a] * tables.hop_period_per_byte[pair]))
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
        through_seconds=through,
        period_seconds=period,
        in_flight_limit=binds,
        flush_seconds=flush,
        tokens_per_second=route_rate(tables, flush, machines),
        score_rate=route_rate(tables, score_flush, machines),
        price_per_second=float(tables.price_per_second[machines].sum()),
    )


def evaluate(tables: CostTables, layout: Layout) -> Evaluation:
    """The whole objective. Routes must be well-formed (`checks.check_layout`); one that does not fit trains nothing."""
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
    """What solvers make large, from sums over routes."""
    wishes = tables.problem.wishes
    placed = {tables.problem.machines[machine].name for machine in machines} if tables.pins else set()
    unused = sum(span is not None and name not in placed for name, span in tables.pins.items())
    kept = (1 - wishes.sole_holder_discount if routes < 2 else 1.0) * wishes.unused_pin_discount**unused
    value = rate * kept
    return value / price_per_second if wishes.goal is Goal.PRICE and rate else value


def round_cost(tables: CostTables, layout: Layout, rates: Sequence[float]) -> RoundCost:
    """The outer round under a layout whose routes train `rates` tokens per second."""
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
    """How long each machine's own link is busy with one exchange; empty where nothing is averaged."""
    if len(layout.routes) < 2:
        return {}
    holders = layer_holders(tables, layout)
    rates, dialable = tables.link_bytes_per_second[holders], reducer_mask(tables.dialable[holders])
    level = finish_seconds_per_byte(rates, dialable)[:, None]
    per_byte = busy_seconds(level, rates, dialable, largest_shares(dialable), len(layout.routes))
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
    """Who holds each layer in each route, [L, R]."""
    holders = np.empty((tables.layers, len(layout.routes)), dtype=np.int64)
    for column, route in enumerate(layout.routes):
        for stage in route:
            holders[stage.first : stage.last + 1, column] = stage.machine
    return holders


def round_latency(tables: CostTables, machines: Sequence[int]) -> float:
    """Seconds of an outer round that are waiting for answers."""
    rtt = tables.problem.links.rtt_seconds[np.ix_(machines, machines)].max()
    return tables.problem.training.protocol_round_trips * float(rtt)


def link_seconds(tables: CostTables, machine: int, a: int, b: int) -> float:
    """Seconds per token of its route that activations and gradients keep its link busy."""
    spans = tables.spans
    return float(
        max(
            spans.sent_bytes_per_token[a, b] / tables.uplink[machine],
            spans.received_bytes_per_token[a, b] / tables.downlink[machine],
        )
    )
