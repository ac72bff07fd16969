"""Every error that a person can meet, in one tree.

Each class names the process exit code (sysexits) and the gRPC status it becomes, so that the mapping is
read in one place. Messages say what happened, what it means, and what to do. `remedy` is the last part;
front ends print it on a line of its own.
"""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar


class ExitCode(IntEnum):
    """Process exit codes that scripts and service managers may rely on."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    UNREACHABLE = 69  # the other side does not answer
    RETRY = 75  # nothing wrong here; try again later
    REJECTED = 77  # token, certificate or membership refused
    CONFIG = 78  # configuration, data or key is unusable


class AtollError(Exception):
    """Root of the tree. `str()` is one sentence; `remedy` is what to do about it."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    @property
    def reason(self) -> str:
        """The class name: stable, for machines."""
        return type(self).__name__


# --- what the user gave us -------------------------------------------------------------------------


class UsageError(AtollError):
    """The command was called wrongly."""

    exit_code = ExitCode.USAGE
    grpc_status = "INVALID_ARGUMENT"


class ConfigError(AtollError):
    """A configuration file, environment variable or flag has a value we cannot use."""

    exit_code = ExitCode.CONFIG
    grpc_status = "INVALID_ARGUMENT"


class RunSpecError(ConfigError):
    """The run spec does not say what a run spec must say."""


class CorpusError(ConfigError):
    """The training text is missing, empty, binary, or not the run's."""


class PretrainedWeightsUnusable(ConfigError):
    """The pretrained weights are missing, or not the run's."""


class ModelTooLarge(ConfigError):
    """The model does not fit this device."""


class UnsupportedModel(ConfigError):
    """The architecture cannot be split into layers by us."""


class PlanInputInvalid(ConfigError):
    """What a plan is to be made from contradicts itself, or is no number where one must be."""


class NoFeasiblePlan(ConfigError):
    """These machines cannot hold this model under these conditions."""


# --- what lies on this machine's disk ----------------------------------------------------------------


class StateError(AtollError):
    """Files in the data directory cannot be used."""

    exit_code = ExitCode.CONFIG


class DataDirUnusable(StateError):
    """The data directory cannot be written, or the disk is full."""


class KeyFileCorrupt(StateError):
    """A private key file is not what we wrote."""


class DatabaseCorrupt(StateError):
    """The coordinator's database cannot be opened."""


class DatabaseMissing(StateError):
    """The coordinator's keys are here and its database is not."""


class BackupCorrupt(StateError):
    """A backup is not what `atoll-coordinator backup` wrote."""


class CheckpointCorrupt(StateError):
    """An anchor, momentum or manifest file does not match its digest."""


class AlreadyRunning(StateError):
    """Another daemon uses this data directory."""

    exit_code = ExitCode.RETRY


class PortInUse(AtollError):
    """A port we were told to listen on is taken."""

    exit_code = ExitCode.CONFIG


# --- trust -----------------------------------------------------------------------------------------


class Rejected(AtollError):
    """Somebody was not admitted."""

    exit_code = ExitCode.REJECTED
    grpc_status = "UNAUTHENTICATED"


class TokenMalformed(Rejected):
    """The text is not an `atl1.` token."""

    grpc_status = "INVALID_ARGUMENT"


class TokenUnknown(Rejected):
    """No such token, or its secret is wrong."""


class TokenExpired(Rejected):
    """The token's time is over."""

    grpc_status = "FAILED_PRECONDITION"


class TokenUsedUp(Rejected):
    """The token has no enrolments left."""

    grpc_status = "FAILED_PRECONDITION"


class TokenRevoked(Rejected):
    """The operator withdrew the token."""


class CaMismatch(Rejected):
    """The server's certificate authority is not the one named in the token."""


class ClockSkew(Rejected):
    """The two clocks are too far apart for certificates to make sense."""

    grpc_status = "FAILED_PRECONDITION"


class CertificateInvalid(Rejected):
    """A certificate or membership has a wrong signature, subject, operator, run, or time."""


