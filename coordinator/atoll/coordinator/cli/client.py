"""Connection of `atollctl` to the coordinator: credential files, mutual-TLS channel, mapped errors.

The credential directory holds `admin.toml` (endpoint and server name), `admin.key`, `admin.crt` and `ca.crt`.
`atoll-coordinator serve` writes it. The operator may copy the directory to another machine and edit the
endpoint in its `admin.toml`.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc

from atoll.coordinator.paths import credentials_dir, default_data_dir
from atoll.core.errors import ConfigError
from atoll.core.grpc_errors import from_rpc_error
from atoll.v1 import admin_pb2_grpc

CALL_SECONDS = 10.0
MAX_MESSAGE_BYTES = 64 << 20
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.enable_http_proxy", 0),
    ("grpc.keepalive_time_ms", 15_000),  # ends a stream whose coordinator died silently
    ("grpc.keepalive_timeout_ms", 10_000),
)
Request = TypeVar("Request")
Response = TypeVar("Response")


class Client:
    """Calls the admin service and raises gRPC failures as `AtollError`."""

    def __init__(self, stub: admin_pb2_grpc.AdminStub, endpoint: str) -> None:
        self.stub = stub
        self._who = f"the coordinator at {endpoint}"

    def call(self, method: Callable[..., Response], request: object) -> Response:
        """Send one request and return its response. Raises `AtollError`."""
        try:
            return method(request, timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._who) from error

    def stream(self, method: Callable[..., Iterable[Response]], request: object) -> Generator[Response, None, None]:
        """Yield responses until the stream ends. Raises `AtollError`."""
        try:
            yield from method(request)
        except grpc.RpcError as error:
            raise from_rpc_error(error, self._who) from error


@contextmanager
def connect(directory: Path | None) -> Iterator[Client]:
    """Yield a client with the credential in `directory` (default: this machine's). Raises `ConfigError`."""
    place = directory or credentials_dir(default_data_dir(os.environ, os.getuid()))
    settings = _settings(place)
    endpoint, server_name = settings["endpoint"], settings["server_name"]
    credentials = grpc.ssl_channel_credentials(
        root_certificates=_read(place / "ca.crt"),
        private_key=_read(place / "admin.key"),
        certificate_chain=_read(place / "admin.crt"),
    )
    options = (("grpc.ssl_target_name_override", server_name), *_CHANNEL_OPTIONS)
    with grpc.secure_channel(endpoint, credentials, options) as channel:
        yield Client(admin_pb2_grpc.AdminStub(channel), endpoint)


def _settings(place: Path) -> dict[str, str]:
    try:
        settings = tomllib.loads(_read(place / "admin.toml").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place / 'admin.toml'} is not TOML: {error}") from error
    if not all(isinstance(settings.get(key), str) for key in ("endpoint", "server_name")):
        raise ConfigError(
            f"{place / 'admin.toml'} lacks endpoint or server_name",
            "copy it again from the coordinator's DATA-DIR/admin; `atoll-coordinator serve` writes it at each start",
        )
    return settings


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the operator's credential {path}: {error.strerror}",
            "run this on the coordinator's machine as the user of `atoll-coordinator serve`; if it uses --data-dir or "
            "runs elsewhere, pass DATA-DIR/admin, or a copy of it, with --credentials or ATOLL_CREDENTIALS",
        ) from error
