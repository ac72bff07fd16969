from atoll.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DoubleVote(_message.Message):
    __slots__ = ("public_key", "ballot_plan_version", "ballot_attempt", "first_payload", "first_signature", "second_payload", "second_signature")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    BALLOT_PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    BALLOT_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    FIRST_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    SECOND_PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SECOND_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    ballot_plan_version: int
    ballot_attempt: int
    first_payload: bytes
    first_signature: bytes
    second_payload: bytes
    second_signature: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., ballot_plan_version: _Optional[int] = ..., ballot_attempt: _Optional[int] = ..., first_payload: _Optional[bytes] = ..., first_signature: _Optional[bytes] = ..., second_payload: _Optional[bytes] = ..., second_signature: _Optional[bytes] = ...) -> None: ...

class Proof(_message.Message):
    __slots__ = ("protocol", "double_vote")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    DOUBLE_VOTE_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.ProtocolVersion
    double_vote: DoubleVote
    def __init__(self, protocol: _Optional[_Union[_common_pb2.ProtocolVersion, _Mapping]] = ..., double_vote: _Optional[_Union[DoubleVote, _Mapping]] = ...) -> None: ...
