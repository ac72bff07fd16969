from atoll.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DhtRecord(_message.Message):
    __slots__ = ("protocol", "key", "peer_id", "expires_unix_ms", "membership", "address")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PEER_ID_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.ProtocolVersion
    key: str
    peer_id: str
    expires_unix_ms: int
    membership: _common_pb2.Signed
    address: AddressRecord
    def __init__(self, protocol: _Optional[_Union[_common_pb2.ProtocolVersion, _Mapping]] = ..., key: _Optional[str] = ..., peer_id: _Optional[str] = ..., expires_unix_ms: _Optional[int] = ..., membership: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., address: _Optional[_Union[AddressRecord, _Mapping]] = ...) -> None: ...

class AddressRecord(_message.Message):
    __slots__ = ("multiaddrs",)
    MULTIADDRS_FIELD_NUMBER: _ClassVar[int]
    multiaddrs: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, multiaddrs: _Optional[_Iterable[str]] = ...) -> None: ...
