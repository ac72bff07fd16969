"""Main path of the coordinator: lock → keys → state → servers → serve → drain.

Two TLS ports (one for nodes with a token, one for members and operators) and HTTP on loopback run in one event loop.
On SIGTERM or SIGINT, calls in progress may end within a deadline. A second signal ends the process at once, which
is safe: acknowledged data is on disk.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry

from atoll.coordinator import addresses
from atoll.coordinator.ca import CoordinatorKeys, ServerCertificate, write_admin_credential
from atoll.coordinator.call_rates import CallRates
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.controller import Controller
from atoll.coordinator.grpc_server import GrpcServer, handshake, stop_all
from atoll.coordinator.interceptors import AuthInterceptor
from atoll.coordinator.paths import credentials_dir
from atoll.coordinator.services.admin import AdminService
from atoll.coordinator.services.authority_changes import AuthorityChanges
from atoll.coordinator.services.checkpoint_relay import CheckpointRelay
from atoll.coordinator.services.enrolment import EnrolmentService
from atoll.coordinator.services.membership import MembershipService
from atoll.coordinator.store.sql import SqlStore
from atoll.coordinator.web.app import create_app
from atoll.coordinator.web.http_server import HttpServer
from atoll.coordinator.web.metrics import StateCollector, rpc_errors
from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AlreadyRunning, AtollError, DataDirUnusable
from atoll.core.file_lock import FileLocked, lock_file
from atoll.core.files import make_private_dir, raise_descriptor_limit
from atoll.core.sdnotify import notify
from atoll.v1 import admin_pb2_grpc, enrolment_pb2_grpc, membership_pb2_grpc

MAX_ENROLMENT_BYTES = 64 << 10  # small, because callers have no certificate
MAX_ENROLMENT_CALLS = 4096  # under attack most are unfinished; each ends within ten seconds
MAX_FILES = 1 << 16
MAX_ENROLMENT_CONNECTIONS = 2048  # each ends within 15 seconds
MAX_MEMBER_CONNECTIONS = 4096  # a node has one, and another for each vote
FEW_FILES = 8192
MAX_MEMBER_BYTES = 4 << 20  # a heartbeat has at most 1 MiB each of reports and of answers, or one larger manifest
CREDENTIAL_SECONDS = 3600.0  # between checks of the admin credential
EXIT_ON_SECOND_SIGNAL = 130
_log = log.get("server")


@dataclass(frozen=True)
class Systemd:
    """Service manager settings: `NOTIFY_SOCKET`, and half of `WATCHDOG_USEC`."""

    address: str = ""
    watchdog_seconds: float | None = None


async def serve(config: CoordinatorConfig, clock: Clock, systemd: Systemd, *, new_database: bool = False) -> None:
    """Run until told to stop. Raises `StateError`, `ConfigError`, `PortInUse` before anything is served.

    Keys without a database are an error, unless `new_database` is set.
    """
    with private_files():
        make_private_dir(config.data_dir)
        with lock_data_dir(config.data_dir):
            _raise_file_limit()
            await _serve(config, clock, systemd, new_database)


async def _serve(config: CoordinatorConfig, clock: Clock, systemd: Systemd, new_database: bool) -> None:
    keys, controller = open_state(config, clock, new_database=new_database)
    stopping = asyncio.Event()
    _on_signals(stopping, controller)
    try:
        async with running_servers(config, controller, keys, stopping) as endpoints:
            write_admin_credential(keys, credentials_dir(config.data_dir), endpoints.local, clock.unix())
            endpoints.write(config.data_dir / "endpoints.json")
            _log.info("coordinator started", page=f"http://{endpoints.http}/", public=endpoints.public)
            async with background_tasks(controller, keys, config, endpoints, systemd):
                await stopping.wait()
            _log.info("stopping", deadline_seconds=config.drain_seconds)
    finally:
        controller.close()


@contextmanager
def private_files() -> Iterator[None]:
    """Restrict all files that this process creates in the block, also the database's, to their owner."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def _raise_file_limit() -> None:
    """Raise the limit of file descriptors: every connection takes one."""
    limit = raise_descriptor_limit(MAX_FILES)
    if limit < FEW_FILES:
        _log.warning("file descriptor limit is low for a thousand nodes", limit=limit, wanted=MAX_FILES)


def open_state(
    config: CoordinatorConfig, clock: Clock, *, new_database: bool = False
) -> tuple[CoordinatorKeys, Controller]:
    """Open keys and state, or create them. Raises `StateError`, `ConfigError`.

    At the first start the database is created first. If that fails, no keys remain that would require it.
    """
    first_start = not (config.data_dir / "operator.key").exists()
    owner = f"process {os.getpid()} on {socket.gethostname()}, data directory {config.data_dir}"
    keys = None if first_start else CoordinatorKeys(config.data_dir, clock)
    store = SqlStore(config.database_url, owner, may_create=first_start or new_database)
    try:
        keys = keys or CoordinatorKeys(config.data_dir, clock)
        return keys, Controller(store, keys.operator, clock, config.policy)
    except AtollError:
        store.close()
        raise


