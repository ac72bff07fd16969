"""gRPC interceptor of every call: checks the caller's role and turns errors into statuses.

TLS has verified that the caller's certificate is from our CA; the URI in it names the role. A node may call the
membership service, an operator the admin service. Errors of our tree are sent with message and remedy. Any other
exception is a bug: it is logged in full and sent as "internal error".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from prometheus_client import Counter

from atoll.core import grpc_errors, log
from atoll.core.certs import subject_uri
from atoll.core.errors import AtollError, NotPermitted

NODE_SUBJECT_PREFIX = "atoll://node/"
ADMIN_SUBJECT_PREFIX = "atoll://admin/"
_REQUIRED = {"/atoll.v1.MembershipService/": NODE_SUBJECT_PREFIX, "/atoll.v1.Admin/": ADMIN_SUBJECT_PREFIX}
_OURS = "/atoll.v1."
Behaviour = Callable[[Any, Any], Awaitable[Any]]  # gRPC's signature: messages of any service
_log = log.get("rpc")


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    """Checks the caller's role and maps errors. Handlers are coroutines (streams use `context.write`)."""

    def __init__(self, errors: Counter) -> None:
        self._errors = errors

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
        for shape in ("unary_unary", "unary_stream", "stream_unary", "stream_stream"):
            behaviour = getattr(handler, shape)
            if behaviour is not None:
                build = getattr(grpc, f"{shape}_rpc_method_handler")
                guarded = self._guarded(method, behaviour)
                return build(guarded, handler.request_deserializer, handler.response_serializer)
        return handler

    def _guarded(self, method: str, behaviour: Behaviour) -> Behaviour:
        required = next((role for prefix, role in _REQUIRED.items() if method.startswith(prefix)), "")

        async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                if required:
                    _require(context, required)
                return await behaviour(request, context)
            except AtollError as error:
                failure = error
            except (grpc.aio.AbortError, grpc.aio.UsageError):
                raise
            except Exception:  # supervision: the cause must not leave this process
                _log.exception("an rpc failed", method=method)
                failure = AtollError("internal error", "see the coordinator's log")
            self._errors.labels(method.rsplit("/", 1)[1], failure.reason).inc()
            status = grpc_errors.status_of(failure)
            return await context.abort(status, str(failure), grpc_errors.trailing_metadata(failure))

        return call


def caller(context: grpc.aio.ServicerContext[Any, Any], role: str) -> str:
    """Name after the subject prefix `role` in the client's certificate. Raises `NotPermitted`."""
    pem = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
    subject = subject_uri(pem) if pem else ""
    if not subject.startswith(role):
        raise NotPermitted(
            f"this call needs a certificate for {role}…, not {subject or 'none'}", "use a credential for that role"
        )
    return subject.removeprefix(role)


def _require(context: grpc.aio.ServicerContext[Any, Any], role: str) -> None:
    caller(context, role)
