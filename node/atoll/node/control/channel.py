"""Channel of a member to its coordinator: mutual TLS, checked against the CA of its credentials."""

from __future__ import annotations

import asyncio

import grpc

from atoll.core.certs import SERVER_NAME, is_handed_over, split_pem
from atoll.core.errors import AuthorityReplaced, Unreachable
from atoll.node.control.credentials import Credentials
from atoll.node.control.enrol import fetch_chain


def dial(credentials: Credentials) -> grpc.aio.Channel:
    """Dial the coordinator's port for members."""
    tls = credentials.tls
    channel_credentials = grpc.ssl_channel_credentials(tls.ca_pem, tls.key_pem, tls.chain_pem)
    options = [
        ("grpc.ssl_target_name_override", SERVER_NAME),
        ("grpc.keepalive_time_ms", 15_000),
        ("grpc.keepalive_timeout_ms", 10_000),
    ]
    return grpc.aio.secure_channel(credentials.coordinator, channel_credentials, options)


async def refuse_replaced_authority(credentials: Credentials) -> None:
    """Raise `AuthorityReplaced` if the CA of this node's certificate has signed that it was replaced.

    Call it after a failed call: TLS only reports that the other side's certificate is wrong, or ends the connection.
    """
    try:
        chain = await asyncio.to_thread(fetch_chain, credentials.coordinator)
    except Unreachable:
        return
    _, *authority = split_pem(credentials.tls_chain_pem.encode())
    if is_handed_over(chain, b"".join(authority)):
        raise AuthorityReplaced(
            "the coordinator has replaced its certificate authority while this node was away",
            "ask your operator for a new token, then: atoll join; the node keeps its identity",
        )
