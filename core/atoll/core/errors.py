"""The tree of errors that users, operators and peers see.

Each class has a process exit code (sysexits) and a gRPC status, so that the mapping is in one place. A message says
what happened and what it means. `remedy` says what to do; front ends print it on its own line. The class name is sent
over the wire as `reason`.
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
    RETRY = 75  # nothing is wrong on this side; try again later
    REJECTED = 77  # token, certificate or membership refused
    CONFIG = 78  # configuration, data or key is unusable


class AtollError(Exception):
    """Root of all errors. `str()` is one sentence; `remedy` says what the user can do."""

    exit_code: ClassVar[ExitCode] = ExitCode.FAILURE
    grpc_status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.remedy = remedy

    @property
    def reason(self) -> str:
        """The class name, a stable identifier for programs."""
        return type(self).__name__


# --- user input -----------------------------------------------------------------------------------


class UsageError(AtollError):
    """The command was called with wrong arguments."""

    exit_code = ExitCode.USAGE
    grpc_status = "INVALID_ARGUMENT"


class ConfigError(AtollError):
    """A configuration file, environment variable or flag has an unusable value."""

    exit_code = ExitCode.CONFIG
    grpc_status = "INVALID_ARGUMENT"


class RunSpecError(ConfigError):
    """The run spec is not valid."""


class BuildSpecError(ConfigError):
    """The spec of `atoll data build` is not valid."""


class CorpusError(ConfigError):
    """The training text is missing, empty, binary, or damaged."""


class CorpusDiffers(CorpusError):
    """The training text is usable, but it is not the run's."""


class PretrainedWeightsUnusable(ConfigError):
    """The pretrained weights are missing, or differ from the run's."""


class ModelTooLarge(ConfigError):
    """The model does not fit this device."""


class UnsupportedModel(ConfigError):
    """Atoll cannot split this architecture into layers."""


class TaskUnusable(ConfigError):
    """A task of `atoll eval` cannot be loaded or run."""


class PlanInputInvalid(ConfigError):
    """The planner's input contradicts itself or has a value that is not a number."""


class NoFeasiblePlan(ConfigError):
    """No plan places this model on these machines under these conditions."""


# --- files on this machine ------------------------------------------------------------------------


class StateError(AtollError):
    """Files in the data directory cannot be used."""

    exit_code = ExitCode.CONFIG


class DataDirUnusable(StateError):
    """The data directory cannot be written, or the disk is full."""


class KeyFileCorrupt(StateError):
    """A private key file is incomplete or is not one that atoll wrote."""


class DatabaseCorrupt(StateError):
    """The coordinator's database cannot be opened."""


class DatabaseMissing(StateError):
    """The coordinator's keys exist but its database does not."""


class BackupCorrupt(StateError):
    """The file is not an intact archive made by `atoll-coordinator backup`."""


class CheckpointCorrupt(StateError):
    """An anchor, momentum or manifest file does not match its digest."""


class AlreadyRunning(StateError):
    """Another daemon uses this data directory."""

    exit_code = ExitCode.RETRY


class PortInUse(AtollError):
    """Another program uses a port that atoll is configured to listen on."""

    exit_code = ExitCode.CONFIG


# --- trust -----------------------------------------------------------------------------------------


class Rejected(AtollError):
    """A peer, token or credential was refused."""

    exit_code = ExitCode.REJECTED
    grpc_status = "UNAUTHENTICATED"


class TokenMalformed(Rejected):
    """The text is not an `atl1.` token."""

    grpc_status = "INVALID_ARGUMENT"


class TokenUnknown(Rejected):
    """No such token, or its secret is wrong."""


class TokenExpired(Rejected):
    """The token has expired."""

    grpc_status = "FAILED_PRECONDITION"


class TokenUsedUp(Rejected):
    """The token has no enrolments left."""

    grpc_status = "FAILED_PRECONDITION"


class TokenRevoked(Rejected):
    """The operator revoked the token."""


class CaMismatch(Rejected):
    """The server's certificate authority is not the one named in the token."""


class AuthorityReplaced(Rejected):
    """The coordinator has a new certificate authority, but this side knows only the old one."""


