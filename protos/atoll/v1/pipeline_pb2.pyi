from atoll.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FlushDecision(_message.Message):
    __slots__ = ("incarnation", "flush", "factor", "skipped")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    flush: int
    factor: float
    skipped: bool
    def __init__(self, incarnation: _Optional[int] = ..., flush: _Optional[int] = ..., factor: _Optional[float] = ..., skipped: _Optional[bool] = ...) -> None: ...

class StageJoin(_message.Message):
    __slots__ = ("decided",)
    DECIDED_FIELD_NUMBER: _ClassVar[int]
    decided: FlushDecision
    def __init__(self, decided: _Optional[_Union[FlushDecision, _Mapping]] = ...) -> None: ...

class StageReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushBegin(_message.Message):
    __slots__ = ("micro_batches", "anchor_committed_tokens", "targets")
    MICRO_BATCHES_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    micro_batches: int
    anchor_committed_tokens: int
    targets: int
    def __init__(self, micro_batches: _Optional[int] = ..., anchor_committed_tokens: _Optional[int] = ..., targets: _Optional[int] = ...) -> None: ...

class StageTensor(_message.Message):
    __slots__ = ("micro_batch", "shape", "codec", "not_finite")
    MICRO_BATCH_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    NOT_FINITE_FIELD_NUMBER: _ClassVar[int]
    micro_batch: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    codec: _common_pb2.Codec
    not_finite: bool
    def __init__(self, micro_batch: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., not_finite: _Optional[bool] = ...) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("norms", "loss", "other_anchor")
    NORMS_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OTHER_ANCHOR_FIELD_NUMBER: _ClassVar[int]
    norms: _containers.RepeatedScalarFieldContainer[float]
    loss: float
    other_anchor: bool
    def __init__(self, norms: _Optional[_Iterable[float]] = ..., loss: _Optional[float] = ..., other_anchor: _Optional[bool] = ...) -> None: ...

class FlushVerdict(_message.Message):
    __slots__ = ("factor", "skipped")
    FACTOR_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_FIELD_NUMBER: _ClassVar[int]
    factor: float
    skipped: bool
    def __init__(self, factor: _Optional[float] = ..., skipped: _Optional[bool] = ...) -> None: ...

class StageMessage(_message.Message):
    __slots__ = ("plan_version", "route", "flush", "body_bytes", "incarnation", "begin", "activation", "gradient", "report", "verdict", "tied_gradient", "tied_weights", "join", "ready")
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTE_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    TIED_GRADIENT_FIELD_NUMBER: _ClassVar[int]
    TIED_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    JOIN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    plan_version: int
    route: int
    flush: int
    body_bytes: int
    incarnation: int
    begin: FlushBegin
    activation: StageTensor
    gradient: StageTensor
    report: StageReport
    verdict: FlushVerdict
    tied_gradient: StageTensor
    tied_weights: StageTensor
    join: StageJoin
    ready: StageReady
    def __init__(self, plan_version: _Optional[int] = ..., route: _Optional[int] = ..., flush: _Optional[int] = ..., body_bytes: _Optional[int] = ..., incarnation: _Optional[int] = ..., begin: _Optional[_Union[FlushBegin, _Mapping]] = ..., activation: _Optional[_Union[StageTensor, _Mapping]] = ..., gradient: _Optional[_Union[StageTensor, _Mapping]] = ..., report: _Optional[_Union[StageReport, _Mapping]] = ..., verdict: _Optional[_Union[FlushVerdict, _Mapping]] = ..., tied_gradient: _Optional[_Union[StageTensor, _Mapping]] = ..., tied_weights: _Optional[_Union[StageTensor, _Mapping]] = ..., join: _Optional[_Union[StageJoin, _Mapping]] = ..., ready: _Optional[_Union[StageReady, _Mapping]] = ...) -> None: ...
