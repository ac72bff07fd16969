"""`AdminService`, the operator's gRPC service.

A thin layer: each call is one step of a state machine, or one read of the state or the store. Calls about nodes, runs
and records are in other files of this package.
"""

# ruff: noqa: N802 - gRPC dictates the names of the methods

from __future__ import annotations

from atoll.coordinator.runs import admission
from atoll.coordinator.services import views
from atoll.coordinator.services.admin_calls import Context
from atoll.coordinator.services.admin_nodes import NodeCalls
from atoll.coordinator.services.admin_records import RecordCalls
from atoll.coordinator.services.admin_runs import RunCalls
from atoll.core.errors import InvalidRequest
from atoll.core.membership import ROLE_NAMES
from atoll.core.tokens import hash_secret, new_join_token
from atoll.v1 import admin_pb2 as wire


class AdminService(NodeCalls, RunCalls, RecordCalls):
    """One method per RPC of `admin.proto`. This class adds the RPCs about tokens and certificate authorities."""

    async def CreateToken(self, request: wire.CreateTokenRequest, context: Context) -> wire.CreateTokenResponse:
        """Create a token with a fresh secret; only the secret's hash is stored."""
        text = new_join_token(self._keys.ca.sha256, self._public_endpoint)
        wanted = admission.TokenRequest(
            token_id=text.token_id,
            secret_hash=hash_secret(text.secret),
            run_id=request.run_id,
            uses=request.uses,
            ttl_seconds=request.ttl_seconds,
            roles=tuple(_role_name(role) for role in request.roles),
            on_probation=request.on_probation,
        )
        token = await self._controller.do(lambda state, now: admission.create_token(state, now, wanted))
        return wire.CreateTokenResponse(token=text.text(), view=views.token_view(token))

    async def ListTokens(self, request: wire.ListTokensRequest, context: Context) -> wire.ListTokensResponse:
        """All tokens, the newest first."""
        tokens = sorted(self._controller.state.tokens.values(), key=lambda token: -token.created_ms)
        return wire.ListTokensResponse(tokens=[views.token_view(token) for token in tokens])

    async def RevokeToken(self, request: wire.RevokeTokenRequest, context: Context) -> wire.RevokeTokenResponse:
        """Revoke a token by id."""
        token = await self._controller.do(lambda state, now: admission.revoke_token(state, now, request.id))
        return wire.RevokeTokenResponse(view=views.token_view(token))

    async def GetAuthorities(self, request: wire.GetAuthoritiesRequest, context: Context) -> wire.AuthoritiesView:
        """The trusted certificate authorities."""
        return self._authorities.view()

    async def RotateAuthority(self, request: wire.RotateAuthorityRequest, context: Context) -> wire.AuthoritiesView:
        """Introduce a new certificate authority."""
        return await self._authorities.rotate(request.overlap_seconds)

    async def RetireAuthority(self, request: wire.RetireAuthorityRequest, context: Context) -> wire.AuthoritiesView:
        """End trust in the old authority now."""
        return await self._authorities.retire(force=request.force)


def _role_name(role: int) -> str:
    names = {int(number): name for number, name in ROLE_NAMES.items()}
    if role not in names:
        raise InvalidRequest(f"role is {role}; must be one of {', '.join(map(str, sorted(names)))}")
    return names[role]
