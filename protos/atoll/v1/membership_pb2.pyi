from atoll.v1 import common_pb2 as _common_pb2
from atoll.v1 import plan_pb2 as _plan_pb2
from atoll.v1 import manifest_pb2 as _manifest_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class NodeState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_STATE_UNSPECIFIED: _ClassVar[NodeState]
    NODE_STATE_JOINING: _ClassVar[NodeState]
    NODE_STATE_READY: _ClassVar[NodeState]
    NODE_STATE_CATCHING_UP: _ClassVar[NodeState]
    NODE_STATE_TRAINING: _ClassVar[NodeState]
    NODE_STATE_PAUSED: _ClassVar[NodeState]
    NODE_STATE_DRAINING: _ClassVar[NodeState]
    NODE_STATE_FINISHED: _ClassVar[NodeState]
    NODE_STATE_FAILED: _ClassVar[NodeState]

class NodeReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NODE_REASON_UNSPECIFIED: _ClassVar[NodeReason]
    NODE_REASON_STOPPED: _ClassVar[NodeReason]
    NODE_REASON_DRAINED: _ClassVar[NodeReason]
    NODE_REASON_RUN_STOPPED: _ClassVar[NodeReason]
    NODE_REASON_TEXT_UNUSABLE: _ClassVar[NodeReason]
    NODE_REASON_TEXT_DIFFERS: _ClassVar[NodeReason]
    NODE_REASON_BASE_UNUSABLE: _ClassVar[NodeReason]
    NODE_REASON_MODEL_TOO_LARGE: _ClassVar[NodeReason]
    NODE_REASON_OUT_OF_MEMORY: _ClassVar[NodeReason]
    NODE_REASON_DISK: _ClassVar[NodeReason]
    NODE_REASON_DEVICE: _ClassVar[NodeReason]
    NODE_REASON_NETWORK: _ClassVar[NodeReason]
    NODE_REASON_SETTINGS: _ClassVar[NodeReason]
    NODE_REASON_TRAINER_DIED: _ClassVar[NodeReason]
    NODE_REASON_REFUSED: _ClassVar[NodeReason]
    NODE_REASON_INTERNAL: _ClassVar[NodeReason]
    NODE_REASON_PAUSED_BY_OWNER: _ClassVar[NodeReason]
    NODE_REASON_OUTSIDE_HOURS: _ClassVar[NodeReason]
    NODE_REASON_ON_BATTERY: _ClassVar[NodeReason]
    NODE_REASON_IN_USE: _ClassVar[NodeReason]
    NODE_REASON_TRAFFIC_USED_UP: _ClassVar[NodeReason]
    NODE_REASON_RUN_PAUSED: _ClassVar[NodeReason]
    NODE_REASON_LOADING: _ClassVar[NodeReason]
    NODE_REASON_WAITS_FOR_PLAN: _ClassVar[NodeReason]
    NODE_REASON_WAITS_FOR_TEXT: _ClassVar[NodeReason]
    NODE_REASON_WAITS_FOR_STAGE: _ClassVar[NodeReason]
    NODE_REASON_FETCHING_STATE: _ClassVar[NodeReason]
    NODE_REASON_STANDBY: _ClassVar[NodeReason]
    NODE_REASON_SLOW_TEXT: _ClassVar[NodeReason]
    NODE_REASON_TRAINER_RESTARTS: _ClassVar[NodeReason]

