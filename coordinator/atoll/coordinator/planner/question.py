"""A question that a running swarm asks the planner, and the answer. Plain data: cheap to import.

The state machine writes questions down and takes answers; whoever stands between them (`live.py`) may take seconds.
Machines go by their nodes' names, which are unique in a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.coordinator.planner.plan_builder import Route
from atoll.core.run_spec import RunSpec
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

NamedRoute = tuple[tuple[str, int, int], ...]  # machine, first and last layer


@dataclass(frozen=True)
class Path:
    """From one member to another, as the first measured it."""

    rtt_seconds: float
    bytes_per_second: float  # of the path, where it was slower than the sender's uplink; 0: it was not
    at: float  # monotonic


@dataclass(frozen=True)
class PlannerNode:
    """One node, as the coordinator knows it."""

    peer_id: str
    name: str
    profile: mb.NodeProfile
    status: mb.NodeStatus
    multiaddrs: tuple[str, ...]
    paths: Mapping[str, Path]
    alone: bool = True  # trains without others; the pace of a stage is its route's and says little of it
    availability: float = 1.0  # share of the time that it is there
    failures_per_hour: float = 0.0
    last_correction: float = 0.0  # how many times what it told its layers took when that was measured last; 0: never


@dataclass(frozen=True)
class Preferences:
    """What the operator wants of plans: the part of `problem.Wishes` that is not about single nodes."""

    goal: str = "time"  # or "price": a `problem.Goal`
    hysteresis: float = 0.05  # a plan that disturbs others must be better by this share
    horizon_seconds: float = 6 * 3600.0  # over which it must pay for its moves
    rtt_cap_seconds: float = 0.08  # inside a route; what is above counts more


@dataclass(frozen=True)
class Question:
    """Which plan should a run have now?"""

    number: int  # of its run; grows
    nodes: tuple[PlannerNode, ...]  # that may have a part
    layers: plan_pb2.LayerTable
    spec: RunSpec
    pins: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by name: first and last layer
    kept: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by name: who may have these layers or none
    current: tuple[NamedRoute, ...] = ()  # that they follow, with who is gone by now
    routes: tuple[Route, ...] = ()  # the same by peer ids
    standbys: NamedRoute = ()  # who holds which layers without a place on a route, in no order
    given_routes: tuple[NamedRoute, ...] = ()  # not searched for but given: only its worth is asked
    preferences: Preferences = Preferences()
    seconds: float = 2.0  # to search
    steps: int | None = None  # of the search, at most; where a result must repeat

    def names(self) -> dict[str, str]:
        """What nodes were called when it was asked, by peer id: the answer's names."""
        return {node.peer_id: node.name for node in self.nodes}

    def peers(self) -> dict[str, str]:
        """The other way round; nodes may be called otherwise by then."""
        return {node.name: node.peer_id for node in self.nodes}


@dataclass(frozen=True)
class Answer:
    """The plan to have. No routes: none is possible, and `missing` says why."""

    routes: tuple[NamedRoute, ...] = ()
    reason: str = ""
    missing: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)  # by name: who has no part, and why
    fetched_bytes: Mapping[str, float] = field(default_factory=dict)  # by name, of anchor and momentum
    before_tokens_per_second: float = 0.0  # predicted of what can go on as it is
    tokens_per_second: float = 0.0  # predicted
    corrections: Mapping[str, float] = field(
        default_factory=dict
    )  # by name, of those at work: see `PlannerNode.last_correction`
    doubts: Mapping[str, str] = field(default_factory=dict)  # by name: how its word differs from what others see


def shares_memory(profile: mb.NodeProfile) -> bool:
    """Whether a device's memory is the host's."""
    return profile.device == "cpu"


def memory_figures(profile: mb.NodeProfile) -> tuple[int, int, bool, int]:
    """What a node says of its memory: it decides which spans fit."""
    return (
        profile.device_memory_bytes,
        profile.host_memory_bytes,
        shares_memory(profile),
        profile.whole_model_bytes,
    )


def status_for_span(status: mb.NodeStatus, first: int, last: int) -> mb.NodeStatus:
    """Without the time of other layers than the plan gives it: nobody asked it to compute those."""
    told = status.computed.layers
    if not status.HasField("computed") or (told.first, told.last) == (first, last):
        return status
    kept = mb.NodeStatus()
    kept.CopyFrom(status)
    kept.ClearField("computed")
    return kept


def has_planner_inputs(profile: mb.NodeProfile) -> bool:
    """Whether a node told what a planner needs: its memory, and how fast it computes."""
    computes = profile.layer_times or profile.tokens_per_second
    return bool(profile.device_memory_bytes and profile.host_memory_bytes and computes)
