"""Enrolment: ask which run a join token is for, then exchange it for credentials.

The coordinator is authenticated before anything is sent to it.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.core import protocol
from atoll.core.certs import SERVER_NAME, is_handed_over, new_tls_key_and_csr
from atoll.core.clock import Clock, unix_ms
from atoll.core.errors import AuthorityReplaced, CaMismatch, Unreachable
from atoll.core.grpc_errors import from_rpc_error
from atoll.core.identity import Identity
from atoll.core.run_spec import parse_run_spec
from atoll.core.tokens import JoinToken, split_endpoint
from atoll.node.control.credentials import Credentials
from atoll.node.control.run_needs import RunNeeds
from atoll.v1 import enrolment_pb2, enrolment_pb2_grpc

TIMEOUT = timedelta(seconds=10)


async def preview(token: JoinToken, identity: Identity, node_name: str, clock: Clock) -> RunNeeds:
    """Ask for the run's requirements, without using up the token.

    Raises the errors of `enrol` and `RunNeeds.from_preview`.
    """
    request = enrolment_pb2.PreviewRequest(
        protocol=protocol.ours(),
        token_id=token.token_id,
        token_secret=token.secret,
        identity_public_key=identity.public_key,
        node_unix_ms=unix_ms(clock),
        node_name=node_name,
    )
    ca_pem = await asyncio.to_thread(fetch_ca, token)
    async with _stub(token, ca_pem) as stub:
        response = await stub.Preview(request, timeout=TIMEOUT.total_seconds())
    return RunNeeds.from_preview(response, token.endpoint)


async def enrol(token: JoinToken, identity: Identity, node_name: str, clock: Clock) -> Credentials:
    """Exchange the token for credentials. Raises the error in the coordinator's answer, `CaMismatch`, `Unreachable`."""
    ca_pem = await asyncio.to_thread(fetch_ca, token)
    key_pem, csr_der = new_tls_key_and_csr()
    request = enrolment_pb2.EnrolRequest(
        protocol=protocol.ours(),
        token_id=token.token_id,
        token_secret=token.secret,
        csr_der=csr_der,
        identity_public_key=identity.public_key,
        csr_signature=identity.sign("csr", csr_der),
        node_name=node_name,
        node_unix_ms=unix_ms(clock),
    )
    async with _stub(token, ca_pem) as stub:
        response = await stub.Enrol(request, timeout=TIMEOUT.total_seconds())
    return _verified_credentials(response, token, identity, key_pem, ca_pem, clock)


@asynccontextmanager
async def _stub(token: JoinToken, ca_pem: bytes) -> AsyncIterator[enrolment_pb2_grpc.EnrolmentAsyncStub]:
    """Open a channel to the coordinator; errors in its answers are raised as `AtollError`s."""
    options = [("grpc.ssl_target_name_override", SERVER_NAME)]
    channel_credentials = grpc.ssl_channel_credentials(root_certificates=ca_pem)
    async with grpc.aio.secure_channel(token.endpoint, channel_credentials, options) as channel:
        try:
            yield enrolment_pb2_grpc.EnrolmentStub(channel)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, f"the coordinator at {token.endpoint}") from error


def _verified_credentials(
    response: enrolment_pb2.EnrolResponse,
    token: JoinToken,
    identity: Identity,
    key_pem: bytes,
    ca_pem: bytes,
    clock: Clock,
) -> Credentials:
    """Build credentials after verifying the run spec, the membership and the deny-list in the response."""
    host, _ = split_endpoint(token.endpoint)
    member_host, _, member_port = response.membership_endpoint.rpartition(":")
    credentials = Credentials(
        run_id=response.run_id,
        coordinator=f"{member_host or _bracketed(host)}:{member_port}",
        tls_key_pem=key_pem.decode(),
        tls_chain_pem=response.certificate_chain_pem.decode(),
        ca_pem=ca_pem.decode(),
        operator_key=response.operator_public_key,
        membership=response.membership.SerializeToString(),
        deny_list=response.deny_list.SerializeToString(),
        seeds=tuple(response.seeds),
        run_spec_toml=response.run_spec_toml,
        run_created_unix_ms=response.run_created_unix_ms,
    )
    if response.HasField("authorities"):
        credentials = credentials.with_authorities(response.authorities)
    parse_run_spec(credentials.run_spec_toml, f"the spec of run {response.run_id}")
    credentials.authority.verify_membership(response.membership, clock.unix(), expect_peer_id=identity.peer_id)
    credentials.verified_deny_list()
    return credentials


def fetch_ca(token: JoinToken) -> bytes:
    """Fetch the authority's certificate (PEM) with one TLS handshake; no data is sent.

    Raises `Unreachable`, `AuthorityReplaced`, or `CaMismatch` unless the chain has a certificate with the SHA-256 of
    the token.
    """
    chain = fetch_chain(token.endpoint)
    for der in chain:
        if hashlib.sha256(der).hexdigest() == token.ca_sha256:
            pem = x509.load_der_x509_certificate(der).public_bytes(Encoding.PEM)
            if is_handed_over(chain, pem):
                raise AuthorityReplaced(
                    "the coordinator has replaced its certificate authority since it created this token",
                    "ask your operator for a new token: `atollctl token create`",
                )
            return pem
    raise CaMismatch(
        f"the server at {token.endpoint} is not the coordinator that created this token",
        "ask your operator for a new token: `atollctl token create`",
    )


def fetch_chain(endpoint: str) -> list[bytes]:
    """Fetch a server's certificates (DER) with one TLS handshake, unverified. Raises `Unreachable`."""
    host, port = split_endpoint(endpoint)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # the caller compares hashes or signatures
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, port), timeout=TIMEOUT.total_seconds()) as plain,
            context.wrap_socket(plain) as tls,
        ):
            return _unverified_chain(tls)
    except OSError as error:
        raise Unreachable(
            f"no coordinator answers at {endpoint}: {error}",
            "check the address in the token, the coordinator's enrolment port, and firewalls in between",
        ) from error


def _unverified_chain(tls: ssl.SSLSocket) -> list[bytes]:
    if hasattr(tls, "get_unverified_chain"):  # Python 3.13
        return list(tls.get_unverified_chain())
    inner = tls._sslobj  # type: ignore[attr-defined]  # 3.11 and 3.12 have it only here
    return [certificate.public_bytes(ssl._ssl.ENCODING_DER) for certificate in inner.get_unverified_chain()]  # type: ignore[attr-defined]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