class ForkRefusal(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FORK_REFUSAL_UNSPECIFIED: _ClassVar[ForkRefusal]
    FORK_REFUSAL_MISSING: _ClassVar[ForkRefusal]
    FORK_REFUSAL_DAMAGED: _ClassVar[ForkRefusal]
    FORK_REFUSAL_OTHER_MANIFEST: _ClassVar[ForkRefusal]
    FORK_REFUSAL_SOME_LAYERS: _ClassVar[ForkRefusal]
    FORK_REFUSAL_OTHER_LAYERS: _ClassVar[ForkRefusal]
    FORK_REFUSAL_RESOURCES: _ClassVar[ForkRefusal]

class RunState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_STATE_UNSPECIFIED: _ClassVar[RunState]
    RUN_STATE_CREATED: _ClassVar[RunState]
    RUN_STATE_WAITING: _ClassVar[RunState]
    RUN_STATE_GENESIS: _ClassVar[RunState]
    RUN_STATE_TRAINING: _ClassVar[RunState]
    RUN_STATE_PAUSED: _ClassVar[RunState]
    RUN_STATE_FINISHED: _ClassVar[RunState]
    RUN_STATE_STOPPED: _ClassVar[RunState]

class Order(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORDER_UNSPECIFIED: _ClassVar[Order]
    ORDER_WRITE_GENESIS: _ClassVar[Order]
    ORDER_DRAIN: _ClassVar[Order]
    ORDER_MOVE: _ClassVar[Order]
NODE_STATE_UNSPECIFIED: NodeState
NODE_STATE_JOINING: NodeState
NODE_STATE_READY: NodeState
NODE_STATE_CATCHING_UP: NodeState
NODE_STATE_TRAINING: NodeState
NODE_STATE_PAUSED: NodeState
NODE_STATE_DRAINING: NodeState
NODE_STATE_FINISHED: NodeState
NODE_STATE_FAILED: NodeState
NODE_REASON_UNSPECIFIED: NodeReason
NODE_REASON_STOPPED: NodeReason
NODE_REASON_DRAINED: NodeReason
NODE_REASON_RUN_STOPPED: NodeReason
NODE_REASON_TEXT_UNUSABLE: NodeReason
NODE_REASON_TEXT_DIFFERS: NodeReason
NODE_REASON_BASE_UNUSABLE: NodeReason
NODE_REASON_MODEL_TOO_LARGE: NodeReason
NODE_REASON_OUT_OF_MEMORY: NodeReason
NODE_REASON_DISK: NodeReason
NODE_REASON_DEVICE: NodeReason
NODE_REASON_NETWORK: NodeReason
NODE_REASON_SETTINGS: NodeReason
NODE_REASON_TRAINER_DIED: NodeReason
NODE_REASON_REFUSED: NodeReason
NODE_REASON_INTERNAL: NodeReason
NODE_REASON_PAUSED_BY_OWNER: NodeReason
NODE_REASON_OUTSIDE_HOURS: NodeReason
NODE_REASON_ON_BATTERY: NodeReason
NODE_REASON_IN_USE: NodeReason
NODE_REASON_TRAFFIC_USED_UP: NodeReason
NODE_REASON_RUN_PAUSED: NodeReason
NODE_REASON_LOADING: NodeReason
NODE_REASON_WAITS_FOR_PLAN: NodeReason
NODE_REASON_WAITS_FOR_TEXT: NodeReason
NODE_REASON_WAITS_FOR_STAGE: NodeReason
NODE_REASON_FETCHING_STATE: NodeReason
NODE_REASON_STANDBY: NodeReason
NODE_REASON_SLOW_TEXT: NodeReason
NODE_REASON_TRAINER_RESTARTS: NodeReason
FORK_REFUSAL_UNSPECIFIED: ForkRefusal
FORK_REFUSAL_MISSING: ForkRefusal
FORK_REFUSAL_DAMAGED: ForkRefusal
FORK_REFUSAL_OTHER_MANIFEST: ForkRefusal
FORK_REFUSAL_SOME_LAYERS: ForkRefusal
FORK_REFUSAL_OTHER_LAYERS: ForkRefusal
FORK_REFUSAL_RESOURCES: ForkRefusal
RUN_STATE_UNSPECIFIED: RunState
RUN_STATE_CREATED: RunState
RUN_STATE_WAITING: RunState
RUN_STATE_GENESIS: RunState
RUN_STATE_TRAINING: RunState
RUN_STATE_PAUSED: RunState
RUN_STATE_FINISHED: RunState
RUN_STATE_STOPPED: RunState
ORDER_UNSPECIFIED: Order
ORDER_WRITE_GENESIS: Order
ORDER_DRAIN: Order
ORDER_MOVE: Order

class RenewRequest(_message.Message):
    __slots__ = ("csr_der", "csr_signature")
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    CSR_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    csr_der: bytes
    csr_signature: bytes
    def __init__(self, csr_der: _Optional[bytes] = ..., csr_signature: _Optional[bytes] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("certificate_chain_pem", "membership", "deny_list")
    CERTIFICATE_CHAIN_PEM_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    DENY_LIST_FIELD_NUMBER: _ClassVar[int]
    certificate_chain_pem: bytes
    membership: _common_pb2.Signed
    deny_list: _common_pb2.Signed
    def __init__(self, certificate_chain_pem: _Optional[bytes] = ..., membership: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., deny_list: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ...) -> None: ...

class RotateIdentityRequest(_message.Message):
    __slots__ = ("rotation", "csr_der", "csr_signature")
    ROTATION_FIELD_NUMBER: _ClassVar[int]
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    CSR_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    rotation: _common_pb2.IdentityRotation
    csr_der: bytes
    csr_signature: bytes
    def __init__(self, rotation: _Optional[_Union[_common_pb2.IdentityRotation, _Mapping]] = ..., csr_der: _Optional[bytes] = ..., csr_signature: _Optional[bytes] = ...) -> None: ...

class RotateIdentityResponse(_message.Message):
    __slots__ = ("certificate_chain_pem", "membership", "deny_list")
    CERTIFICATE_CHAIN_PEM_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    DENY_LIST_FIELD_NUMBER: _ClassVar[int]
    certificate_chain_pem: bytes
    membership: _common_pb2.Signed
    deny_list: _common_pb2.Signed
    def __init__(self, certificate_chain_pem: _Optional[bytes] = ..., membership: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., deny_list: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ...) -> None: ...

class MoveToRunRequest(_message.Message):
    __slots__ = ("instance",)
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    instance: bytes
    def __init__(self, instance: _Optional[bytes] = ...) -> None: ...

class MoveToRunResponse(_message.Message):
    __slots__ = ("run_id", "run_spec_toml", "membership", "seeds", "deny_list", "run_created_unix_ms")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_SPEC_TOML_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    DENY_LIST_FIELD_NUMBER: _ClassVar[int]
    RUN_CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_spec_toml: str
    membership: _common_pb2.Signed
    seeds: _containers.RepeatedScalarFieldContainer[str]
    deny_list: _common_pb2.Signed
    run_created_unix_ms: int
    def __init__(self, run_id: _Optional[str] = ..., run_spec_toml: _Optional[str] = ..., membership: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., seeds: _Optional[_Iterable[str]] = ..., deny_list: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., run_created_unix_ms: _Optional[int] = ...) -> None: ...

class LayerTime(_message.Message):
    __slots__ = ("kind", "forward_seconds_per_token", "backward_seconds_per_token")
    KIND_FIELD_NUMBER: _ClassVar[int]
    FORWARD_SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BACKWARD_SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    kind: str
    forward_seconds_per_token: float
    backward_seconds_per_token: float
    def __init__(self, kind: _Optional[str] = ..., forward_seconds_per_token: _Optional[float] = ..., backward_seconds_per_token: _Optional[float] = ...) -> None: ...

class PeerPath(_message.Message):
    __slots__ = ("peer_id", "rtt_seconds", "bytes_per_second")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    RTT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    rtt_seconds: float
    bytes_per_second: float
    def __init__(self, peer_id: _Optional[str] = ..., rtt_seconds: _Optional[float] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...

class NodeProfile(_message.Message):
    __slots__ = ("device", "device_name", "device_memory_bytes", "host_memory_bytes", "cpu_threads", "atoll_version", "tokens_per_second", "layer_times", "price_per_hour", "whole_model_bytes", "minimum_step_seconds")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_NAME_FIELD_NUMBER: _ClassVar[int]
    DEVICE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOST_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    CPU_THREADS_FIELD_NUMBER: _ClassVar[int]
    ATOLL_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    LAYER_TIMES_FIELD_NUMBER: _ClassVar[int]
    PRICE_PER_HOUR_FIELD_NUMBER: _ClassVar[int]
    WHOLE_MODEL_BYTES_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    device: str
    device_name: str
    device_memory_bytes: int
    host_memory_bytes: int
    cpu_threads: int
    atoll_version: str
    tokens_per_second: float
    layer_times: _containers.RepeatedCompositeFieldContainer[LayerTime]
    price_per_hour: float
    whole_model_bytes: int
    minimum_step_seconds: float
    def __init__(self, device: _Optional[str] = ..., device_name: _Optional[str] = ..., device_memory_bytes: _Optional[int] = ..., host_memory_bytes: _Optional[int] = ..., cpu_threads: _Optional[int] = ..., atoll_version: _Optional[str] = ..., tokens_per_second: _Optional[float] = ..., layer_times: _Optional[_Iterable[_Union[LayerTime, _Mapping]]] = ..., price_per_hour: _Optional[float] = ..., whole_model_bytes: _Optional[int] = ..., minimum_step_seconds: _Optional[float] = ...) -> None: ...

class SpanTime(_message.Message):
    __slots__ = ("layers", "seconds_per_token")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    layers: _plan_pb2.Span
    seconds_per_token: float
    def __init__(self, layers: _Optional[_Union[_plan_pb2.Span, _Mapping]] = ..., seconds_per_token: _Optional[float] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("state", "steps", "tokens", "tokens_per_second", "step_seconds", "train_loss", "head_round", "head_hash", "plan_version", "averaging_bytes_sent", "averaging_bytes_fp32", "other_bytes_sent", "data_stall_seconds", "detail", "rounds_joined", "samples_repeated", "uplink_bytes_per_second", "prepared", "prepared_round", "refused", "lost_layers", "downlink_bytes_per_second", "clock_offset_seconds", "computed", "missing_stage", "data_stall_share", "data_bytes_fetched", "data_bytes_trained", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOSS_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    AVERAGING_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    AVERAGING_BYTES_FP32_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    DATA_STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_JOINED_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_REPEATED_FIELD_NUMBER: _ClassVar[int]
    UPLINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    PREPARED_FIELD_NUMBER: _ClassVar[int]
    PREPARED_ROUND_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOST_LAYERS_FIELD_NUMBER: _ClassVar[int]
    DOWNLINK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    CLOCK_OFFSET_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    MISSING_STAGE_FIELD_NUMBER: _ClassVar[int]
    DATA_STALL_SHARE_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FETCHED_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_TRAINED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: NodeState
    steps: int
    tokens: int
    tokens_per_second: float
    step_seconds: float
    train_loss: float
    head_round: int
    head_hash: bytes
    plan_version: int
    averaging_bytes_sent: int
    averaging_bytes_fp32: int
    other_bytes_sent: int
    data_stall_seconds: float
    detail: str
    rounds_joined: int
    samples_repeated: int
    uplink_bytes_per_second: float
    prepared: _plan_pb2.Span
    prepared_round: int
    refused: _plan_pb2.Span
    lost_layers: _containers.RepeatedScalarFieldContainer[int]
    downlink_bytes_per_second: float
    clock_offset_seconds: float
    computed: SpanTime
    missing_stage: str
    data_stall_share: float
    data_bytes_fetched: int
    data_bytes_trained: int
    reason: NodeReason
    def __init__(self, state: _Optional[_Union[NodeState, str]] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ..., step_seconds: _Optional[float] = ..., train_loss: _Optional[float] = ..., head_round: _Optional[int] = ..., head_hash: _Optional[bytes] = ..., plan_version: _Optional[int] = ..., averaging_bytes_sent: _Optional[int] = ..., averaging_bytes_fp32: _Optional[int] = ..., other_bytes_sent: _Optional[int] = ..., data_stall_seconds: _Optional[float] = ..., detail: _Optional[str] = ..., rounds_joined: _Optional[int] = ..., samples_repeated: _Optional[int] = ..., uplink_bytes_per_second: _Optional[float] = ..., prepared: _Optional[_Union[_plan_pb2.Span, _Mapping]] = ..., prepared_round: _Optional[int] = ..., refused: _Optional[_Union[_plan_pb2.Span, _Mapping]] = ..., lost_layers: _Optional[_Iterable[int]] = ..., downlink_bytes_per_second: _Optional[float] = ..., clock_offset_seconds: _Optional[float] = ..., computed: _Optional[_Union[SpanTime, _Mapping]] = ..., missing_stage: _Optional[str] = ..., data_stall_share: _Optional[float] = ..., data_bytes_fetched: _Optional[int] = ..., data_bytes_trained: _Optional[int] = ..., reason: _Optional[_Union[NodeReason, str]] = ...) -> None: ...

class RoundReport(_message.Message):
    __slots__ = ("round", "committed", "reason", "manifest", "seconds", "wire_bytes")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    WIRE_BYTES_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    committed: bool
    reason: str
    manifest: _manifest_pb2.CommittedManifest
    seconds: float
    wire_bytes: int
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., committed: _Optional[bool] = ..., reason: _Optional[str] = ..., manifest: _Optional[_Union[_manifest_pb2.CommittedManifest, _Mapping]] = ..., seconds: _Optional[float] = ..., wire_bytes: _Optional[int] = ...) -> None: ...

class EvaluationReport(_message.Message):
    __slots__ = ("round", "loss", "committed_tokens", "sources")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    round: int
    loss: float
    committed_tokens: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceLoss]
    def __init__(self, round: _Optional[int] = ..., loss: _Optional[float] = ..., committed_tokens: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceLoss, _Mapping]]] = ...) -> None: ...

class SourceLoss(_message.Message):
    __slots__ = ("name", "loss", "windows", "tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    loss: float
    windows: int
    tokens: int
    def __init__(self, name: _Optional[str] = ..., loss: _Optional[float] = ..., windows: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class TrainingAudit(_message.Message):
    __slots__ = ("round", "contributor", "given", "score", "own_gain", "other_gain", "samples", "reason")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    OWN_GAIN_FIELD_NUMBER: _ClassVar[int]
    OTHER_GAIN_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    round: int
    contributor: str
    given: bool
    score: float
    own_gain: float
    other_gain: float
    samples: int
    reason: str
    def __init__(self, round: _Optional[int] = ..., contributor: _Optional[str] = ..., given: _Optional[bool] = ..., score: _Optional[float] = ..., own_gain: _Optional[float] = ..., other_gain: _Optional[float] = ..., samples: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class NodeMetrics(_message.Message):
    __slots__ = ("round", "train_loss", "learning_rate", "tokens", "seconds", "update_norm", "compute_seconds", "stall_seconds", "exchange_seconds", "bytes_sent", "bytes_received")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TRAIN_LOSS_FIELD_NUMBER: _ClassVar[int]
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    UPDATE_NORM_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXCHANGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    round: int
    train_loss: float
    learning_rate: float
    tokens: int
    seconds: float
    update_norm: float
    compute_seconds: float
    stall_seconds: float
    exchange_seconds: float
    bytes_sent: int
    bytes_received: int
    def __init__(self, round: _Optional[int] = ..., train_loss: _Optional[float] = ..., learning_rate: _Optional[float] = ..., tokens: _Optional[int] = ..., seconds: _Optional[float] = ..., update_norm: _Optional[float] = ..., compute_seconds: _Optional[float] = ..., stall_seconds: _Optional[float] = ..., exchange_seconds: _Optional[float] = ..., bytes_sent: _Optional[int] = ..., bytes_received: _Optional[int] = ...) -> None: ...

class GenesisReport(_message.Message):
    __slots__ = ("layers", "manifest", "refusal", "refusal_detail", "source_manifest")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_DETAIL_FIELD_NUMBER: _ClassVar[int]
    SOURCE_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    layers: _plan_pb2.LayerTable
    manifest: _manifest_pb2.CommittedManifest
    refusal: ForkRefusal
    refusal_detail: str
    source_manifest: bytes
    def __init__(self, layers: _Optional[_Union[_plan_pb2.LayerTable, _Mapping]] = ..., manifest: _Optional[_Union[_manifest_pb2.CommittedManifest, _Mapping]] = ..., refusal: _Optional[_Union[ForkRefusal, str]] = ..., refusal_detail: _Optional[str] = ..., source_manifest: _Optional[bytes] = ...) -> None: ...

class FormerCheckpoint(_message.Message):
    __slots__ = ("run_id", "checkpoint")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    checkpoint: CheckpointInfo
    def __init__(self, run_id: _Optional[str] = ..., checkpoint: _Optional[_Union[CheckpointInfo, _Mapping]] = ...) -> None: ...

class Promise(_message.Message):
    __slots__ = ("round", "plan_version", "attempt", "voted")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    VOTED_FIELD_NUMBER: _ClassVar[int]
    round: int
    plan_version: int
    attempt: int
    voted: bool
    def __init__(self, round: _Optional[int] = ..., plan_version: _Optional[int] = ..., attempt: _Optional[int] = ..., voted: _Optional[bool] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("sequence", "profile", "status", "multiaddrs", "rounds", "evaluations", "genesis", "corpus_digest", "checkpoints", "checkpoints_changed", "paths", "deny_list", "layers", "manifests", "instance", "challenge_answer", "promised", "training_audits", "metrics", "run_id", "stays_in_run", "former_checkpoints")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    MULTIADDRS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    GENESIS_FIELD_NUMBER: _ClassVar[int]
    CORPUS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINTS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    PATHS_FIELD_NUMBER: _ClassVar[int]
    DENY_LIST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_ANSWER_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    TRAINING_AUDITS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STAYS_IN_RUN_FIELD_NUMBER: _ClassVar[int]
    FORMER_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    profile: NodeProfile
    status: NodeStatus
    multiaddrs: _containers.RepeatedScalarFieldContainer[str]
    rounds: _containers.RepeatedCompositeFieldContainer[RoundReport]
    evaluations: _containers.RepeatedCompositeFieldContainer[EvaluationReport]
    genesis: GenesisReport
    corpus_digest: str
    checkpoints: _containers.RepeatedCompositeFieldContainer[CheckpointInfo]
    checkpoints_changed: bool
    paths: _containers.RepeatedCompositeFieldContainer[PeerPath]
    deny_list: _common_pb2.Signed
    layers: _plan_pb2.LayerTable
    manifests: ManifestAnswer
    instance: bytes
    challenge_answer: bytes
    promised: Promise
    training_audits: _containers.RepeatedCompositeFieldContainer[TrainingAudit]
    metrics: _containers.RepeatedCompositeFieldContainer[NodeMetrics]
    run_id: str
    stays_in_run: bool
    former_checkpoints: _containers.RepeatedCompositeFieldContainer[FormerCheckpoint]
    def __init__(self, sequence: _Optional[int] = ..., profile: _Optional[_Union[NodeProfile, _Mapping]] = ..., status: _Optional[_Union[NodeStatus, _Mapping]] = ..., multiaddrs: _Optional[_Iterable[str]] = ..., rounds: _Optional[_Iterable[_Union[RoundReport, _Mapping]]] = ..., evaluations: _Optional[_Iterable[_Union[EvaluationReport, _Mapping]]] = ..., genesis: _Optional[_Union[GenesisReport, _Mapping]] = ..., corpus_digest: _Optional[str] = ..., checkpoints: _Optional[_Iterable[_Union[CheckpointInfo, _Mapping]]] = ..., checkpoints_changed: _Optional[bool] = ..., paths: _Optional[_Iterable[_Union[PeerPath, _Mapping]]] = ..., deny_list: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., layers: _Optional[_Union[_plan_pb2.LayerTable, _Mapping]] = ..., manifests: _Optional[_Union[ManifestAnswer, _Mapping]] = ..., instance: _Optional[bytes] = ..., challenge_answer: _Optional[bytes] = ..., promised: _Optional[_Union[Promise, _Mapping]] = ..., training_audits: _Optional[_Iterable[_Union[TrainingAudit, _Mapping]]] = ..., metrics: _Optional[_Iterable[_Union[NodeMetrics, _Mapping]]] = ..., run_id: _Optional[str] = ..., stays_in_run: _Optional[bool] = ..., former_checkpoints: _Optional[_Iterable[_Union[FormerCheckpoint, _Mapping]]] = ...) -> None: ...

class ManifestRequest(_message.Message):
    __slots__ = ("first", "count")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    first: int
    count: int
    def __init__(self, first: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class ManifestAnswer(_message.Message):
    __slots__ = ("first", "manifests")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    first: int
    manifests: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.CommittedManifest]
    def __init__(self, first: _Optional[int] = ..., manifests: _Optional[_Iterable[_Union[_manifest_pb2.CommittedManifest, _Mapping]]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("tokens", "rounds", "rank", "nodes")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    rounds: int
    rank: int
    nodes: int
    def __init__(self, tokens: _Optional[int] = ..., rounds: _Optional[int] = ..., rank: _Optional[int] = ..., nodes: _Optional[int] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("acknowledged_sequence", "run_state", "plan", "layers", "genesis", "deny_list", "order", "seeds", "uploads", "unix_ms", "prepare", "notice", "known_round", "manifests", "challenge", "promised", "eta_unix_ms", "authorities", "checkpoint_round", "kept_rounds", "run_created_unix_ms", "credit")
    ACKNOWLEDGED_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    GENESIS_FIELD_NUMBER: _ClassVar[int]
    DENY_LIST_FIELD_NUMBER: _ClassVar[int]
    ORDER_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    UPLOADS_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PREPARE_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    KNOWN_ROUND_FIELD_NUMBER: _ClassVar[int]
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    CHALLENGE_FIELD_NUMBER: _ClassVar[int]
    PROMISED_FIELD_NUMBER: _ClassVar[int]
    ETA_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_ROUND_FIELD_NUMBER: _ClassVar[int]
    KEPT_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    RUN_CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    acknowledged_sequence: int
    run_state: RunState
    plan: _common_pb2.Signed
    layers: _plan_pb2.LayerTable
    genesis: _manifest_pb2.CommittedManifest
    deny_list: _common_pb2.Signed
    order: Order
    seeds: _containers.RepeatedScalarFieldContainer[str]
    uploads: _containers.RepeatedCompositeFieldContainer[UploadOrder]
    unix_ms: int
    prepare: _plan_pb2.Span
    notice: str
    known_round: int
    manifests: ManifestRequest
    challenge: bytes
    promised: Promise
    eta_unix_ms: int
    authorities: _common_pb2.Signed
    checkpoint_round: int
    kept_rounds: _containers.RepeatedScalarFieldContainer[int]
    run_created_unix_ms: int
    credit: Credit
    def __init__(self, acknowledged_sequence: _Optional[int] = ..., run_state: _Optional[_Union[RunState, str]] = ..., plan: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., layers: _Optional[_Union[_plan_pb2.LayerTable, _Mapping]] = ..., genesis: _Optional[_Union[_manifest_pb2.CommittedManifest, _Mapping]] = ..., deny_list: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., order: _Optional[_Union[Order, str]] = ..., seeds: _Optional[_Iterable[str]] = ..., uploads: _Optional[_Iterable[_Union[UploadOrder, _Mapping]]] = ..., unix_ms: _Optional[int] = ..., prepare: _Optional[_Union[_plan_pb2.Span, _Mapping]] = ..., notice: _Optional[str] = ..., known_round: _Optional[int] = ..., manifests: _Optional[_Union[ManifestRequest, _Mapping]] = ..., challenge: _Optional[bytes] = ..., promised: _Optional[_Union[Promise, _Mapping]] = ..., eta_unix_ms: _Optional[int] = ..., authorities: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., checkpoint_round: _Optional[int] = ..., kept_rounds: _Optional[_Iterable[int]] = ..., run_created_unix_ms: _Optional[int] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ...) -> None: ...

class VoteRequest(_message.Message):
    __slots__ = ("round", "proposal")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    proposal: bytes
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., proposal: _Optional[bytes] = ...) -> None: ...

class VoteResponse(_message.Message):
    __slots__ = ("granted", "promised_plan_version", "promised_attempt", "accepted_ballot", "accepted_proposal", "vote", "reason")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    PROMISED_PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROMISED_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BALLOT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    promised_plan_version: int
    promised_attempt: int
    accepted_ballot: _common_pb2.RoundId
    accepted_proposal: bytes
    vote: _common_pb2.Signed
    reason: str
    def __init__(self, granted: _Optional[bool] = ..., promised_plan_version: _Optional[int] = ..., promised_attempt: _Optional[int] = ..., accepted_ballot: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., accepted_proposal: _Optional[bytes] = ..., vote: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class CheckpointInfo(_message.Message):
    __slots__ = ("round", "manifest_hash", "bytes", "written_unix_ms", "committed_tokens", "layers")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    round: int
    manifest_hash: bytes
    bytes: int
    written_unix_ms: int
    committed_tokens: int
    layers: _plan_pb2.Span
    def __init__(self, round: _Optional[int] = ..., manifest_hash: _Optional[bytes] = ..., bytes: _Optional[int] = ..., written_unix_ms: _Optional[int] = ..., committed_tokens: _Optional[int] = ..., layers: _Optional[_Union[_plan_pb2.Span, _Mapping]] = ...) -> None: ...

class UploadOrder(_message.Message):
    __slots__ = ("ticket", "round")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    round: int
    def __init__(self, ticket: _Optional[bytes] = ..., round: _Optional[int] = ...) -> None: ...

class CheckpointFile(_message.Message):
    __slots__ = ("name", "bytes", "sha256")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    name: str
    bytes: int
    sha256: bytes
    def __init__(self, name: _Optional[str] = ..., bytes: _Optional[int] = ..., sha256: _Optional[bytes] = ...) -> None: ...

class CheckpointUpload(_message.Message):
    __slots__ = ("opening", "data", "part")
    OPENING_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    opening: CheckpointOpening
    data: bytes
    part: int
    def __init__(self, opening: _Optional[_Union[CheckpointOpening, _Mapping]] = ..., data: _Optional[bytes] = ..., part: _Optional[int] = ...) -> None: ...

class CheckpointOpening(_message.Message):
    __slots__ = ("ticket", "round", "manifest", "files", "refusal", "parts")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    round: int
    manifest: _manifest_pb2.CommittedManifest
    files: _containers.RepeatedCompositeFieldContainer[CheckpointFile]
    refusal: str
    parts: int
    def __init__(self, ticket: _Optional[bytes] = ..., round: _Optional[int] = ..., manifest: _Optional[_Union[_manifest_pb2.CommittedManifest, _Mapping]] = ..., files: _Optional[_Iterable[_Union[CheckpointFile, _Mapping]]] = ..., refusal: _Optional[str] = ..., parts: _Optional[int] = ...) -> None: ...

class CheckpointUploadResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("reason", "instance", "why")
    REASON_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    reason: str
    instance: bytes
    why: NodeReason
    def __init__(self, reason: _Optional[str] = ..., instance: _Optional[bytes] = ..., why: _Optional[_Union[NodeReason, str]] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StandingRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StandingResponse(_message.Message):
    __slots__ = ("run_state", "draining", "corpus_digest", "layers", "head_round")
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CORPUS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROUND_FIELD_NUMBER: _ClassVar[int]
    run_state: RunState
    draining: bool
    corpus_digest: str
    layers: _plan_pb2.LayerTable
    head_round: int
    def __init__(self, run_state: _Optional[_Union[RunState, str]] = ..., draining: _Optional[bool] = ..., corpus_digest: _Optional[str] = ..., layers: _Optional[_Union[_plan_pb2.LayerTable, _Mapping]] = ..., head_round: _Optional[int] = ...) -> None: ...
