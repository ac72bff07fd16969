"""State of the whole coordinator as one immutable value. `state/draft.py` makes the next one from it.

It contains the stored rows (`store/records.py`), the memory of each run (`RunMemory`) and the state of connections
(`LiveNode`), so that a decision reads one value. Nothing here does I/O.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from atoll.coordinator.planner.question import PathMeasurement, Preferences
from atoll.coordinator.state.rate_limits import Allowance
from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.store.records import Checkpoint, DeletedRun, ForgottenNode, Node, NodeMetrics, Run, Token
from atoll.core.membership import EMPTY_DENY_LIST, DenyList
from atoll.v1 import membership_pb2 as mb


@dataclass(frozen=True)
class StepTime:
    """The current time, read once per step: wall-clock for messages and certificates, monotonic for deadlines."""

    unix_ms: int
    monotonic: float


@dataclass(frozen=True)
class Policy:
    """Timeouts and intervals in seconds, and the preferences of plans."""

    silence_seconds: float = 15.0  # a stream without a heartbeat for this long is ended
    lost_after_seconds: float = 20.0  # a node without a stream for this long counts as lost
    debounce_seconds: float = 1.0  # changes this close together make one plan
    plan_interval_seconds: float = 10.0  # between two plans, unless waiting would stop the run
    reshare_after_seconds: float = 60.0  # new reduce shares must have been better for this long
    replan_seconds: float = 120.0  # interval of replanning routes, because links and speeds drift
    solve_seconds: float = 2.0  # search time of the planner
    prepare_seconds: float = 60.0  # for nodes to fetch layers before a plan assigns them, plus the transfer time
    solve_steps: int | None = None  # most steps of a search; set where its result must repeat
    standby_seconds: float = 10.0  # after which a node without a place becomes a standby; others may join meanwhile
    resume_seconds: float = 5.0  # after a pause, nodes have this long to reconnect before the plan changes
    genesis_seconds: float = 600.0  # to write the genesis anchor before another node is asked
    recover_seconds: float = 10.0  # all voters must report older rounds for this long before a recovery
    # all holders of some layers must report them lost for this long before a recovery
    lost_layers_seconds: float = 60.0
    preferences: Preferences = field(default_factory=Preferences)


@dataclass(frozen=True)
class LiveNode:
    """Reports of a node since this process started. `session` 0: no stream is open.

    It has many fields because every report of a node is kept here, and each is replaced separately.
    """

    session: int
    last_message_at: float  # monotonic; the end of the stream if none is open
    counted_as_lost: bool = False
    connected_at: float = 0.0  # monotonic, when its stream was opened
    stays_in_run: bool = False  # its owner does not let the operator move it to another run
    instance: bytes = b""  # of the process with the stream; empty: not given
    challenge: bytes = b""  # sent to it because another process claims the identity (`runs/identity_claims`)
    challenge_answered: bool = False
    promised: bytes = b""  # serialised `Promise`, the newest that this process reported
    promised_before: bytes = b""  # likewise, of an earlier process of the node
    unfit_since: float | None = None  # monotonic, since when its state is not eligible for training
    unfit_round: int = 0  # the newest committed round at that time
    status: mb.NodeStatus = field(default_factory=mb.NodeStatus)
    profile: mb.NodeProfile = field(default_factory=mb.NodeProfile)
    paths: Mapping[str, PathMeasurement] = field(default_factory=dict)  # to other members, by peer id
    corpus_digest: str = ""
    layers: bytes = b""  # LayerTable of the run's model, as reported before genesis
    former_checkpoints: tuple[Checkpoint, ...] = ()  # of other runs, on its disk
    drain_since: float | None = None  # when it was asked to leave, or was released to leave
    handing_over: bool = False  # draining, but first others must fetch its layers
    row_allowance: Allowance = field(default_factory=Allowance)
    refusal_allowance: Allowance = field(default_factory=Allowance)
    metrics_allowance: Allowance = field(default_factory=Allowance)
    pending_metrics: Mapping[int, NodeMetrics] = field(default_factory=dict)  # by round, not stored yet
    memory_change_allowance: Allowance = field(default_factory=Allowance)
    dropped_reports: int = 0  # reports beyond the allowances, not logged yet
    dropped_since: float = 0.0  # monotonic

    @property
    def connected(self) -> bool:
        """True if a heartbeat stream is open."""
        return self.session != 0

    def begun_anew(self, now: float) -> LiveNode:
        """A copy without stream and reports. Its allowances are not refilled."""
        kept = ("allowance", "dropped_")
        said = {item.name: getattr(self, item.name) for item in fields(self) if any(word in item.name for word in kept)}
        # it has not connected yet, which is no loss
        return LiveNode(session=0, last_message_at=now, counted_as_lost=True, **said)


@dataclass(frozen=True)
class State:
    """The state of the whole coordinator."""

    operator_key: bytes = b""  # public key that signs the coordinator's votes
    tokens: Mapping[str, Token] = field(default_factory=dict)
    nodes: Mapping[str, Node] = field(default_factory=dict)
    runs: Mapping[str, Run] = field(default_factory=dict)
    memory: Mapping[str, RunMemory] = field(default_factory=dict)  # by run id
    live: Mapping[str, LiveNode] = field(default_factory=dict)  # by peer id
    checkpoints: Mapping[str, tuple[Checkpoint, ...]] = field(default_factory=dict)  # by peer id, newest first
    deleted_runs: Mapping[str, DeletedRun] = field(default_factory=dict)  # by run id
    forgotten: Mapping[str, ForgottenNode] = field(default_factory=dict)  # by peer id
    deny: DenyList = EMPTY_DENY_LIST
    deny_reserved: int = 0  # deny-list numbers up to this one may have been issued before a restore
    started_at: float = -math.inf  # monotonic, when this process took over
    last_event_id: int = 0
    last_session: int = 0

    def members_of(self, run_id: str) -> list[Node]:
        """Nodes and seeds enrolled in a run, ordered by peer id."""
        return sorted((node for node in self.present_nodes() if node.run_id == run_id), key=lambda node: node.peer_id)

    def present_nodes(self) -> list[Node]:
        """All nodes and seeds, each under its newest identity."""
        return [node for node in self.nodes.values() if not node.replaced_by]
