from atoll.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LayerInfo(_message.Message):
    __slots__ = ("name", "parameters", "flops_per_token_forward", "activation_bytes_per_token", "tied_to", "kind", "frozen_parameters", "masked_bytes_per_token")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    FLOPS_PER_TOKEN_FORWARD_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TIED_TO_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FROZEN_PARAMETERS_FIELD_NUMBER: _ClassVar[int]
    MASKED_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    name: str
    parameters: int
    flops_per_token_forward: float
    activation_bytes_per_token: int
    tied_to: _containers.RepeatedScalarFieldContainer[str]
    kind: str
    frozen_parameters: int
    masked_bytes_per_token: int
    def __init__(self, name: _Optional[str] = ..., parameters: _Optional[int] = ..., flops_per_token_forward: _Optional[float] = ..., activation_bytes_per_token: _Optional[int] = ..., tied_to: _Optional[_Iterable[str]] = ..., kind: _Optional[str] = ..., frozen_parameters: _Optional[int] = ..., masked_bytes_per_token: _Optional[int] = ...) -> None: ...

class LayerTable(_message.Message):
    __slots__ = ("layers", "model_hash")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[LayerInfo]
    model_hash: str
    def __init__(self, layers: _Optional[_Iterable[_Union[LayerInfo, _Mapping]]] = ..., model_hash: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("first", "last")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    first: int
    last: int
    def __init__(self, first: _Optional[int] = ..., last: _Optional[int] = ...) -> None: ...

class Assignment(_message.Message):
    __slots__ = ("peer_id", "span", "data_ranges", "max_round_tokens", "max_reduce_bytes_per_second", "on_probation")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    SPAN_FIELD_NUMBER: _ClassVar[int]
    DATA_RANGES_FIELD_NUMBER: _ClassVar[int]
    MAX_ROUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REDUCE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    ON_PROBATION_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    span: Span
    data_ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.SampleRange]
    max_round_tokens: int
    max_reduce_bytes_per_second: int
    on_probation: bool
    def __init__(self, peer_id: _Optional[str] = ..., span: _Optional[_Union[Span, _Mapping]] = ..., data_ranges: _Optional[_Iterable[_Union[_common_pb2.SampleRange, _Mapping]]] = ..., max_round_tokens: _Optional[int] = ..., max_reduce_bytes_per_second: _Optional[int] = ..., on_probation: _Optional[bool] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("peer_ids", "since_version", "number")
    PEER_IDS_FIELD_NUMBER: _ClassVar[int]
    SINCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    peer_ids: _containers.RepeatedScalarFieldContainer[str]
    since_version: int
    number: int
    def __init__(self, peer_ids: _Optional[_Iterable[str]] = ..., since_version: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class Base(_message.Message):
    __slots__ = ("round", "manifest_hash", "since_version", "seats")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    SINCE_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    round: int
    manifest_hash: bytes
    since_version: int
    seats: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, round: _Optional[int] = ..., manifest_hash: _Optional[bytes] = ..., since_version: _Optional[int] = ..., seats: _Optional[_Iterable[str]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("protocol", "run_id", "version", "assignments", "routes", "base", "issued_unix_ms", "reason", "former", "routes_begun")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ASSIGNMENTS_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    ISSUED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FORMER_FIELD_NUMBER: _ClassVar[int]
    ROUTES_BEGUN_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.ProtocolVersion
    run_id: str
    version: int
    assignments: _containers.RepeatedCompositeFieldContainer[Assignment]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    base: Base
    issued_unix_ms: int
    reason: str
    former: _containers.RepeatedScalarFieldContainer[str]
    routes_begun: int
    def __init__(self, protocol: _Optional[_Union[_common_pb2.ProtocolVersion, _Mapping]] = ..., run_id: _Optional[str] = ..., version: _Optional[int] = ..., assignments: _Optional[_Iterable[_Union[Assignment, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., base: _Optional[_Union[Base, _Mapping]] = ..., issued_unix_ms: _Optional[int] = ..., reason: _Optional[str] = ..., former: _Optional[_Iterable[str]] = ..., routes_begun: _Optional[int] = ...) -> None: ...