class Banned(Rejected):
    """The peer stands on the deny-list."""

    grpc_status = "PERMISSION_DENIED"


class NotPermitted(Rejected):
    """The credential does not carry the role for this call."""

    grpc_status = "PERMISSION_DENIED"


class HelloRequired(Rejected):
    """A peer has not shown its membership on this connection, or ours was lost by a restart: hello first."""


class SignatureInvalid(Rejected):
    """A signature does not verify."""


class ProtocolMismatch(Rejected):
    """The other side speaks another major version of the protocol."""

    grpc_status = "FAILED_PRECONDITION"


# --- the coordinator's words -------------------------------------------------------------------------


class NotFound(AtollError):
    """No such run, node, token or plan."""

    grpc_status = "NOT_FOUND"


class AlreadyExists(AtollError):
    """The name is taken."""

    grpc_status = "ALREADY_EXISTS"


class Ambiguous(AtollError):
    """A name that a person typed means more than one thing."""

    exit_code = ExitCode.USAGE
    grpc_status = "FAILED_PRECONDITION"


class InvalidTransition(AtollError):
    """The run or node is not in a state from which this can be done."""

    grpc_status = "FAILED_PRECONDITION"


class InvalidRequest(AtollError):
    """A request has a field that no correct client sends."""

    exit_code = ExitCode.USAGE
    grpc_status = "INVALID_ARGUMENT"


# --- the network -----------------------------------------------------------------------------------


class Unreachable(AtollError):
    """The other side does not answer."""

    exit_code = ExitCode.UNREACHABLE
    grpc_status = "UNAVAILABLE"


class DeadlineExceeded(Unreachable):
    """The other side did not answer in time."""

    grpc_status = "DEADLINE_EXCEEDED"


class NotRunning(Unreachable):
    """No daemon serves this data directory."""


class Busy(AtollError):
    """The other side has its hands full."""

    exit_code = ExitCode.RETRY
    grpc_status = "RESOURCE_EXHAUSTED"


class PeerMisbehaved(AtollError):
    """A peer sent something that the plan, the round or the protocol does not allow."""

    grpc_status = "INVALID_ARGUMENT"


class FrameInvalid(PeerMisbehaved):
    """A frame has a wrong magic, an impossible length, or a checksum that does not match."""


class PartInvalid(PeerMisbehaved):
    """A part has a wrong size, codec, count or order, or holds values that are not finite."""


class ArithmeticDiffers(AtollError):
    """This process computes other bits than the members of a run must, so its model would differ from theirs."""

    exit_code = ExitCode.CONFIG
    grpc_status = "FAILED_PRECONDITION"


class MessageTooLarge(AtollError):
    """A message of ours exceeds the limit of one frame, so it was not sent. A fault of this program, not of a peer."""

    grpc_status = "RESOURCE_EXHAUSTED"


class RoundAbandoned(AtollError):
    """An outer round did not commit. Progress is kept and enters the next attempt."""

    exit_code = ExitCode.RETRY


class FlushAborted(AtollError):
    """A flush of a route was given up. It counts nothing, and its micro-batches come again."""

    exit_code = ExitCode.RETRY


# --- our own children --------------------------------------------------------------------------------


class ChildDied(AtollError):
    """The trainer or p2pd ended without being asked to."""

    exit_code = ExitCode.RETRY


class WeightsNotFinite(ChildDied):
    """The trainer's weights are of no use any more: its hardware computes wrongly, or the run diverged."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of ours inside a group that tasks raised together, else the first of any kind."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending = [*error.exceptions, *pending]
        else:
            leaves.append(error)
    return next((error for error in leaves if isinstance(error, AtollError)), leaves[0])


_BY_REASON: dict[str, type[AtollError]] = {}


def error_class(reason: str) -> type[AtollError]:
    """The class with that name; `AtollError` for a name that this version does not know."""
    if not _BY_REASON:
        pending: list[type[AtollError]] = [AtollError]
        while pending:
            cls = pending.pop()
            _BY_REASON[cls.__name__] = cls
            pending.extend(cls.__subclasses__())
    return _BY_REASON.get(reason, AtollError)
