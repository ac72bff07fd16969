from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_NODE: _ClassVar[Role]
    ROLE_SEED: _ClassVar[Role]
    ROLE_ADMIN: _ClassVar[Role]

class Codec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CODEC_UNSPECIFIED: _ClassVar[Codec]
    CODEC_FP32: _ClassVar[Codec]
    CODEC_BF16: _ClassVar[Codec]
    CODEC_FP16: _ClassVar[Codec]
    CODEC_INT8: _ClassVar[Codec]
    CODEC_INT4: _ClassVar[Codec]
    CODEC_INT2: _ClassVar[Codec]
ROLE_UNSPECIFIED: Role
ROLE_NODE: Role
ROLE_SEED: Role
ROLE_ADMIN: Role
CODEC_UNSPECIFIED: Codec
CODEC_FP32: Codec
CODEC_BF16: Codec
CODEC_FP16: Codec
CODEC_INT8: Codec
CODEC_INT4: Codec
CODEC_INT2: Codec

class ProtocolVersion(_message.Message):
    __slots__ = ("major", "minor")
    MAJOR_FIELD_NUMBER: _ClassVar[int]
    MINOR_FIELD_NUMBER: _ClassVar[int]
    major: int
    minor: int
    def __init__(self, major: _Optional[int] = ..., minor: _Optional[int] = ...) -> None: ...

class Signed(_message.Message):
    __slots__ = ("payload", "signature", "public_key")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    signature: bytes
    public_key: bytes
    def __init__(self, payload: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., public_key: _Optional[bytes] = ...) -> None: ...

class Membership(_message.Message):
    __slots__ = ("protocol", "peer_id", "public_key", "operator_id", "run_id", "roles", "epoch", "not_before_unix_ms", "not_after_unix_ms", "node_name", "run_created_unix_ms")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NOT_BEFORE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NOT_AFTER_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    RUN_CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    protocol: ProtocolVersion
    peer_id: str
    public_key: bytes
    operator_id: str
    run_id: str
    roles: _containers.RepeatedScalarFieldContainer[Role]
    epoch: int
    not_before_unix_ms: int
    not_after_unix_ms: int
    node_name: str
    run_created_unix_ms: int
    def __init__(self, protocol: _Optional[_Union[ProtocolVersion, _Mapping]] = ..., peer_id: _Optional[str] = ..., public_key: _Optional[bytes] = ..., operator_id: _Optional[str] = ..., run_id: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., epoch: _Optional[int] = ..., not_before_unix_ms: _Optional[int] = ..., not_after_unix_ms: _Optional[int] = ..., node_name: _Optional[str] = ..., run_created_unix_ms: _Optional[int] = ...) -> None: ...

class DenyList(_message.Message):
    __slots__ = ("operator_id", "number", "peer_ids", "issued_unix_ms")
    OPERATOR_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PEER_IDS_FIELD_NUMBER: _ClassVar[int]
    ISSUED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    operator_id: str
    number: int
    peer_ids: _containers.RepeatedScalarFieldContainer[str]
    issued_unix_ms: int
    def __init__(self, operator_id: _Optional[str] = ..., number: _Optional[int] = ..., peer_ids: _Optional[_Iterable[str]] = ..., issued_unix_ms: _Optional[int] = ...) -> None: ...

class AuthorityList(_message.Message):
    __slots__ = ("operator_id", "number", "certificates_pem")
    OPERATOR_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATES_PEM_FIELD_NUMBER: _ClassVar[int]
    operator_id: str
    number: int
    certificates_pem: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, operator_id: _Optional[str] = ..., number: _Optional[int] = ..., certificates_pem: _Optional[_Iterable[bytes]] = ...) -> None: ...

class IdentityRotation(_message.Message):
    __slots__ = ("statement", "old_signature", "new_signature")
    STATEMENT_FIELD_NUMBER: _ClassVar[int]
    OLD_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    NEW_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    statement: bytes
    old_signature: bytes
    new_signature: bytes
    def __init__(self, statement: _Optional[bytes] = ..., old_signature: _Optional[bytes] = ..., new_signature: _Optional[bytes] = ...) -> None: ...

class RotationStatement(_message.Message):
    __slots__ = ("operator_id", "old_public_key", "new_public_key")
    OPERATOR_ID_FIELD_NUMBER: _ClassVar[int]
    OLD_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NEW_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    operator_id: str
    old_public_key: bytes
    new_public_key: bytes
    def __init__(self, operator_id: _Optional[str] = ..., old_public_key: _Optional[bytes] = ..., new_public_key: _Optional[bytes] = ...) -> None: ...

class SampleRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class RoundId(_message.Message):
    __slots__ = ("run_id", "plan_version", "fragment", "number", "attempt")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    plan_version: int
    fragment: int
    number: int
    attempt: int
    def __init__(self, run_id: _Optional[str] = ..., plan_version: _Optional[int] = ..., fragment: _Optional[int] = ..., number: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("reason", "remedy", "facts")
    class FactsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REASON_FIELD_NUMBER: _ClassVar[int]
    REMEDY_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    remedy: str
    facts: _containers.ScalarMap[str, str]
    def __init__(self, reason: _Optional[str] = ..., remedy: _Optional[str] = ..., facts: _Optional[_Mapping[str, str]] = ...) -> None: ...
