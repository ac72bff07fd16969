"""P2pd: the libp2p daemon that hivemind bundles, launched and supervised by this node.

Why not `P2P.create`: its daemon outlives a killed parent, keeps its sockets in the shared temporary folder, relays for
any peer, and answers libp2p's own DHT (kad) to non-members. Here the daemon dies with its parent, its control socket
is in a private directory, and kad is off. identify, ping and the relay run inside p2pd, outside the gate.

With `relay` on, which p2pd needs to use any relay, it starts its own relay with libp2p's default limits (128 KiB each
way, two minutes), in place of the one that our flags describe (its `EnableRelayV2`). So relayed connections carry only
small messages; bulk data needs a connection that one side can dial.

p2pd listens with SO_REUSEPORT, so two daemons would silently share a port. `start` probes the port first.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.resources import files
from pathlib import Path

from hivemind.utils.multiaddr import Multiaddr

from atoll.core import log
from atoll.core.errors import ChildDied, ConfigError, PortInUse
from atoll.core.files import make_private_dir
from atoll.node.system import child_processes
from atoll.node.system.socket_paths import SocketDirectory

MAX_CONNECTIONS = 4096  # above it p2pd cuts live connections, also those with open streams; its default is 512
RELAY_MAX_CIRCUITS = 16  # open relayed connections of one peer
RELAY_MAX_RESERVATIONS = 128  # peers that can be dialled through this relay
RELAY_DATA_LIMIT_BYTES = 4 * 1024**3  # in each direction of one relayed connection
RELAY_TIME_LIMIT = timedelta(minutes=30)  # of one relayed connection; peers dial again
RELAY_BUFFER_BYTES = 1024 * 1024

_log = log.get("p2pd")


@dataclass(frozen=True)
class P2pdConfig:
    """Configuration of one daemon. Addresses are TCP multiaddrs."""

    identity_path: Path
    runtime_dir: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    relay_service: bool
    trusted_relays: tuple[str, ...]

    @property
    def control_socket(self) -> Path:
        return self.runtime_dir / "p2pd.sock"

    @property
    def stream_socket(self) -> Path:
        """The socket on which this node accepts streams from p2pd."""
        return self.runtime_dir / "streams.sock"


def command(config: P2pdConfig) -> list[str]:
    """Build the command line of the daemon."""
    public = any("/127." not in address and "/::1/" not in address for address in config.listen)
    flags: dict[str, object] = {
        "id": config.identity_path,
        "listen": f"/unix{config.control_socket}",
        "hostAddrs": ",".join(config.listen),
        "tls": 1,
        "connManager": 1,
        "connLo": MAX_CONNECTIONS // 2,
        "connHi": MAX_CONNECTIONS,
        "autonat": 1,  # p2pd punches holes only if it also helps peers to learn whether they can be dialled
        "natPortMap": int(public),
        "relay": 1,
        "relayService": int(config.relay_service),
        "relayMaxCircuits": RELAY_MAX_CIRCUITS,
        "relayMaxReservations": RELAY_MAX_RESERVATIONS,
        "relayDataLimit": RELAY_DATA_LIMIT_BYTES,
        "relayTimeLimit": f"{int(RELAY_TIME_LIMIT.total_seconds())}s",
        "relayBufferSize": RELAY_BUFFER_BYTES,
        "idleTimeout": "60s",  # ends the daemon if its parent dies before it attaches
    }
    if config.announce:
        flags["announceAddrs"] = ",".join(config.announce)
    if config.trusted_relays and public:
        # p2pd refuses to use relays without kad; as a kad client it answers no requests of non-members.
        flags |= {"autoRelay": 1, "relayDiscovery": 0, "trustedRelays": ",".join(config.trusted_relays), "dhtClient": 1}
    program = str(files("hivemind.hivemind_cli") / "p2pd")
    return [program, *(f"-{name}={value}" for name, value in flags.items())]


class P2pd:
    """A running daemon. `died` resolves when it ends without `stop`.

    The socket paths in its `config` are short enough for the kernel and valid until `stop`.
    """

    def __init__(self, config: P2pdConfig, sockets: SocketDirectory, child: asyncio.subprocess.Process) -> None:
        self.config = config
        self._sockets = sockets
        self.died: asyncio.Future[ChildDied] = asyncio.get_running_loop().create_future()
        self._child = child
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._last_line = ""
        self._stopping = False
        self._stopped = False
        self._watcher = asyncio.create_task(self._watch())

    @property
    def pid(self) -> int:
        return self._child.pid

    @classmethod
    async def start(cls, config: P2pdConfig, timeout: timedelta) -> P2pd:
        """Launch the daemon and wait until it is ready. Raises `PortInUse`, `ConfigError`, `ChildDied`."""
        for address in config.listen:
            _check_port_free(address)
        sockets = SocketDirectory.open(make_private_dir(config.runtime_dir), config.stream_socket.name)
        try:
            config = replace(config, runtime_dir=sockets.path)
            _remove_sockets(config)
            child = await child_processes.start(
                command(config),
                environment=_environment(),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                pass_fds=sockets.descriptors,
            )
        except BaseException:
            sockets.close()
            raise
        daemon = cls(config, sockets, child)
        try:
            await daemon._until_ready(timeout)
        except BaseException:
            await daemon.stop(timedelta(0))
            raise
        return daemon

    async def stop(self, grace: timedelta) -> None:
        """Stop the daemon and remove its sockets. May be called twice."""
        self._stopping = True
        try:
            await child_processes.stop(self._child, grace)
            await self._watcher
        finally:
            if not self._stopped:
                self._stopped = True
                with closing(self._sockets):
                    _remove_sockets(self.config)

    def declare_dead(self, why: str) -> None:
        """Resolve `died`, unless `stop` was called or it is resolved already."""
        if not self._stopping and not self.died.done():
            _log.error("p2pd died", why=why)
            self.died.set_result(ChildDied(f"p2pd ended by itself ({why})"))

    async def _until_ready(self, timeout: timedelta) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout.total_seconds()):
                if await asyncio.shield(self._ready):
                    return
        if "address already in use" in self._last_line:
            raise PortInUse(f"p2pd cannot listen on {', '.join(self.config.listen)}", "choose another port")
        raise ChildDied(f"p2pd did not start within {timeout}; last output: {self._last_line or 'none'}")

    async def _watch(self) -> None:
        """Copy the daemon's output to the log, and notice its end."""
        output = self._child.stdout
        assert output is not None
        while line := await _read_line(output):
            text = line.decode(errors="replace").strip()
            self._last_line = text or self._last_line
            _log.debug("output", line=text)
            if text.startswith("Peer ID:") and not self._ready.done():
                self._ready.set_result(True)
        status = await self._child.wait()
        if not self._ready.done():
            self._ready.set_result(False)
        else:
            self.declare_dead(f"status {status}: {self._last_line}")