class ClockSkew(Rejected):
    """The clocks of both sides differ too much to check certificates."""

    grpc_status = "FAILED_PRECONDITION"


class CertificateInvalid(Rejected):
    """A certificate or membership has a wrong signature, subject, operator, run, or time."""


class Banned(Rejected):
    """The peer is on the deny-list."""

    grpc_status = "PERMISSION_DENIED"


class IdentityInUse(Rejected):
    """Another process runs with this node's identity, for example from a copy of its data directory."""

    grpc_status = "FAILED_PRECONDITION"


class IdentityReplaced(Rejected):
    """The node has a new identity (`atoll identity rotate`), so this one is refused."""

    grpc_status = "PERMISSION_DENIED"


class Forgotten(Rejected):
    """The operator removed this node, alone or with its run."""

    grpc_status = "PERMISSION_DENIED"


class NotPermitted(Rejected):
    """The credential lacks the role that this call needs."""

    grpc_status = "PERMISSION_DENIED"


class HelloRequired(Rejected):
    """A peer has not sent a hello on this connection, or the receiver restarted and no longer knows ours."""


class SignatureInvalid(Rejected):
    """A signature does not verify."""


class ProtocolMismatch(Rejected):
    """The other side uses another major version of the protocol."""

    grpc_status = "FAILED_PRECONDITION"


# --- requests to the coordinator ----------------------------------------------------------------------


class NotFound(AtollError):
    """No such run, node, token or plan."""

    grpc_status = "NOT_FOUND"


class AlreadyExists(AtollError):
    """The name is taken."""

    grpc_status = "ALREADY_EXISTS"


class Ambiguous(AtollError):
    """A name that a user typed matches more than one object."""

    exit_code = ExitCode.USAGE
    grpc_status = "FAILED_PRECONDITION"


class InvalidTransition(AtollError):
    """The state of the run or node does not allow this request."""

    grpc_status = "FAILED_PRECONDITION"


class InvalidRequest(AtollError):
    """A request has a field value that a correct client does not send."""

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
    """The other side is busy."""

    exit_code = ExitCode.RETRY
    grpc_status = "RESOURCE_EXHAUSTED"


class PeerMisbehaved(AtollError):
    """A peer sent something that the plan, the round or the protocol does not allow."""

    grpc_status = "INVALID_ARGUMENT"


class FrameInvalid(PeerMisbehaved):
    """A frame has a wrong magic, a length above the limit, or a checksum that does not match."""


class PartInvalid(PeerMisbehaved):
    """A part has a wrong size, codec, count or order, or contains values that are not finite."""


class ArithmeticDiffers(AtollError):
    """This process computes other bits than the members of a run, so its model would differ from theirs."""

    exit_code = ExitCode.CONFIG
    grpc_status = "FAILED_PRECONDITION"


class MessageTooLarge(AtollError):
    """A message of this node exceeds the limit of one frame and was not sent.

    A fault of this program, not of a peer.
    """

    grpc_status = "RESOURCE_EXHAUSTED"


class RoundAbandoned(AtollError):
    """An outer round did not commit. Progress is kept and included in the next attempt."""

    exit_code = ExitCode.RETRY


class FlushAborted(AtollError):
    """A flush of a route was aborted. It counts no tokens, and its micro-batches are repeated."""

    exit_code = ExitCode.RETRY


# --- child processes --------------------------------------------------------------------------------


class ChildDied(AtollError):
    """The trainer or p2pd ended although it was not asked to stop."""

    exit_code = ExitCode.RETRY


class P2pdDied(ChildDied):
    """The program that connects to peers (p2pd) ended although it was not asked to stop."""


class TrainerOutOfMemory(ChildDied):
    """The trainer ended because no more memory was available."""


class WeightsNotFinite(ChildDied):
    """The trainer's weights are not finite: the hardware has errors, or the run diverged."""


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first `AtollError` in a group of task errors, or else the first error of any type."""
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
    """Return the class with that name, or `AtollError` for a name that this version does not know."""
    if not _BY_REASON:
        pending: list[type[AtollError]] = [AtollError]
        while pending:
            cls = pending.pop()
            _BY_REASON[cls.__name__] = cls
            pending.extend(cls.__subclasses__())
    return _BY_REASON.get(reason, AtollError)
