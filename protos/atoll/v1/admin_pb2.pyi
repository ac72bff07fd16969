from atoll.v1 import common_pb2 as _common_pb2
from atoll.v1 import plan_pb2 as _plan_pb2
from atoll.v1 import membership_pb2 as _membership_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeleteRunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class DeleteRunResponse(_message.Message):
    __slots__ = ("run_id", "head_round", "nodes", "tokens")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROUND_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    head_round: int
    nodes: int
    tokens: int
    def __init__(self, run_id: _Optional[str] = ..., head_round: _Optional[int] = ..., nodes: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class ForgetNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ForgetNodeResponse(_message.Message):
    __slots__ = ("peer_id", "name", "run_id", "banned", "last_seen_unix_ms")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    run_id: str
    banned: bool
    last_seen_unix_ms: int
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., run_id: _Optional[str] = ..., banned: _Optional[bool] = ..., last_seen_unix_ms: _Optional[int] = ...) -> None: ...

class OrderCheckpointRequest(_message.Message):
    __slots__ = ("run_id", "round")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ...) -> None: ...

class OrderCheckpointResponse(_message.Message):
    __slots__ = ("run_id", "round", "written_round", "checkpoints", "waiting", "missing")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_ROUND_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    written_round: int
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointView]
    waiting: _containers.RepeatedScalarFieldContainer[str]
    missing: str
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., written_round: _Optional[int] = ..., checkpoints: _Optional[_Iterable[_Union[CheckpointView, _Mapping]]] = ..., waiting: _Optional[_Iterable[str]] = ..., missing: _Optional[str] = ...) -> None: ...

class GetAuthoritiesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RotateAuthorityRequest(_message.Message):
    __slots__ = ("overlap_seconds",)
    OVERLAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    overlap_seconds: int
    def __init__(self, overlap_seconds: _Optional[int] = ...) -> None: ...

class RetireAuthorityRequest(_message.Message):
    __slots__ = ("force",)
    FORCE_FIELD_NUMBER: _ClassVar[int]
    force: bool
    def __init__(self, force: _Optional[bool] = ...) -> None: ...

class AuthoritiesView(_message.Message):
    __slots__ = ("trusted", "until_unix_ms", "waiting")
    TRUSTED_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    trusted: _containers.RepeatedCompositeFieldContainer[AuthorityView]
    until_unix_ms: int
    waiting: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, trusted: _Optional[_Iterable[_Union[AuthorityView, _Mapping]]] = ..., until_unix_ms: _Optional[int] = ..., waiting: _Optional[_Iterable[str]] = ...) -> None: ...

class AuthorityView(_message.Message):
    __slots__ = ("sha256", "expires_unix_ms", "members")
    SHA256_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    expires_unix_ms: int
    members: int
    def __init__(self, sha256: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ..., members: _Optional[int] = ...) -> None: ...

class UnbanNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class ListProofsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ListProofsResponse(_message.Message):
    __slots__ = ("proofs",)
    PROOFS_FIELD_NUMBER: _ClassVar[int]
    proofs: _containers.RepeatedCompositeFieldContainer[ProofView]
    def __init__(self, proofs: _Optional[_Iterable[_Union[ProofView, _Mapping]]] = ...) -> None: ...

class GetProofRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ProofView(_message.Message):
    __slots__ = ("id", "run_id", "culprit", "culprit_name", "kind", "round", "found_unix_ms", "banned", "sentence", "proof")
    ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_FIELD_NUMBER: _ClassVar[int]
    CULPRIT_NAME_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    FOUND_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    PROOF_FIELD_NUMBER: _ClassVar[int]
    id: str
    run_id: str
    culprit: str
    culprit_name: str
    kind: str
    round: int
    found_unix_ms: int
    banned: bool
    sentence: str
    proof: bytes
    def __init__(self, id: _Optional[str] = ..., run_id: _Optional[str] = ..., culprit: _Optional[str] = ..., culprit_name: _Optional[str] = ..., kind: _Optional[str] = ..., round: _Optional[int] = ..., found_unix_ms: _Optional[int] = ..., banned: _Optional[bool] = ..., sentence: _Optional[str] = ..., proof: _Optional[bytes] = ...) -> None: ...

