"""Checks of this machine that need no run: ports, addresses, data directory, paths. They come before all other checks.

A failed start must not spend a use of a token. So `atoll join` makes these checks first, then asks the coordinator for
the run's requirements, and makes the checks of `run_checks.py` before it enrols.
"""

from __future__ import annotations

import re
import shutil
import socket
from pathlib import Path

from atoll.core.errors import ConfigError, DataDirUnusable, PortInUse
from atoll.core.files import write_atomic
from atoll.core.units import bytes_text
from atoll.node.config import NodeConfig, has_corpus_files
from atoll.node.training.device_names import parse_device_names

LEAST_FREE_BYTES = 256 << 20  # for keys, logs, manifests and a small model
_PROBE_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9-]{1,63}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?|[0-9a-fA-F:]{2,45}")


def check_machine(config: NodeConfig) -> None:
    """Make all checks that write nothing and need no coordinator. Raises `ConfigError`, `PortInUse`, `CorpusError`,
    `DataDirUnusable`.
    """
    check_names(config)
    check_ports(config)
    check_paths(config)
    check_free_space(config)
    if any(name not in ("auto", "cpu") for name in parse_device_names(config.device)):
        from atoll.node.training.device_group import choose_devices  # here, because torch takes seconds

        choose_devices(config.device)


def check_names(config: NodeConfig) -> None:
    """Check the node's name and its public address. Raises `ConfigError`."""
    if config.name and not _NAME.fullmatch(config.name):
        raise ConfigError(
            f"{config.name[:80]!r} cannot be a node's name: it must have 1 to 63 characters of a-z, 0-9 and -",
            "join with another --name",
        )
    if config.announce and not _HOST.fullmatch(config.announce):
        raise ConfigError(
            f"{config.announce[:80]!r} is not a host name or an IP address",
            "set --announce to the public address alone; the port is that of --port",
        )


def check_ports(config: NodeConfig) -> None:
    """Check that this node can listen where its owner says. Raises `PortInUse`, `ConfigError`."""
    if config.direct and config.port and config.port == config.direct_port:
        raise ConfigError(f"port and direct_port are both {config.port}", "set two different ports")
    check_can_listen(config.listen, config.port)
    if config.direct and config.direct_port:
        check_can_listen(config.listen, config.direct_port)


def check_can_listen(host: str, port: int) -> None:
    """Bind a port and release it; 0 stands for any port. Raises `PortInUse`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise PortInUse(
                f"this node cannot listen on {host} port {port}: {error.strerror or error}",
                "stop the program that uses the port, or set another --port and --listen",
            ) from error


def check_paths(config: NodeConfig) -> None:
    """Check that the paths that the owner named exist. Raises `ConfigError`."""
    if config.data and not has_corpus_files(config.data):
        raise ConfigError(f"there is no training text at {config.data}", "give the path of the corpus with --data")
    if config.base and not Path(config.base).expanduser().is_dir():
        raise ConfigError(
            f"there is no directory of pretrained weights at {config.base}", "give the directory with --base"
        )


def check_free_space(config: NodeConfig, wanted_bytes: int = LEAST_FREE_BYTES, purpose: str = "a node") -> None:
    """Check the disk of the data directory, which need not exist yet. Raises `DataDirUnusable`."""
    try:
        directory = next(path for path in (config.data_dir, *config.data_dir.parents) if path.exists())
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise DataDirUnusable(f"cannot use {config.data_dir}: {error.strerror}", "choose another --data-dir") from error
    if not directory.is_dir():
        raise DataDirUnusable(
            f"cannot use {config.data_dir}: {directory} is not a directory", "choose another --data-dir"
        )
    if free < wanted_bytes:
        raise DataDirUnusable(
            f"{directory} has {bytes_text(free)} of free space; {purpose} needs {bytes_text(wanted_bytes)}",
            "free some space, or choose another disk with --data-dir",
        )


def check_writable(data_dir: Path) -> None:
    """Write a file to the data directory and delete it. Raises `DataDirUnusable`."""
    probe = data_dir / ".probe"
    try:
        write_atomic(probe, bytes(_PROBE_BYTES))
    finally:
        probe.unlink(missing_ok=True)
