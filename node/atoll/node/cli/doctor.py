"""`atoll doctor`: check this machine for problems that would prevent training."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import typer

from atoll.core.errors import AtollError, ExitCode
from atoll.core.output import Output, OutputOption, print_json
from atoll.core.units import bytes_text
from atoll.node.cli.options import ConfigFile, DataDir, load_settings
from atoll.node.config import NodeConfig

_MIN_FREE_BYTES = 5 * 2**30
_DEVICE_TIMEOUT_SECONDS = 120
_CONNECT_TIMEOUT_SECONDS = 5
_DEVICE_PROGRAM = """
import sys
import torch
from atoll.core.errors import AtollError
from atoll.node.training.device_group import choose_devices, combined_facts
try:
    facts = combined_facts(choose_devices(sys.argv[1]))
except AtollError as error:
    sys.exit(str(error))
no_gpu = "no GPU: training would run on " if facts.device == "cpu" and sys.argv[1] == "auto" else ""
print(f"{no_gpu}{facts.name}, {facts.memory_bytes / 2**30:.0f} GiB ({facts.device}), torch {torch.__version__}")
"""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def doctor(data_dir: DataDir = None, config: ConfigFile = None, output: OutputOption = Output.TEXT) -> None:
    """Check this machine. On a node that has joined, also check coordinator, ban, weights, memory, disk and text."""
    loaded = load_settings(data_dir, config).config
    findings = []
    for check in _CHECKS:
        for finding in check(loaded):
            findings.append(finding)
            if output is Output.TEXT:
                _print(finding)
    if output is Output.JSON:
        print_json({"doctor": [asdict(finding) for finding in findings]})
    if not all(finding.ok for finding in findings):
        raise typer.Exit(ExitCode.FAILURE)


def _print(finding: Finding) -> None:
    mark = typer.style("✓", fg="green") if finding.ok else typer.style("✗", fg="red")
    typer.echo(f"{mark} {finding.name:<14} {finding.found}")
    if finding.remedy and not finding.ok:
        typer.echo(f"  → {finding.remedy}")


def _python(_: NodeConfig) -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    found = ".".join(map(str, sys.version_info[:3]))
    supported = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("python", supported, found, "use Python 3.11, 3.12 or 3.13")
    for package in ("torch", "hivemind"):
        try:
            yield Finding(package, True, version(package))
        except PackageNotFoundError:
            yield Finding(
                package,
                False,
                "not installed",
                "install atoll with its 'node' extra: pip install '.[node]' in a checkout",
            )


def _device(config: NodeConfig) -> Iterator[Finding]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _DEVICE_PROGRAM, config.device],
            capture_output=True,
            text=True,
            timeout=_DEVICE_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        yield Finding(
            "device", False, f"torch did not start within {_DEVICE_TIMEOUT_SECONDS} s", "check the GPU driver"
        )
        return
    problem = done.stderr.strip().splitlines()[-1:] or ["torch failed"]
    yield Finding(
        "device",
        done.returncode == 0,
        done.stdout.strip() or problem[0],
        "check the GPU driver and torch, or choose another device with --device",
    )
    if done.stdout.startswith("no GPU") or config.device.startswith("cpu"):
        for key, value, no_limit in (
            ("vram_fraction", config.vram_fraction, 1.0),
            ("power_watts", config.power_watts, 0.0),
        ):
            if value != no_limit:
                yield Finding(key, True, f"{value:g} has no effect on a CPU")


def _disk(config: NodeConfig) -> Iterator[Finding]:
    directory = next(path for path in (config.data_dir, *config.data_dir.parents) if path.exists())
    free = shutil.disk_usage(directory).free
    yield Finding(
        "disk",
        free >= _MIN_FREE_BYTES,
        f"{bytes_text(free)} free at {directory}",
        f"free at least {bytes_text(_MIN_FREE_BYTES)}, or choose another disk with --data-dir",
    )


def _limits(config: NodeConfig) -> Iterator[Finding]:
    from atoll.node.cli.set_limits import limits_text
    from atoll.node.limits.machine_usage import on_battery

    yield Finding("limits", True, limits_text(config))
    if config.on_battery == "pause" and on_battery():
        yield Finding("battery", True, "this machine runs on battery now: training would be paused")
    if config.only_when_idle_minutes and shutil.which("loginctl") is None:
        yield Finding("idle", True, "loginctl is missing: only the CPU use of other programs counts as use")
    if config.power_watts and os.geteuid() != 0:
        yield Finding(
            "power cap",
            False,
            "most drivers allow only root to set it",
            "run the node as root, or see `atoll status` while it runs",
        )


def _port(config: NodeConfig) -> Iterator[Finding]:
    if config.port == 0:
        yield Finding("port", True, "any free port (set --port behind a port forward)")
        return
    family = socket.AF_INET6 if ":" in config.listen else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.listen, config.port))
        except OSError as error:
            ours = error.errno == errno.EADDRINUSE and _daemon_answers(config)
            found = f"{config.port} is in use by this node" if ours else f"{config.port}: {error.strerror}"
            yield Finding("port", ours, found, "" if ours else "stop the program that uses it, or set --port")
        else:
            yield Finding("port", True, f"{config.port} is free")


def _daemon_answers(config: NodeConfig) -> bool:
    """Return whether the daemon of this data directory answers."""
    from atoll.node.control.local_client import call

    try:
        call(config.data_dir, "status")
    except AtollError:
        return False
    return True


def _membership(config: NodeConfig) -> Iterator[Finding]:
    from atoll.core.identity import Identity
    from atoll.node.control.credentials import Credentials

    try:
        if config.path("identity.key").exists():
            yield Finding("identity", True, Identity.load(config.path("identity.key")).peer_id)
        credentials = Credentials.load(config.data_dir)
        if credentials is None:
            yield Finding("membership", True, "not joined yet: ask your operator for a token, then run `atoll join`")
            return
        member = credentials.authority.verify_membership(credentials.signed_membership(), time.time())
        hours = (member.not_after - time.time()) / 3600
        yield Finding("membership", True, f"run {credentials.run_id}, certificate valid for {hours:.0f} h")
        yield from _coordinator(credentials.coordinator)
    except AtollError as error:
        yield Finding("membership", False, str(error), error.remedy)


def _coordinator(endpoint: str) -> Iterator[Finding]:
    host, _, port = endpoint.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_SECONDS):
            yield Finding("coordinator", True, f"{endpoint} answers")
    except OSError as error:
        yield Finding("coordinator", False, f"{endpoint}: {error}", "check the network; training goes on without it")


def _names(config: NodeConfig) -> Iterator[Finding]:
    from atoll.node.preflight.machine import check_names, check_paths

    try:
        check_names(config)
        check_paths(config)
    except AtollError as error:
        yield Finding("settings", False, str(error), error.remedy)


def _training(config: NodeConfig) -> Iterator[Finding]:
    from atoll.node.control.credentials import Credentials

    try:
        credentials = Credentials.load(config.data_dir)
    except AtollError:
        return  # `_membership` reports this case
    if credentials is not None:
        from atoll.node.cli.doctor_training import training_findings

        yield from training_findings(config, credentials, running=_daemon_answers(config))


def _corpus(config: NodeConfig) -> Iterator[Finding]:
    from atoll.core.run_spec import parse_run_spec
    from atoll.node.control.credentials import Credentials

    try:
        credentials = Credentials.load(config.data_dir)
        spec = parse_run_spec(credentials.run_spec_toml) if credentials is not None else None
    except AtollError as error:
        yield Finding("run spec", False, str(error), error.remedy)
        return
    if spec is not None and spec.data.source == "corpus":
        from atoll.node.cli.doctor_corpus import corpus_findings

        yield from corpus_findings(config, spec)


_CHECKS: tuple[Callable[[NodeConfig], Iterator[Finding]], ...] = (
    _python,
    _names,
    _device,
    _limits,
    _disk,
    _port,
    _membership,
    _training,
    _corpus,
)
