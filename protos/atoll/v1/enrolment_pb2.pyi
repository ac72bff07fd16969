from atoll.v1 import common_pb2 as _common_pb2
from atoll.v1 import membership_pb2 as _membership_pb2
from atoll.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PreviewRequest(_message.Message):
    __slots__ = ("protocol", "token_id", "token_secret", "identity_public_key", "node_unix_ms", "node_name")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECRET_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    NODE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.ProtocolVersion
    token_id: str
    token_secret: str
    identity_public_key: bytes
    node_unix_ms: int
    node_name: str
    def __init__(self, protocol: _Optional[_Union[_common_pb2.ProtocolVersion, _Mapping]] = ..., token_id: _Optional[str] = ..., token_secret: _Optional[str] = ..., identity_public_key: _Optional[bytes] = ..., node_unix_ms: _Optional[int] = ..., node_name: _Optional[str] = ...) -> None: ...

class PreviewResponse(_message.Message):
    __slots__ = ("run_id", "run_spec_toml", "roles", "run_state", "layers", "corpus_digest", "head_round", "operator_public_key")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_SPEC_TOML_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    RUN_STATE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    CORPUS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HEAD_ROUND_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    run_spec_toml: str
    roles: _containers.RepeatedScalarFieldContainer[_common_pb2.Role]
    run_state: _membership_pb2.RunState
    layers: _plan_pb2.LayerTable
    corpus_digest: str
    head_round: int
    operator_public_key: bytes
    def __init__(self, run_id: _Optional[str] = ..., run_spec_toml: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[_common_pb2.Role, str]]] = ..., run_state: _Optional[_Union[_membership_pb2.RunState, str]] = ..., layers: _Optional[_Union[_plan_pb2.LayerTable, _Mapping]] = ..., corpus_digest: _Optional[str] = ..., head_round: _Optional[int] = ..., operator_public_key: _Optional[bytes] = ...) -> None: ...

class EnrolRequest(_message.Message):
    __slots__ = ("protocol", "token_id", "token_secret", "csr_der", "identity_public_key", "csr_signature", "node_name", "node_unix_ms")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SECRET_FIELD_NUMBER: _ClassVar[int]
    CSR_DER_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    CSR_SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.ProtocolVersion
    token_id: str
    token_secret: str
    csr_der: bytes
    identity_public_key: bytes
    csr_signature: bytes
    node_name: str
    node_unix_ms: int
    def __init__(self, protocol: _Optional[_Union[_common_pb2.ProtocolVersion, _Mapping]] = ..., token_id: _Optional[str] = ..., token_secret: _Optional[str] = ..., csr_der: _Optional[bytes] = ..., identity_public_key: _Optional[bytes] = ..., csr_signature: _Optional[bytes] = ..., node_name: _Optional[str] = ..., node_unix_ms: _Optional[int] = ...) -> None: ...

class EnrolResponse(_message.Message):
    __slots__ = ("certificate_chain_pem", "membership", "operator_public_key", "deny_list", "seeds", "run_spec_toml", "membership_endpoint", "run_id", "authorities", "run_created_unix_ms")
    CERTIFICATE_CHAIN_PEM_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    OPERATOR_PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    DENY_LIST_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    RUN_SPEC_TOML_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AUTHORITIES_FIELD_NUMBER: _ClassVar[int]
    RUN_CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    certificate_chain_pem: bytes
    membership: _common_pb2.Signed
    operator_public_key: bytes
    deny_list: _common_pb2.Signed
    seeds: _containers.RepeatedScalarFieldContainer[str]
    run_spec_toml: str
    membership_endpoint: str
    run_id: str
    authorities: _common_pb2.Signed
    run_created_unix_ms: int
    def __init__(self, certificate_chain_pem: _Optional[bytes] = ..., membership: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., operator_public_key: _Optional[bytes] = ..., deny_list: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., seeds: _Optional[_Iterable[str]] = ..., run_spec_toml: _Optional[str] = ..., membership_endpoint: _Optional[str] = ..., run_id: _Optional[str] = ..., authorities: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., run_created_unix_ms: _Optional[int] = ...) -> None: ...
