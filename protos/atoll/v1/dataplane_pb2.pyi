from atoll.v1 import common_pb2 as _common_pb2
from atoll.v1 import manifest_pb2 as _manifest_pb2
from atoll.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Hello(_message.Message):
    __slots__ = ("protocol", "membership")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MEMBERSHIP_FIELD_NUMBER: _ClassVar[int]
    protocol: _common_pb2.ProtocolVersion
    membership: _common_pb2.Signed
    def __init__(self, protocol: _Optional[_Union[_common_pb2.ProtocolVersion, _Mapping]] = ..., membership: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: str
    message: str
    def __init__(self, reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class TokenReport(_message.Message):
    __slots__ = ("round", "tokens", "leaving", "step_ms", "expected")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    tokens: int
    leaving: bool
    step_ms: int
    expected: bool
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., tokens: _Optional[int] = ..., leaving: _Optional[bool] = ..., step_ms: _Optional[int] = ..., expected: _Optional[bool] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("round", "head_hash", "deadline_ms")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_HASH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    head_hash: bytes
    deadline_ms: int
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., head_hash: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("payload", "attestations")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ATTESTATIONS_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    attestations: _containers.RepeatedCompositeFieldContainer[_common_pb2.Signed]
    def __init__(self, payload: _Optional[bytes] = ..., attestations: _Optional[_Iterable[_Union[_common_pb2.Signed, _Mapping]]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("ballot", "signature", "proposal")
    BALLOT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    ballot: _common_pb2.RoundId
    signature: _common_pb2.Signed
    proposal: Proposal
    def __init__(self, ballot: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., signature: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("round", "tokens", "samples", "accepted", "voter", "holds", "leaving", "mark")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    VOTER_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    MARK_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    tokens: int
    samples: int
    accepted: Accepted
    voter: bool
    holds: _containers.RepeatedScalarFieldContainer[bytes]
    leaving: bool
    mark: bytes
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., tokens: _Optional[int] = ..., samples: _Optional[int] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., voter: _Optional[bool] = ..., holds: _Optional[_Iterable[bytes]] = ..., leaving: _Optional[bool] = ..., mark: _Optional[bytes] = ...) -> None: ...

class Decline(_message.Message):
    __slots__ = ("round", "reason", "plan_version", "attempt")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    reason: str
    plan_version: int
    attempt: int
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., reason: _Optional[str] = ..., plan_version: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class PartRange(_message.Message):
    __slots__ = ("reducer", "start", "end")
    REDUCER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    reducer: str
    start: int
    end: int
    def __init__(self, reducer: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("round", "contributions", "partition", "codec", "elements", "part_elements", "deadline_ms", "unix_ms", "not_reducing")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTIONS_FIELD_NUMBER: _ClassVar[int]
    PARTITION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    PART_ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    NOT_REDUCING_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    contributions: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Contribution]
    partition: _containers.RepeatedCompositeFieldContainer[PartRange]
    codec: _common_pb2.Codec
    elements: int
    part_elements: int
    deadline_ms: int
    unix_ms: int
    not_reducing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., contributions: _Optional[_Iterable[_Union[_manifest_pb2.Contribution, _Mapping]]] = ..., partition: _Optional[_Iterable[_Union[PartRange, _Mapping]]] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., elements: _Optional[int] = ..., part_elements: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., unix_ms: _Optional[int] = ..., not_reducing: _Optional[_Iterable[int]] = ...) -> None: ...

class Parts(_message.Message):
    __slots__ = ("round", "digests", "verdicts", "nonce")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    verdicts: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Verdict]
    nonce: bytes
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., digests: _Optional[_Iterable[bytes]] = ..., verdicts: _Optional[_Iterable[_Union[_manifest_pb2.Verdict, _Mapping]]] = ..., nonce: _Optional[bytes] = ...) -> None: ...

class PartHolders(_message.Message):
    __slots__ = ("part", "members")
    PART_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    part: int
    members: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, part: _Optional[int] = ..., members: _Optional[_Iterable[int]] = ...) -> None: ...

class Settle(_message.Message):
    __slots__ = ("round", "present", "digests", "whole", "repairs", "deadline_ms", "verdicts", "as_reported", "parts_zeroed", "nonces")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    REPAIRS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    AS_REPORTED_FIELD_NUMBER: _ClassVar[int]
    PARTS_ZEROED_FIELD_NUMBER: _ClassVar[int]
    NONCES_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    present: _containers.RepeatedScalarFieldContainer[str]
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    whole: _containers.RepeatedScalarFieldContainer[int]
    repairs: _containers.RepeatedCompositeFieldContainer[PartHolders]
    deadline_ms: int
    verdicts: _containers.RepeatedCompositeFieldContainer[_manifest_pb2.Verdict]
    as_reported: bool
    parts_zeroed: int
    nonces: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., present: _Optional[_Iterable[str]] = ..., digests: _Optional[_Iterable[bytes]] = ..., whole: _Optional[_Iterable[int]] = ..., repairs: _Optional[_Iterable[_Union[PartHolders, _Mapping]]] = ..., deadline_ms: _Optional[int] = ..., verdicts: _Optional[_Iterable[_Union[_manifest_pb2.Verdict, _Mapping]]] = ..., as_reported: _Optional[bool] = ..., parts_zeroed: _Optional[int] = ..., nonces: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Digest(_message.Message):
    __slots__ = ("round", "payload", "attestation")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ATTESTATION_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    payload: bytes
    attestation: _common_pb2.Signed
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., payload: _Optional[bytes] = ..., attestation: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ...) -> None: ...

