"""Errors over gRPC: the server sends a status and an `ErrorDetail`; the client restores the same class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import grpc

from atoll.core import errors
from atoll.v1 import common_pb2 as pb

_DETAIL_KEY = "atoll-error-bin"


def status_of(error: errors.AtollError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    return grpc.StatusCode[error.grpc_status]


def trailing_metadata(error: errors.AtollError) -> tuple[tuple[str, bytes], ...]:
    """Return the trailing metadata with the `ErrorDetail`, sent along with status and message."""
    detail = pb.ErrorDetail(reason=error.reason, remedy=error.remedy)
    return ((_DETAIL_KEY, detail.SerializeToString()),)


def from_rpc_error(error: grpc.RpcError, what: str) -> errors.AtollError:
    """Convert a failed call to an `AtollError`. `what` names the other side ("the coordinator at …")."""
    code: grpc.StatusCode = error.code()
    sentence = str(error.details() or code.name)
    detail = _detail(error.trailing_metadata() or ())
    if detail is not None:
        return errors.error_class(detail.reason)(sentence, detail.remedy)
    if code is grpc.StatusCode.UNAVAILABLE:
        return errors.Unreachable(
            f"{what} does not answer: {_innermost_cause(sentence)}", "check the address, the network and the server"
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return errors.DeadlineExceeded(f"{what} did not answer in time")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" not in sentence:  # else: too large a message
        return errors.Busy(f"{what} is busy: {sentence}", "nothing is wrong here; try again in a minute")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return errors.Rejected(f"{what} refused this request: {sentence}")
    return errors.AtollError(f"{what} failed: {code.name}: {sentence}")


def _innermost_cause(sentence: str) -> str:
    """Extract the cause from gRPC's message: the innermost cause is last, with an errno in brackets."""
    return re.sub(r" \(\d+\)$", "", sentence.rpartition(": ")[2]) or sentence


def _detail(metadata: Sequence[Any]) -> pb.ErrorDetail | None:
    for key, value in metadata:
        if key == _DETAIL_KEY:
            return pb.ErrorDetail.FromString(value)
    return None
