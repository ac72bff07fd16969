"""This node's status at the coordinator, by one request that changes nothing there."""

from __future__ import annotations

from datetime import timedelta

import grpc

from atoll.core.errors import InvalidTransition
from atoll.core.grpc_errors import from_rpc_error
from atoll.core.identity import fingerprint
from atoll.core.run_spec import parse_run_spec
from atoll.node.control.channel import dial
from atoll.node.control.credentials import Credentials
from atoll.node.control.run_needs import RunNeeds, checked_digest, checked_layers
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import membership_pb2_grpc

_TIMEOUT = timedelta(seconds=10)


async def ask_standing(credentials: Credentials) -> mb.StandingResponse:
    """Ask the coordinator. Raises `Banned`, `IdentityReplaced`, `Unreachable`, and `InvalidTransition` for a run that
    was stopped.
    """
    try:
        async with dial(credentials) as channel:
            stub = membership_pb2_grpc.MembershipServiceStub(channel)
            response: mb.StandingResponse = await stub.Standing(mb.StandingRequest(), timeout=_TIMEOUT.total_seconds())
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error, f"the coordinator at {credentials.coordinator}") from error
    if response.run_state == mb.RUN_STATE_STOPPED:
        raise InvalidTransition(
            f"the operator stopped the run {credentials.run_id}", "ask your operator for a token of another run"
        )
    return response


def needs_of_member(credentials: Credentials, standing: mb.StandingResponse | None, unix: float) -> RunNeeds:
    """Requirements of a joined node's run; without `standing`, from the node's own files.

    Raises the errors of its parts.
    """
    known = standing or mb.StandingResponse()
    return RunNeeds(
        run_id=credentials.run_id,
        spec_toml=credentials.run_spec_toml,
        spec=parse_run_spec(credentials.run_spec_toml, f"the spec of run {credentials.run_id}"),
        roles=credentials.member(unix).roles,
        coordinator=credentials.coordinator,
        operator=fingerprint(credentials.operator_key),
        state=known.run_state,
        layers=checked_layers(known.layers) if known.HasField("layers") else None,
        corpus_digest=checked_digest(known.corpus_digest),
        head_round=known.head_round,
    )
