"""Announcement to the coordinator that this node ends, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import grpc

from atoll.core import log
from atoll.core.errors import (
    ArithmeticDiffers,
    AtollError,
    AuthorityReplaced,
    Banned,
    ChildDied,
    ConfigError,
    CorpusDiffers,
    CorpusError,
    Forgotten,
    IdentityInUse,
    IdentityReplaced,
    ModelTooLarge,
    P2pdDied,
    PortInUse,
    PretrainedWeightsUnusable,
    Rejected,
    StateError,
    TrainerOutOfMemory,
    Unreachable,
    WeightsNotFinite,
)
from atoll.core.grpc_errors import from_rpc_error
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc

_TIMEOUT = timedelta(seconds=10)
INSTANCE_BYTES = 16  # of the random name of a process
_MAX_CHARACTERS = 500
_REASONS: tuple[tuple[type[AtollError], mb.NodeReason], ...] = (  # subclasses before their parents
    (CorpusDiffers, mb.NODE_REASON_TEXT_DIFFERS),
    (CorpusError, mb.NODE_REASON_TEXT_UNUSABLE),
    (PretrainedWeightsUnusable, mb.NODE_REASON_BASE_UNUSABLE),
    (ModelTooLarge, mb.NODE_REASON_MODEL_TOO_LARGE),
    (TrainerOutOfMemory, mb.NODE_REASON_OUT_OF_MEMORY),
    (WeightsNotFinite, mb.NODE_REASON_DEVICE),
    (ArithmeticDiffers, mb.NODE_REASON_DEVICE),
    (P2pdDied, mb.NODE_REASON_NETWORK),
    (ChildDied, mb.NODE_REASON_TRAINER_DIED),
    (PortInUse, mb.NODE_REASON_NETWORK),
    (Unreachable, mb.NODE_REASON_NETWORK),
    (Rejected, mb.NODE_REASON_REFUSED),
    (StateError, mb.NODE_REASON_DISK),
    (ConfigError, mb.NODE_REASON_SETTINGS),
)
_NOT_ANNOUNCED = (
    AuthorityReplaced,
    Banned,
    Forgotten,
    IdentityInUse,
    IdentityReplaced,
)  # errors that the coordinator itself has sent

_log = log.get("coordinator")


def reason_of(error: BaseException) -> mb.NodeReason:
    """Return the reason to announce when this error ends a node."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), mb.NODE_REASON_INTERNAL)


def announcement(error: BaseException, instance: bytes = b"") -> mb.LeaveRequest | None:
    """Build the announcement of a failure; None if the coordinator knows it.

    Of a bug, only the error's type is sent.
    """
    if isinstance(error, _NOT_ANNOUNCED):
        return None
    told = str(error) if isinstance(error, AtollError) else f"internal error: {type(error).__name__}"
    told = told.replace(str(Path.home()), "~")  # the operator's page shows and stores it
    return mb.LeaveRequest(reason=told[:_MAX_CHARACTERS], instance=instance, why=reason_of(error))


async def announce_end(dial: Callable[[], grpc.aio.Channel], request: mb.LeaveRequest) -> None:
    """Announce the end to the coordinator. If that fails, the coordinator notices the missing heartbeats."""
    try:
        async with dial() as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            await stub.Leave(request, timeout=_TIMEOUT.total_seconds())
    except grpc.aio.AioRpcError as error:
        _log.warning("leave_not_sent", reason=str(from_rpc_error(error, "the coordinator")))
    except (AtollError, ValueError) as error:
        _log.warning("leave_not_sent", reason=str(error))