@asynccontextmanager
async def running_servers(
    config: CoordinatorConfig, controller: Controller, keys: CoordinatorKeys, stopping: asyncio.Event
) -> AsyncIterator[addresses.Endpoints]:
    """Run all servers during the block; drain them at its end. Set `stopping` before that, to end open streams."""
    registry = CollectorRegistry()
    guard = AuthInterceptor(rpc_errors(registry), CallRates(controller.clock), keys.authorities)
    registry.register(StateCollector(controller))
    enrol = _enrol_server(config, keys, controller.clock, guard)
    member = _member_server(config, keys, controller.clock, guard)
    listener = addresses.bind(config.http_host, config.http_port, "--http-port")
    endpoints = _endpoints(config, enrol.port, member.port, listener.getsockname()[1])

    async def take_over() -> None:
        await handshake(config.listen, enrol.port)
        await handshake(config.listen, member.port)
        _write_credential(keys, config.data_dir, endpoints.local, controller.clock)

    authorities = AuthorityChanges(controller, keys, take_over)
    uploads = CheckpointRelay(controller)
    enrolment = EnrolmentService(controller, keys, config.public_member_endpoint or f":{member.port}")
    enrolment_pb2_grpc.add_EnrolmentServicer_to_server(enrolment, enrol.server)
    membership = MembershipService(controller, keys, uploads, stopping)
    membership_pb2_grpc.add_MembershipServiceServicer_to_server(membership, member.server)
    admin = AdminService(
        controller, uploads, keys=keys, authorities=authorities, public_endpoint=endpoints.public, stopping=stopping
    )
    admin_pb2_grpc.add_AdminServicer_to_server(admin, member.server)
    http = HttpServer(create_app(controller, registry, config.http_host), listener)
    await enrol.start()
    await member.start("atoll.v1.MembershipService", "atoll.v1.Admin")
    await http.start()
    retiring = asyncio.create_task(authorities.run())
    try:
        yield endpoints
    finally:
        retiring.cancel()
        await stop_all([enrol, member], config.drain_seconds)
        await http.stop()


def _enrol_server(config: CoordinatorConfig, keys: CoordinatorKeys, clock: Clock, guard: AuthInterceptor) -> GrpcServer:
    """The server for nodes with a token. The limits divide the descriptors, so that no port can use up all of them."""
    return GrpcServer(
        config.listen,
        config.enrol_port,
        "--enrol-port",
        ServerCertificate(keys.authorities, clock).credentials(mutual=False),
        guard,
        max_message_bytes=MAX_ENROLMENT_BYTES,
        max_connections=min(MAX_ENROLMENT_CONNECTIONS, raise_descriptor_limit(MAX_FILES) // 8),
        max_calls=MAX_ENROLMENT_CALLS,
    )


def _member_server(
    config: CoordinatorConfig, keys: CoordinatorKeys, clock: Clock, guard: AuthInterceptor
) -> GrpcServer:
    """The server for members and operators."""
    return GrpcServer(
        config.listen,
        config.member_port,
        "--member-port",
        ServerCertificate(keys.authorities, clock).credentials(mutual=True),
        guard,
        max_message_bytes=MAX_MEMBER_BYTES,
        max_connections=min(MAX_MEMBER_CONNECTIONS, raise_descriptor_limit(MAX_FILES) // 2),
    )


@asynccontextmanager
async def background_tasks(
    controller: Controller,
    keys: CoordinatorKeys,
    config: CoordinatorConfig,
    endpoints: addresses.Endpoints,
    systemd: Systemd,
) -> AsyncIterator[None]:
    """Run the tasks besides the servers: ticks, the watchdog, renewal of the admin credential."""
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(controller.run()),
            group.create_task(_feed_watchdog(systemd)),
            group.create_task(_renew_credential(keys, config.data_dir, endpoints.local, controller.clock)),
        ]
        notify(systemd.address, "READY=1")
        yield
        notify(systemd.address, "STOPPING=1")
        for task in tasks:
            task.cancel()


@contextmanager
def lock_data_dir(data_dir: Path) -> Iterator[None]:
    """Hold the lock of the data directory. Raises `AlreadyRunning`, `DataDirUnusable`."""
    try:
        descriptor = lock_file(data_dir / "lock", f"{os.getpid()}\n")
    except FileLocked as holder:
        raise AlreadyRunning(
            f"another coordinator (process {str(holder) or 'unknown'}) uses {data_dir}",
            "stop it, or name another --data-dir",
        ) from None
    except OSError as error:
        raise DataDirUnusable(
            f"cannot use {data_dir}: {error.strerror}", "check its owner and permissions, or name another --data-dir"
        ) from error
    try:
        yield
    finally:
        os.close(descriptor)


def _on_signals(stopping: asyncio.Event, controller: Controller) -> None:
    def stop() -> None:
        if stopping.is_set():
            os._exit(EXIT_ON_SECOND_SIGNAL)
        stopping.set()
        controller.notify()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _endpoints(config: CoordinatorConfig, enrol: int, member: int, http: int) -> addresses.Endpoints:
    local_host = addresses.dialable(config.listen)
    public = config.public_endpoint or addresses.address(addresses.outward_address(config.listen), enrol)
    return addresses.Endpoints(
        enrolment=addresses.address(local_host, enrol),
        local=addresses.address(local_host, member),
        http=addresses.address(addresses.dialable(config.http_host), http),
        public=public,
    )


async def _feed_watchdog(systemd: Systemd) -> None:
    while systemd.watchdog_seconds is not None:
        notify(systemd.address, "WATCHDOG=1")
        await asyncio.sleep(systemd.watchdog_seconds)


async def _renew_credential(keys: CoordinatorKeys, data_dir: Path, endpoint: str, clock: Clock) -> None:
    while True:
        await asyncio.sleep(CREDENTIAL_SECONDS)
        _write_credential(keys, data_dir, endpoint, clock)


def _write_credential(keys: CoordinatorKeys, data_dir: Path, endpoint: str, clock: Clock) -> None:
    try:
        write_admin_credential(keys, credentials_dir(data_dir), endpoint, clock.unix())
    except (AtollError, OSError) as error:  # for example no free file descriptor: it is retried in an hour
        _log.error("cannot write the admin credential", error=str(error))
