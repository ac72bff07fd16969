"""Failed calls come back as errors of the tree, with what to do."""

from __future__ import annotations

import grpc
import pytest

from atoll.core.errors import AtollError, Busy, ExitCode, Unreachable
from atoll.core.grpc_errors import from_rpc_error


def failure(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(code, nothing, nothing, details)


def test_a_busy_server_is_a_reason_to_try_again() -> None:
    error = from_rpc_error(failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!"), "it")
    assert (type(error), error.exit_code) == (Busy, ExitCode.RETRY)
    assert "try again" in error.remedy


@pytest.mark.parametrize(
    ("code", "details", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "no route", Unreachable),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 8)", AtollError),
    ],
)
def test_other_failures_keep_their_kind(code: grpc.StatusCode, details: str, kind: type[AtollError]) -> None:
    assert type(from_rpc_error(failure(code, details), "it")) is kind


@pytest.mark.parametrize(
    ("details", "told"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:7770: "
            "Failed to connect to remote host: connect: Connection refused (111)",
            "it does not answer: Connection refused",
        ),
        ("Socket closed", "it does not answer: Socket closed"),
    ],
)
def test_errors_for_people_omit_grpc_details(details: str, told: str) -> None:
    assert str(from_rpc_error(failure(grpc.StatusCode.UNAVAILABLE, details), "it")) == told