class Propose(_message.Message):
    __slots__ = ("round", "proposal", "deadline_ms")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    proposal: Proposal
    deadline_ms: int
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Vote(_message.Message):
    __slots__ = ("round", "signature")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    signature: _common_pb2.Signed
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., signature: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("round", "manifest")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    manifest: _manifest_pb2.CommittedManifest
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., manifest: _Optional[_Union[_manifest_pb2.CommittedManifest, _Mapping]] = ...) -> None: ...

class Abandon(_message.Message):
    __slots__ = ("round", "reason")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    reason: str
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class RoundMessage(_message.Message):
    __slots__ = ("report", "open", "ready", "start", "digest", "commit", "abandon", "decline", "parts", "settle", "propose", "plan", "vote")
    REPORT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABANDON_FIELD_NUMBER: _ClassVar[int]
    DECLINE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    VOTE_FIELD_NUMBER: _ClassVar[int]
    report: TokenReport
    open: Open
    ready: Ready
    start: Start
    digest: Digest
    commit: Commit
    abandon: Abandon
    decline: Decline
    parts: Parts
    settle: Settle
    propose: Propose
    plan: _common_pb2.Signed
    vote: Vote
    def __init__(self, report: _Optional[_Union[TokenReport, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., digest: _Optional[_Union[Digest, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abandon: _Optional[_Union[Abandon, _Mapping]] = ..., decline: _Optional[_Union[Decline, _Mapping]] = ..., parts: _Optional[_Union[Parts, _Mapping]] = ..., settle: _Optional[_Union[Settle, _Mapping]] = ..., propose: _Optional[_Union[Propose, _Mapping]] = ..., plan: _Optional[_Union[_common_pb2.Signed, _Mapping]] = ..., vote: _Optional[_Union[Vote, _Mapping]] = ...) -> None: ...

class ExchangeHeader(_message.Message):
    __slots__ = ("round", "repair", "audit_seed", "contribution")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    REPAIR_FIELD_NUMBER: _ClassVar[int]
    AUDIT_SEED_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    round: _common_pb2.RoundId
    repair: _containers.RepeatedScalarFieldContainer[int]
    audit_seed: bytes
    contribution: bool
    def __init__(self, round: _Optional[_Union[_common_pb2.RoundId, _Mapping]] = ..., repair: _Optional[_Iterable[int]] = ..., audit_seed: _Optional[bytes] = ..., contribution: _Optional[bool] = ...) -> None: ...

class PartHeader(_message.Message):
    __slots__ = ("index", "elements", "codec", "factors")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ELEMENTS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    index: int
    elements: int
    codec: _common_pb2.Codec
    factors: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, index: _Optional[int] = ..., elements: _Optional[int] = ..., codec: _Optional[_Union[_common_pb2.Codec, str]] = ..., factors: _Optional[_Iterable[float]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("run_id", "manifest_round", "head_manifest", "anchor", "momentum")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_ROUND_FIELD_NUMBER: _ClassVar[int]
    HEAD_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    manifest_round: int
    head_manifest: bool
    anchor: StateSlice
    momentum: StateSlice
    def __init__(self, run_id: _Optional[str] = ..., manifest_round: _Optional[int] = ..., head_manifest: _Optional[bool] = ..., anchor: _Optional[_Union[StateSlice, _Mapping]] = ..., momentum: _Optional[_Union[StateSlice, _Mapping]] = ...) -> None: ...

class StateSlice(_message.Message):
    __slots__ = ("manifest_hash", "start", "end")
    MANIFEST_HASH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    manifest_hash: bytes
    start: int
    end: int
    def __init__(self, manifest_hash: _Optional[bytes] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class StateReply(_message.Message):
    __slots__ = ("manifest", "body_bytes", "held")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    manifest: _manifest_pb2.CommittedManifest
    body_bytes: int
    held: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Span]
    def __init__(self, manifest: _Optional[_Union[_manifest_pb2.CommittedManifest, _Mapping]] = ..., body_bytes: _Optional[int] = ..., held: _Optional[_Iterable[_Union[_plan_pb2.Span, _Mapping]]] = ...) -> None: ...

class CorpusRequest(_message.Message):
    __slots__ = ("run_id", "path", "start", "stop")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    path: str
    start: int
    stop: int
    def __init__(self, run_id: _Optional[str] = ..., path: _Optional[str] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class CorpusReply(_message.Message):
    __slots__ = ("body_bytes", "file_bytes")
    BODY_BYTES_FIELD_NUMBER: _ClassVar[int]
    FILE_BYTES_FIELD_NUMBER: _ClassVar[int]
    body_bytes: int
    file_bytes: int
    def __init__(self, body_bytes: _Optional[int] = ..., file_bytes: _Optional[int] = ...) -> None: ...

class DirectOffer(_message.Message):
    __slots__ = ("port", "certificate_sha256", "ticket")
    PORT_FIELD_NUMBER: _ClassVar[int]
    CERTIFICATE_SHA256_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    port: int
    certificate_sha256: bytes
    ticket: bytes
    def __init__(self, port: _Optional[int] = ..., certificate_sha256: _Optional[bytes] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class DirectBegin(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: str
    def __init__(self, protocol: _Optional[str] = ...) -> None: ...

class Stripe(_message.Message):
    __slots__ = ("conversation", "index", "protocol")
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    conversation: bytes
    index: int
    protocol: str
    def __init__(self, conversation: _Optional[bytes] = ..., index: _Optional[int] = ..., protocol: _Optional[str] = ...) -> None: ...
