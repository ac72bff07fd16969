"""gRPC interceptor of every call: checks the caller's role and its messages, and turns errors into statuses.

TLS has verified that the caller's certificate is from our CA; the URI in it names the role. A node may call the
membership service, an operator the admin service. A node's messages are bounded before they are parsed, and slowed down
or refused if it sends too many (`call_rates.py`). `AtollError`s are sent with message and remedy. Any other exception
is a bug: it is logged in full and sent as "internal error".
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message
from prometheus_client import Counter

from atoll.coordinator.authorities import Authorities
from atoll.coordinator.call_rates import CallRates
from atoll.core import grpc_errors, log
from atoll.core.certs import subject_uri
from atoll.core.errors import AtollError, AuthorityReplaced, NotPermitted
from atoll.core.message_bounds import message_class, parse_bounded

MAX_ENTRIES = 32_768  # fields in one message of a node; 1 MiB of round reports has some 7,000
NODE_SUBJECT_PREFIX = "atoll://node/"
ADMIN_SUBJECT_PREFIX = "atoll://admin/"
_REQUIRED = {"/atoll.v1.MembershipService/": NODE_SUBJECT_PREFIX, "/atoll.v1.Admin/": ADMIN_SUBJECT_PREFIX}
_OURS = "/atoll.v1."
_ADMIN, _UPLOAD = "/atoll.v1.Admin/", "/atoll.v1.MembershipService/UploadCheckpoint"
Behaviour = Callable[[Any, Any], Awaitable[Any]]  # gRPC's signature: messages of any service
_log = log.get("rpc")


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Checks the caller's role and maps errors. Handlers are coroutines (streams use `context.write`)."""

    def __init__(self, errors: Counter, rates: CallRates, authorities: Authorities) -> None:
        self._errors = errors
        self._rates = rates
        self._authorities = authorities

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap handlers of our services; the health service stays unchanged."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith(_OURS):
            return handler
        kind = None if method.startswith(_ADMIN) else message_class(handler.request_deserializer)
        parse = handler.request_deserializer if kind is None else None  # otherwise gRPC passes bytes
        for shape in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, shape)
            if behaviour is not None:
                build = getattr(grpc, f"{shape}_rpc_method_handler")
                guarded = self._guarded(method, behaviour, kind)
                return build(guarded, parse, handler.response_serializer)
        return handler

    def _guarded(self, method: str, behaviour: Behaviour, kind: type[Message] | None) -> Behaviour:
        required = next((role for prefix, role in _REQUIRED.items() if method.startswith(prefix)), "")

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                peer_id = caller(context, required) if required else ""
                if required:
                    refuse_retired(context, self._authorities)
                member = peer_id if required == NODE_SUBJECT_PREFIX else ""
                if member:
                    self._rates.begin_call(member)
                if kind is not None:
                    paced = "" if method == _UPLOAD else member  # the speed of the operator's download limits uploads
                    request = self._parsed(request, kind, paced)
                return await behaviour(request, context)
            except AtollError as error:
                failure = error
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception:  # supervision: details of the bug must not be sent to the caller
                _log.exception("an rpc failed", method=method)
                failure = AtollError("internal error", "see the coordinator's log")
            self._errors.labels(method.rsplit("/", 1)[1], failure.reason).inc()
            status = grpc_errors.status_of(failure)
            return await context.abort(status, str(failure), grpc_errors.trailing_metadata(failure))

        return call

    def _parsed(self, request: bytes | AsyncIterator[bytes], kind: type[Message], member: str) -> Any:
        """The request's message, or its stream of messages. Raises `PeerMisbehaved` for too many entries."""
        if isinstance(request, bytes):
            return parse_bounded(kind, request, MAX_ENTRIES)
        return self._parsed_stream(request, kind, member)

    async def _parsed_stream(
        self, requests: AsyncIterator[bytes], kind: type[Message], member: str
    ) -> AsyncIterator[Message]:
        """Messages of a stream; the next one is read when the member's allowance permits it."""
        async for data in requests:
            if member:
                self._rates.charge(member, len(data))
            yield parse_bounded(kind, data, MAX_ENTRIES)
            if member:
                await self._rates.wait(member)


def caller(context: grpc.aio.ServicerContext[Any, Any], role: str) -> str:
    """Name after the subject prefix `role` in the client's certificate. Raises `NotPermitted`."""
    pem = _certificate(context)
    subject = subject_uri(pem) if pem else ""
    if not subject.startswith(role):
        raise NotPermitted(
            f"this call needs a certificate for {role}…, not {subject or 'none'}", "use a credential for that role"
        )
    return subject.removeprefix(role)


def issuer(context: grpc.aio.ServicerContext[Any, Any], authorities: Authorities) -> str:
    """Hex SHA-256 of the authority of the client's certificate; empty if it was retired during the connection."""
    return authorities.now.issuer_of(_certificate(context))


def refuse_retired(context: grpc.aio.ServicerContext[Any, Any], authorities: Authorities) -> None:
    """Raise `AuthorityReplaced` if the authority of the client's certificate is no longer trusted."""
    if not issuer(context, authorities):
        raise AuthorityReplaced(
            "the certificate of this client is of a certificate authority that was retired",
            "a node needs a new token (`atoll join`) and keeps its identity; an operator copies the coordinator's "
            "DATA-DIR/admin again",
        )


def _certificate(context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
    return next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
