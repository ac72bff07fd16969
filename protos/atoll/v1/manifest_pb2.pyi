from atoll.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LayerState(_message.Message):
    __slots__ = ("layer", "round", "anchor_digest", "momentum_digest")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_DIGEST_FIELD_NUMBER: _ClassVar[int]
    layer: int
    round: int
    anchor_digest: bytes
    momentum_digest: bytes
    def __init__(self, layer: _Optional[int] = ..., round: _Optional[int] = ..., anchor_digest: _Optional[bytes] = ..., momentum_digest: _Optional[bytes] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("peer_id", "tokens", "weight", "samples", "present", "mark", "on_probation", "judged_tokens")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    ON_PROBATION_FIELD_NUMBER: _ClassVar[int]
    JUDGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    tokens: int
    weight: int
    samples: int
    present: bool
    mark: bytes
    on_probation: bool
    judged_tokens: int
    def __init__(self, peer_id: _Optional[str] = ..., tokens: _Optional[int] = ..., weight: _Optional[int] = ..., samples: _Optional[int] = ..., present: _Optional[bool] = ..., mark: _Optional[bytes] = ..., on_probation: _Optional[bool] = ..., judged_tokens: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("reducer", "contributor", "parts_left_out", "parts_scaled", "parts_missing")
    REDUCER_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTOR_FIELD_NUMBER: _ClassVar[int]
    PARTS_LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    PARTS_SCALED_FIELD_NUMBER: _ClassVar[int]
    PARTS_MISSING_FIELD_NUMBER: _ClassVar[int]
    reducer: int
    contributor: int
    parts_left_out: int
    parts_scaled: int
    parts_missing: int
    def __init__(self, reducer: _Optional[int] = ..., contributor: _Optional[int] = ..., parts_left_out: _Optional[int] = ..., parts_scaled: _Optional[int] = ..., parts_missing: _Optional[int] = ...) -> None: ...

class DataHolding(_message.Message):
    __slots__ = ("peer_id", "ranges", "pace", "rounds_uncounted")
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_UNCOUNTED_FIELD_NUMBER: _ClassVar[int]
    peer_id: str
    ranges: _containers.RepeatedCompositeFieldContainer[_common_pb2.SampleRange]
    pace: int
    rounds_uncounted: int
    def __init__(self, peer_id: _Optional[str] = ..., ranges: _Optional[_Iterable[_Union[_common_pb2.SampleRange, _Mapping]]] = ..., pace: _Optional[int] = ..., rounds_uncounted: _Optional[int] = ...) -> None: ...

class DataPosition(_message.Message):
    __slots__ = ("cursor", "returned", "holdings", "epoch_samples", "routes_begun")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    HOLDINGS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ROUTES_BEGUN_FIELD_NUMBER: _ClassVar[int]
    cursor: int
    returned: _containers.RepeatedCompositeFieldContainer[_common_pb2.SampleRange]
    holdings: _containers.RepeatedCompositeFieldContainer[DataHolding]
    epoch_samples: int
    routes_begun: int
    def __init__(self, cursor: _Optional[int] = ..., returned: _Optional[_Iterable[_Union[_common_pb2.SampleRange, _Mapping]]] = ..., holdings: _Optional[_Iterable[_Union[DataHolding, _Mapping]]] = ..., epoch_samples: _Optional[int] = ..., routes_begun: _Optional[int] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("protocol", "round", "previous_hash", "contributions", "layers", "codec", "committed_tokens", "data", "parts_total", "parts_zeroed", "corpus_digest", "committed_unix_ms", "verdicts", "fragments", "seats", "coordinator_seat", "audit_seed", "epoch")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_HASH_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    PARTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PARTS_ZEROED_FIELD_NUMBER: _ClassVar[int]
    CORPUS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    FRAGMENTS_FIELD_NUMBER: _ClassVar[int]
    SEATS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_SEAT_FIELD_NUMBER: _ClassVar[int]
    AUDIT_SEED_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.ProtocolVersion
    round: _common_pb2.RoundId
    previous_hash: bytes
    contributions: _containers.RepeatedCompositeFieldContainer[Contribution]
    layers: _containers.RepeatedCompositeFieldContainer[LayerState]
    codec: _common_pb2.Codec
    committed_tokens: int
    data: DataPosition
    parts_total: int
    parts_zeroed: int
    corpus_digest: bytes
    committed_unix_ms: int
    verdicts: _containers.RepeatedCompositeFieldContainer[Verdict]
    fragments: int
    seats: _containers.RepeatedScalarFieldContainer[int]
    coordinator_seat: bool
    audit_seed: bytes
    epoch: int
    def __init__(self, protocol: _Optional[_Union[_common_pb2.ProtocolVersion, _Mapping]] = ..., round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., previous_hash: _Optional[bytes] = ..., contributions: _Optional[_Iterable[_Union[Contribution, _Mapping]]] = ..., layers: _Optional[_Iterable[_Union[LayerState, _Mapping]]] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., committed_tokens: _Optional[int] = ..., data: _Optional[_Union[DataPosition, _Mapping]] = ..., parts_total: _Optional[int] = ..., parts_zeroed: _Optional[int] = ..., corpus_digest: _Optional[bytes] = ..., committed_unix_ms: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[Verdict, _Mapping]]] = ..., fragments: _Optional[int] = ..., seats: _Optional[_Iterable[int]] = ..., coordinator_seat: _Optional[bool] = ..., audit_seed: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class CommittedManifest(_message.Message):
    __slots__ = ("payload", "signatures", "ballot_plan_version", "ballot_attempt")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURES_FIELD_NUMBER: _ClassVar[int]
    BALLOT_PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    BALLOT_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    signatures: _containers.RepeatedCompositeFieldContainer[_common_pb2.Signed]
    ballot_plan_version: int
    ballot_attempt: int
    def __init__(self, payload: _Optional[bytes] = ..., signatures: _Optional[_Iterable[_Union[_common_pb2.Signed, _Mapping]]] = ..., ballot_plan_version: _Optional[int] = ..., ballot_attempt: _Optional[int] = ...) -> None: ...
