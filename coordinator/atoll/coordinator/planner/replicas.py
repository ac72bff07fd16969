"""The plan of plain data parallelism: every node holds all layers and is a route of length one. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from atoll.coordinator.planner.plan_builder import RoutePart, build_plan
from atoll.coordinator.planner.reduce_shares import reduce_rate
from atoll.core.plan import Base, Plan
from atoll.core.run_spec import RunSpec


def build_replica_plan(
    spec: RunSpec,
    *,
    version: int,
    members: Sequence[str],
    shares: Mapping[str, float],
    previous: Plan | None,
    head_round: int,
    layers: int,
    base: Base,
    issued_unix_ms: int,
    reason: str,
) -> Plan:
    """Build the plan of plain data parallelism: each of `members` (peer ids, at least one) is a route of length one.

    `layers` is the number of the model's layers; `shares` are reduce shares; other arguments as in `build_plan`.
    """
    ordered = sorted(members)
    return build_plan(
        spec,
        version=version,
        routes=[(RoutePart(peer, 0, layers - 1),) for peer in ordered],
        standbys={},
        reduce_rates={peer: reduce_rate(shares[peer], len(ordered)) for peer in ordered},
        previous=previous,
        head_round=head_round,
        base=base,
        issued_unix_ms=issued_unix_ms,
        reason=reason,
    )
