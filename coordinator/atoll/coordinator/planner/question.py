"""Question and answer types between a running swarm and the planner. Plain data: cheap to import.

The state machine builds a `Question` (`live/planner_question.py`) and takes in the `Answer`
(`live/planner_answer.py`). `answer_question.py` computes the answer, which may take seconds. Questions and answers
identify machines by the names of their nodes, which are unique in a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from atoll.coordinator.planner.plan_builder import Route
from atoll.core.run_spec import RunSpec
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

STATE_BYTES_PER_PARAMETER = 8.0  # anchor and momentum, which a new holder fetches

NamedRoute = tuple[tuple[str, int, int], ...]  # machine, first and last layer


@dataclass(frozen=True)
class PathMeasurement:
    """One member's measurement of the path to another member."""

    rtt_seconds: float
    bytes_per_second: float  # of the path, if it was slower than the sender's uplink; 0: it was not slower
    at: float  # monotonic


@dataclass(frozen=True)
class PlannerNode:
    """The coordinator's knowledge of one node."""

    peer_id: str
    name: str
    profile: mb.NodeProfile
    status: mb.NodeStatus
    multiaddrs: tuple[str, ...]
    paths: Mapping[str, PathMeasurement]
    trains_alone: bool = True  # whether its route has no other node. Otherwise its pace is that of the whole route
    availability: float = 1.0  # share of the time that it is present
    failures_per_hour: float = 0.0
    last_correction: float = 0.0  # measured time per layer / profiled time, when last measured; 0: never measured


@dataclass(frozen=True)
class Preferences:
    """The operator's preferences for plans: the part of `problem.Wishes` that does not concern single nodes."""

    goal: str = "time"  # or "price": a `problem.Goal`
    hysteresis: float = 0.05  # share by which a plan that disturbs placed nodes must be better
    horizon_seconds: float = 6 * 3600.0  # time within which a plan's gain must exceed the cost of its moves
    rtt_cap_seconds: float = 0.08  # between neighbours of a route; longer round trips are penalised


@dataclass(frozen=True)
class Question:
    """A request for the best plan of a run at this time."""

    number: int  # counts the questions of this run
    nodes: tuple[PlannerNode, ...]  # nodes that the plan may place
    layers: plan_pb2.LayerTable
    spec: RunSpec
    pins: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by name: first and last layer
    allowed_spans: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # by name: these layers or no place
    current: tuple[NamedRoute, ...] = ()  # routes that the members follow, including members that have left
    routes: tuple[Route, ...] = ()  # the same routes by peer ids
    standbys: NamedRoute = ()  # nodes that hold layers without a place on a route, in no order
    given_routes: tuple[NamedRoute, ...] = ()  # evaluate these routes instead of a search
    preferences: Preferences = Preferences()
    seconds: float = 2.0  # time limit of the search
    steps: int | None = None  # step limit of the search, for results that must repeat

    def name_by_peer(self) -> dict[str, str]:
        """Names of the nodes when the question was asked: the names in the answer."""
        return {node.peer_id: node.name for node in self.nodes}

    def peer_by_name(self) -> dict[str, str]:
        """Peer ids by those names. A node may have another name when the answer arrives."""
        return {node.name: node.peer_id for node in self.nodes}


@dataclass(frozen=True)
class Answer:
    """The routes to use. If no plan is possible, there are none, and `missing` is the reason."""

    routes: tuple[NamedRoute, ...] = ()
    reason: str = ""
    missing: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)  # by name: reason why a node has no place
    fetched_bytes: Mapping[str, float] = field(default_factory=dict)  # by name: bytes of anchor and momentum to fetch
    before_tokens_per_second: float = 0.0  # predicted for the routes that can continue unchanged
    tokens_per_second: float = 0.0  # predicted
    corrections: Mapping[str, float] = field(default_factory=dict)  # by name, of nodes that train: `last_correction`
    doubts: Mapping[str, str] = field(default_factory=dict)  # by name: how its figures differ from measurements


def shares_memory(profile: mb.NodeProfile) -> bool:
    """True if the device uses the host's memory."""
    return profile.device == "cpu"


def memory_figures(profile: mb.NodeProfile) -> tuple[int, int, bool, int]:
    """Memory sizes that a node reported; they determine which spans fit."""
    return (
        profile.device_memory_bytes,
        profile.host_memory_bytes,
        shares_memory(profile),
        profile.whole_model_bytes,
    )


def status_for_span(status: mb.NodeStatus, first: int, last: int) -> mb.NodeStatus:
    """Return the status without its compute time if that is for other layers than the planned span."""
    timed = status.computed.layers
    if not status.HasField("computed") or (timed.first, timed.last) == (first, last):
        return status
    cleared = mb.NodeStatus()
    cleared.CopyFrom(status)
    cleared.ClearField("computed")
    return cleared


def has_planner_inputs(profile: mb.NodeProfile) -> bool:
    """True once a node has reported the planner's inputs: its memory and its compute speed."""
    computes = profile.layer_times or profile.tokens_per_second
    return bool(profile.device_memory_bytes and profile.host_memory_bytes and computes)
