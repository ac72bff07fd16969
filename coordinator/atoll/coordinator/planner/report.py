"""Presents an explanation for the command line, as sentences and as plain data. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from atoll.coordinator.planner.cost import Evaluation
from atoll.coordinator.planner.explain import CurvePoint, Explanation
from atoll.coordinator.planner.solve import Solution
from atoll.core.units import count_text

_MOST_HELP = 5  # lines
_NOTICEABLE = 0.005  # relative


def document(found: Solution, why: Explanation) -> dict[str, object]:
    """Return everything as plain values, for JSON."""
    value = found.evaluation
    return {
        "tokens_per_second": value.tokens_per_second,
        "price_per_hour": value.price_per_second * 3600,
        "price_per_billion_tokens": value.price_per_token * 1e9,
        "proven_gap": found.gap if found.gap < float("inf") else None,
        "round": {
            "interval_seconds": value.round.interval_seconds,
            "seconds": value.round.seconds,
            "busiest": None if value.round.busiest is None else found.problem.machines[value.round.busiest].name,
        },
        "routes": [
            {
                "tokens_per_second": cost.tokens_per_second,
                "flush_seconds": cost.flush_seconds,
                "machines": [found.problem.machines[stage.machine].name for stage in route],
            }
            for route, cost in zip(value.layout.routes, value.routes, strict=True)
        ],
        **{
            key: asdict(why)[key]
            for key in ("places", "left_out", "bottleneck", "assumed", "help", "curve", "sweet_spot")
        },
    }


def sentences(found: Solution, why: Explanation) -> Iterator[str]:
    """Yield the lines that follow the table of places."""
    value = found.evaluation
    routes = _count(len(value.routes), "route")
    yield f"predicted: {count_text(value.tokens_per_second)} tokens/s in {routes}{_price(value)}"
    yield f"optimality: {_proof(found)}"
    yield f"round interval: {value.round.seconds:.0f} s"
    yield from facts(why)


def facts(why: Explanation) -> Iterator[str]:
    """Yield the bottleneck, the machines left out, and the improvements."""
    yield f"bottleneck: {why.bottleneck}"
    yield from (f"assumed: {sentence}" for sentence in why.assumed)
    for item in why.left_out:
        yield f"left out: {item.machine} (region {item.region + 1}): {item.reason}"
    helpful = sorted(why.help, key=lambda it: -it.times)
    for help_ in helpful[:_MOST_HELP]:
        gain = help_.times - 1
        yield f"with {help_.what}: " + (f"{100 * gain:+.1f} % tokens/s" if gain > _NOTICEABLE else "no noticeable gain")
    for point in why.curve:
        yield f"with {_count(point.machines, 'machine')}: {_point(point, point.machines == why.sweet_spot)}"


def _proof(found: Solution) -> str:
    if not found.gap:
        return "proven optimal"
    if found.gap == float("inf"):
        return f"best layout of a search of {found.seconds:.1f} s; no bound is proven"
    return f"at most {100 * found.gap:.1f} % below the optimum"


def _price(value: Evaluation) -> str:
    if not value.price_per_second:
        return ""
    return f", {value.price_per_second * 3600:.2f} per hour, {value.price_per_token * 1e9:.0f} per billion tokens"


def _point(point: CurvePoint, sweet: bool) -> str:
    price = f", {point.price_per_billion_tokens:.0f} per billion tokens" if point.price_per_hour else ""
    return f"{count_text(point.tokens_per_second)} tokens/s{price}" + (" (least time × price)" if sweet else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")
