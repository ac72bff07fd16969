"""Channel of a member to its coordinator: mutual TLS, checked against the CA of its credentials."""

from __future__ import annotations

import grpc

from atoll.core.certs import SERVER_NAME
from atoll.node.control.credentials import Credentials


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