async def _read_line(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readline()
    except ValueError:  # the line is longer than the reader's limit and was dropped
        return b"\n"


def _environment() -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("ATOLL_")}
    return ours | {"GOLOG_LOG_LEVEL": "error"}


def _check_port_free(address: str) -> None:
    """Raise `PortInUse` if a program listens on that port already."""
    host, port, family = _tcp_parts(address)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise PortInUse(
                f"cannot listen on {address}: {error.strerror or error}",
                "stop the program that uses that port, or choose another one",
            ) from error


def _tcp_parts(address: str) -> tuple[str, int, socket.AddressFamily]:
    parts: Sequence[str] = address.split("/")
    try:
        Multiaddr(address)
        _, kind, host, transport, port = parts
        if kind in ("ip4", "ip6") and transport == "tcp":
            return host, int(port), socket.AF_INET if kind == "ip4" else socket.AF_INET6
    except ValueError:  # from the multiaddr parser, the unpacking, or the port number
        pass
    raise ConfigError(f"{address!r} is not a TCP multiaddr", "write it like /ip4/0.0.0.0/tcp/4001")


def _remove_sockets(config: P2pdConfig) -> None:
    for path in (config.control_socket, config.stream_socket):
        with suppress(FileNotFoundError):
            path.unlink()