class RecoverRunRequest(_message.Message):
    __slots__ = ("run_id", "force")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    force: bool
    def __init__(self, run_id: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class CheckpointView(_message.Message):
    __slots__ = ("checkpoint", "peer_id", "node_name", "connected", "committed")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    checkpoint: _membership_pb2.CheckpointInfo
    peer_id: str
    node_name: str
    connected: bool
    committed: bool
    def __init__(self, checkpoint: _Optional[_Union[_membership_pb2.CheckpointInfo, _Mapping]] = ..., peer_id: _Optional[str] = ..., node_name: _Optional[str] = ..., connected: _Optional[bool] = ..., committed: _Optional[bool] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints",)
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointView]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[CheckpointView, _Mapping]]] = ...) -> None: ...

class PullCheckpointRequest(_message.Message):
    __slots__ = ("run_id", "round", "node", "unverified")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    UNVERIFIED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    node: str
    unverified: bool
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., node: _Optional[str] = ..., unverified: _Optional[bool] = ...) -> None: ...

class ForkSourceRequest(_message.Message):
    __slots__ = ("run_id", "round", "manifest_hash")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    manifest_hash: bytes
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., manifest_hash: _Optional[bytes] = ...) -> None: ...

class ForkSourceView(_message.Message):
    __slots__ = ("run_id", "round", "manifest_hash", "committed", "holders", "spec_toml")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    SPEC_TOML_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    round: int
    manifest_hash: bytes
    committed: bool
    holders: _containers.RepeatedCompositeFieldContainer[ForkHolder]
    spec_toml: str
    def __init__(self, run_id: _Optional[str] = ..., round: _Optional[int] = ..., manifest_hash: _Optional[bytes] = ..., committed: _Optional[bool] = ..., holders: _Optional[_Iterable[_Union[ForkHolder, _Mapping]]] = ..., spec_toml: _Optional[str] = ...) -> None: ...

class ForkHolder(_message.Message):
    __slots__ = ("peer_id", "node_name", "run_id", "connected")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    node_name: str
    run_id: str
    connected: bool
    def __init__(self, peer_id: _Optional[str] = ..., node_name: _Optional[str] = ..., run_id: _Optional[str] = ..., connected: _Optional[bool] = ...) -> None: ...

class CreateTokenRequest(_message.Message):
    __slots__ = ("run_id", "uses", "ttl_seconds", "roles", "on_probation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ON_PROBATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    uses: int
    ttl_seconds: int
    roles: _containers.RepeatedScalarFieldContainer[_common_pb2.Role]
    on_probation: bool
    def __init__(self, run_id: _Optional[str] = ..., uses: _Optional[int] = ..., ttl_seconds: _Optional[int] = ..., roles: _Optional[_Iterable[_Union[_common_pb2.Role, str]]] = ..., on_probation: _Optional[bool] = ...) -> None: ...

class CreateTokenResponse(_message.Message):
    __slots__ = ("token", "view")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    VIEW_FIELD_NUMBER: _ClassVar[int]
    token: str
    view: TokenView
    def __init__(self, token: _Optional[str] = ..., view: _Optional[_Union[TokenView, _Mapping]] = ...) -> None: ...

class TokenView(_message.Message):
    __slots__ = ("id", "run_id", "roles", "uses_left", "uses_total", "created_unix_ms", "expires_unix_ms", "revoked", "on_probation")
    ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    USES_LEFT_FIELD_NUMBER: _ClassVar[int]
    USES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    ON_PROBATION_FIELD_NUMBER: _ClassVar[int]
    id: str
    run_id: str
    roles: _containers.RepeatedScalarFieldContainer[_common_pb2.Role]
    uses_left: int
    uses_total: int
    created_unix_ms: int
    expires_unix_ms: int
    revoked: bool
    on_probation: bool
    def __init__(self, id: _Optional[str] = ..., run_id: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[_common_pb2.Role, str]]] = ..., uses_left: _Optional[int] = ..., uses_total: _Optional[int] = ..., created_unix_ms: _Optional[int] = ..., expires_unix_ms: _Optional[int] = ..., revoked: _Optional[bool] = ..., on_probation: _Optional[bool] = ...) -> None: ...

class ListTokensRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTokensResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenView]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenView, _Mapping]]] = ...) -> None: ...

class RevokeTokenRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class RevokeTokenResponse(_message.Message):
    __slots__ = ("view",)
    VIEW_FIELD_NUMBER: _ClassVar[int]
    view: TokenView
    def __init__(self, view: _Optional[_Union[TokenView, _Mapping]] = ...) -> None: ...

class NodeView(_message.Message):
    __slots__ = ("peer_id", "name", "run_id", "roles", "profile", "status", "enrolled_unix_ms", "last_seen_unix_ms", "connected", "banned", "draining", "multiaddrs", "paths", "span", "route", "left_out", "pin", "availability", "failures_per_hour", "doubt", "training_audits", "training_score", "typical_training_score", "training_doubted", "on_probation", "assigned_run", "ended", "ended_detail", "left")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    ENROLLED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    BANNED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MULTIADDRS_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    PIN_FIELD_NUMBER: _ClassVar[int]
    AVAILABILITY_FIELD_NUMBER: _ClassVar[int]
    FAILURES_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    DOUBT_FIELD_NUMBER: _ClassVar[int]
    TRAINING_AUDITS_FIELD_NUMBER: _ClassVar[int]
    TRAINING_SCORE_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_TRAINING_SCORE_FIELD_NUMBER: _ClassVar[int]
    TRAINING_DOUBTED_FIELD_NUMBER: _ClassVar[int]
    ON_PROBATION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNED_RUN_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    ENDED_DETAIL_FIELD_NUMBER: _ClassVar[int]
    LEFT_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    run_id: str
    roles: _containers.RepeatedScalarFieldContainer[_common_pb2.Role]
    profile: _membership_pb2.NodeProfile
    status: _membership_pb2.NodeStatus
    enrolled_unix_ms: int
    last_seen_unix_ms: int
    connected: bool
    banned: bool
    draining: bool
    multiaddrs: _containers.RepeatedScalarFieldContainer[str]
    paths: _containers.RepeatedCompositeFieldContainer[_membership_pb2.PeerPath]
    span: _plan_pb2.Span
    route: int
    left_out: str
    pin: str
    availability: float
    failures_per_hour: float
    doubt: str
    training_audits: int
    training_score: float
    typical_training_score: float
    training_doubted: bool
    on_probation: bool
    assigned_run: str
    ended: _membership_pb2.NodeReason
    ended_detail: str
    left: bool
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., run_id: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[_common_pb2.Role, str]]] = ..., profile: _Optional[_Union[_membership_pb2.NodeProfile, _Mapping]] = ..., status: _Optional[_Union[_membership_pb2.NodeStatus, _Mapping]] = ..., enrolled_unix_ms: _Optional[int] = ..., last_seen_unix_ms: _Optional[int] = ..., connected: _Optional[bool] = ..., banned: _Optional[bool] = ..., draining: _Optional[bool] = ..., multiaddrs: _Optional[_Iterable[str]] = ..., paths: _Optional[_Iterable[_Union[_membership_pb2.PeerPath, _Mapping]]] = ..., span: _Optional[_Union[_plan_pb2.Span, _Mapping]] = ..., route: _Optional[int] = ..., left_out: _Optional[str] = ..., pin: _Optional[str] = ..., availability: _Optional[float] = ..., failures_per_hour: _Optional[float] = ..., doubt: _Optional[str] = ..., training_audits: _Optional[int] = ..., training_score: _Optional[float] = ..., typical_training_score: _Optional[float] = ..., training_doubted: _Optional[bool] = ..., on_probation: _Optional[bool] = ..., assigned_run: _Optional[str] = ..., ended: _Optional[_Union[_membership_pb2.NodeReason, str]] = ..., ended_detail: _Optional[str] = ..., left: _Optional[bool] = ...) -> None: ...

class ListNodesRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[NodeView]
    def __init__(self, nodes: _Optional[_Iterable[_Union[NodeView, _Mapping]]] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class SetProbationRequest(_message.Message):
    __slots__ = ("node", "on_probation")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ON_PROBATION_FIELD_NUMBER: _ClassVar[int]
    node: str
    on_probation: bool
    def __init__(self, node: _Optional[str] = ..., on_probation: _Optional[bool] = ...) -> None: ...

class AssignNodeRequest(_message.Message):
    __slots__ = ("node", "run_id")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    node: str
    run_id: str
    def __init__(self, node: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class BanNodeRequest(_message.Message):
    __slots__ = ("node", "reason")
    NODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    node: str
    reason: str
    def __init__(self, node: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class CreateRunRequest(_message.Message):
    __slots__ = ("spec_toml", "start")
    SPEC_TOML_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    spec_toml: str
    start: bool
    def __init__(self, spec_toml: _Optional[str] = ..., start: _Optional[bool] = ...) -> None: ...

class RunRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class RunView(_message.Message):
    __slots__ = ("run_id", "state", "spec_toml", "head_round", "committed_tokens", "stop_tokens", "rounds_opened", "rounds_committed", "plan_version", "validation_loss", "nodes_ready", "min_nodes", "layers", "evaluations", "missing", "uncounted", "eta_unix_ms", "recent_tokens_per_second")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SPEC_TOML_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_OPENED_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    VALIDATION_LOSS_FIELD_NUMBER: _ClassVar[int]
    NODES_READY_FIELD_NUMBER: _ClassVar[int]
    MIN_NODES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    ETA_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    RECENT_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    state: _membership_pb2.RunState
    spec_toml: str
    head_round: int
    committed_tokens: int
    stop_tokens: int
    rounds_opened: int
    rounds_committed: int
    plan_version: int
    validation_loss: float
    nodes_ready: int
    min_nodes: int
    layers: _plan_pb2.LayerTable
    evaluations: _containers.RepeatedCompositeFieldContainer[_membership_pb2.EvaluationReport]
    missing: str
    uncounted: _containers.RepeatedScalarFieldContainer[str]
    eta_unix_ms: int
    recent_tokens_per_second: float
    def __init__(self, run_id: _Optional[str] = ..., state: _Optional[_Union[_membership_pb2.RunState, str]] = ..., spec_toml: _Optional[str] = ..., head_round: _Optional[int] = ..., committed_tokens: _Optional[int] = ..., stop_tokens: _Optional[int] = ..., rounds_opened: _Optional[int] = ..., rounds_committed: _Optional[int] = ..., plan_version: _Optional[int] = ..., validation_loss: _Optional[float] = ..., nodes_ready: _Optional[int] = ..., min_nodes: _Optional[int] = ..., layers: _Optional[_Union[_plan_pb2.LayerTable, _Mapping]] = ..., evaluations: _Optional[_Iterable[_Union[_membership_pb2.EvaluationReport, _Mapping]]] = ..., missing: _Optional[str] = ..., uncounted: _Optional[_Iterable[str]] = ..., eta_unix_ms: _Optional[int] = ..., recent_tokens_per_second: _Optional[float] = ...) -> None: ...

class ListRunsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListRunsResponse(_message.Message):
    __slots__ = ("runs",)
    RUNS_FIELD_NUMBER: _ClassVar[int]
    runs: _containers.RepeatedCompositeFieldContainer[RunView]
    def __init__(self, runs: _Optional[_Iterable[_Union[RunView, _Mapping]]] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ("run_id", "version")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    version: int
    def __init__(self, run_id: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class PlanView(_message.Message):
    __slots__ = ("plan", "signed", "nodes", "left_out", "missing", "figures", "wishes")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SIGNED_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    WISHES_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    signed: _common_pb2.Signed
    nodes: _containers.RepeatedCompositeFieldContainer[PlacedNode]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOutNode]
    missing: str
    figures: PlanFigures
    wishes: PlanWishes
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., signed: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., nodes: _Optional[_Iterable[_Union[PlacedNode, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOutNode, _Mapping]]] = ..., missing: _Optional[str] = ..., figures: _Optional[_Union[PlanFigures, _Mapping]] = ..., wishes: _Optional[_Union[PlanWishes, _Mapping]] = ...) -> None: ...

class PlanWishes(_message.Message):
    __slots__ = ("goal", "hysteresis", "horizon_seconds", "rtt_cap_seconds")
    GOAL_FIELD_NUMBER: _ClassVar[int]
    HYSTERESIS_FIELD_NUMBER: _ClassVar[int]
    HORIZON_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RTT_CAP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    goal: str
    hysteresis: float
    horizon_seconds: float
    rtt_cap_seconds: float
    def __init__(self, goal: _Optional[str] = ..., hysteresis: _Optional[float] = ..., horizon_seconds: _Optional[float] = ..., rtt_cap_seconds: _Optional[float] = ...) -> None: ...

class PlacedNode(_message.Message):
    __slots__ = ("peer_id", "name", "route", "span", "memory_bytes", "memory_lent_bytes", "copies")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_LENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    route: int
    span: _plan_pb2.Span
    memory_bytes: float
    memory_lent_bytes: float
    copies: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Span]
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., route: _Optional[int] = ..., span: _Optional[_Union[_plan_pb2.Span, _Mapping]] = ..., memory_bytes: _Optional[float] = ..., memory_lent_bytes: _Optional[float] = ..., copies: _Optional[_Iterable[_Union[_plan_pb2.Span, _Mapping]]] = ...) -> None: ...

class LeftOutNode(_message.Message):
    __slots__ = ("peer_id", "name", "reason")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    reason: str
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class PlanFigures(_message.Message):
    __slots__ = ("version", "issued_unix_ms", "reason", "nodes", "routes", "predicted_tokens_per_second", "measured_tokens_per_second", "measured_seconds", "moved_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ISSUED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEASURED_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MEASURED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: int
    issued_unix_ms: int
    reason: str
    nodes: int
    routes: int
    predicted_tokens_per_second: float
    measured_tokens_per_second: float
    measured_seconds: float
    moved_bytes: float
    def __init__(self, version: _Optional[int] = ..., issued_unix_ms: _Optional[int] = ..., reason: _Optional[str] = ..., nodes: _Optional[int] = ..., routes: _Optional[int] = ..., predicted_tokens_per_second: _Optional[float] = ..., measured_tokens_per_second: _Optional[float] = ..., measured_seconds: _Optional[float] = ..., moved_bytes: _Optional[float] = ...) -> None: ...

class PlanHistoryRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class PlanHistoryResponse(_message.Message):
    __slots__ = ("plans",)
    PLANS_FIELD_NUMBER: _ClassVar[int]
    plans: _containers.RepeatedCompositeFieldContainer[PlanFigures]
    def __init__(self, plans: _Optional[_Iterable[_Union[PlanFigures, _Mapping]]] = ...) -> None: ...

class ApplyPlanRequest(_message.Message):
    __slots__ = ("run_id", "dry_run")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    dry_run: bool
    def __init__(self, run_id: _Optional[str] = ..., dry_run: _Optional[bool] = ...) -> None: ...

class ApplyPlanResponse(_message.Message):
    __slots__ = ("changes", "reason", "version", "before_tokens_per_second", "after_tokens_per_second", "moves", "left_out", "missing")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BEFORE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    AFTER_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    changes: bool
    reason: str
    version: int
    before_tokens_per_second: float
    after_tokens_per_second: float
    moves: _containers.RepeatedCompositeFieldContainer[MovedNode]
    left_out: _containers.RepeatedCompositeFieldContainer[LeftOutNode]
    missing: str
    def __init__(self, changes: _Optional[bool] = ..., reason: _Optional[str] = ..., version: _Optional[int] = ..., before_tokens_per_second: _Optional[float] = ..., after_tokens_per_second: _Optional[float] = ..., moves: _Optional[_Iterable[_Union[MovedNode, _Mapping]]] = ..., left_out: _Optional[_Iterable[_Union[LeftOutNode, _Mapping]]] = ..., missing: _Optional[str] = ...) -> None: ...

class MovedNode(_message.Message):
    __slots__ = ("peer_id", "name", "before", "after", "fetched_bytes")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BYTES_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    before: str
    after: str
    fetched_bytes: float
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., fetched_bytes: _Optional[float] = ...) -> None: ...

class PinNodeRequest(_message.Message):
    __slots__ = ("node", "span")
    NODE_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    node: str
    span: _plan_pb2.Span
    def __init__(self, node: _Optional[str] = ..., span: _Optional[_Union[_plan_pb2.Span, _Mapping]] = ...) -> None: ...

class UnpinNodeRequest(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: str
    def __init__(self, node: _Optional[str] = ...) -> None: ...

class EventsRequest(_message.Message):
    __slots__ = ("after_id", "follow", "run_id", "node", "kind", "since_seconds", "tail")
    AFTER_ID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SINCE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    after_id: int
    follow: bool
    run_id: str
    node: str
    kind: str
    since_seconds: int
    tail: int
    def __init__(self, after_id: _Optional[int] = ..., follow: _Optional[bool] = ..., run_id: _Optional[str] = ..., node: _Optional[str] = ..., kind: _Optional[str] = ..., since_seconds: _Optional[int] = ..., tail: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("id", "unix_ms", "kind", "run_id", "subject", "message")
    ID_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    id: int
    unix_ms: int
    kind: str
    run_id: str
    subject: str
    message: str
    def __init__(self, id: _Optional[int] = ..., unix_ms: _Optional[int] = ..., kind: _Optional[str] = ..., run_id: _Optional[str] = ..., subject: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class ListRoundsRequest(_message.Message):
    __slots__ = ("run_id", "after_round", "limit", "newest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_ROUND_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    after_round: int
    limit: int
    newest: bool
    def __init__(self, run_id: _Optional[str] = ..., after_round: _Optional[int] = ..., limit: _Optional[int] = ..., newest: _Optional[bool] = ...) -> None: ...

class RoundView(_message.Message):
    __slots__ = ("round", "committed", "reason", "tokens", "members", "seconds", "unix_ms", "parts_zeroed", "opener", "present", "partial", "void", "screened", "codec")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PARTS_ZEROED_FIELD_NUMBER: _ClassVar[int]
    OPENER_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    VOID_FIELD_NUMBER: _ClassVar[int]
    SCREENED_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    committed: bool
    reason: str
    tokens: int
    members: int
    seconds: float
    unix_ms: int
    parts_zeroed: int
    opener: str
    present: int
    partial: int
    void: bool
    screened: _containers.RepeatedScalarFieldContainer[str]
    codec: str
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., committed: _Optional[bool] = ..., reason: _Optional[str] = ..., tokens: _Optional[int] = ..., members: _Optional[int] = ..., seconds: _Optional[float] = ..., unix_ms: _Optional[int] = ..., parts_zeroed: _Optional[int] = ..., opener: _Optional[str] = ..., present: _Optional[int] = ..., partial: _Optional[int] = ..., void: _Optional[bool] = ..., screened: _Optional[_Iterable[str]] = ..., codec: _Optional[str] = ...) -> None: ...

class ListRoundsResponse(_message.Message):
    __slots__ = ("rounds",)
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundView]
    def __init__(self, rounds: _Optional[_Iterable[_Union[RoundView, _Mapping]]] = ...) -> None: ...

class ListMetricsRequest(_message.Message):
    __slots__ = ("run_id", "node", "since_round", "after_peer_id", "limit", "newest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    SINCE_ROUND_FIELD_NUMBER: _ClassVar[int]
    AFTER_PEER_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    node: str
    since_round: int
    after_peer_id: str
    limit: int
    newest: bool
    def __init__(self, run_id: _Optional[str] = ..., node: _Optional[str] = ..., since_round: _Optional[int] = ..., after_peer_id: _Optional[str] = ..., limit: _Optional[int] = ..., newest: _Optional[bool] = ...) -> None: ...

class MetricsRow(_message.Message):
    __slots__ = ("peer_id", "name", "unix_ms", "metrics")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    unix_ms: int
    metrics: _membership_pb2.NodeMetrics
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., unix_ms: _Optional[int] = ..., metrics: _Optional[_Union[_membership_pb2.NodeMetrics, _Mapping]] = ...) -> None: ...

class ListMetricsResponse(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[MetricsRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[MetricsRow, _Mapping]]] = ...) -> None: ...

class ListCreditsRequest(_message.Message):
    __slots__ = ("run_id", "limit")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    limit: int
    def __init__(self, run_id: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class CreditView(_message.Message):
    __slots__ = ("peer_id", "name", "rank", "tokens", "rounds", "first_unix_ms", "last_unix_ms")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    name: str
    rank: int
    tokens: int
    rounds: int
    first_unix_ms: int
    last_unix_ms: int
    def __init__(self, peer_id: _Optional[str] = ..., name: _Optional[str] = ..., rank: _Optional[int] = ..., tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., first_unix_ms: _Optional[int] = ..., last_unix_ms: _Optional[int] = ...) -> None: ...

class ListCreditsResponse(_message.Message):
    __slots__ = ("run_id", "tokens", "nodes", "credits")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    tokens: int
    nodes: int
    credits: _containers.RepeatedCompositeFieldContainer[CreditView]
    def __init__(self, run_id: _Optional[str] = ..., tokens: _Optional[int] = ..., nodes: _Optional[int] = ..., credits: _Optional[_Iterable[_Union[CreditView, _Mapping]]] = ...) -> None: ...
