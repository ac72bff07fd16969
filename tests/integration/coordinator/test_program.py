"""`atoll-coordinator serve` and `atollctl` as programs: start, stop, and everything that keeps it from starting."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner
from unit.coordinator.world import spec_toml

from atoll.coordinator.cli import serve
from atoll.coordinator.config import CoordinatorConfig
from atoll.coordinator.server import MAX_FILES, lock_data_dir, open_state
from atoll.core import log
from atoll.core.clock import SystemClock
from atoll.core.errors import AtollError, DataDirUnusable, ExitCode
from atoll.core.files import make_private_dir

DEADLINE_SECONDS = 120.0
SERVE = [sys.executable, "-c", "from atoll.coordinator.cli.serve import main; main()"]
CTL = [sys.executable, "-c", "from atoll.coordinator.cli.main import main; main()"]
SLOW = {"torch", "hivemind", "sqlalchemy", "starlette", "alembic", "uvicorn"}
FREE_PORTS = ["--listen", "127.0.0.1", "--enrol-port", "0", "--member-port", "0", "--http-port", "0"]


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program would bind this process's logs to the runner's stderr, which ends with the command."""
    monkeypatch.setattr(log, "configure", lambda *_: None)


class Systemd:
    """The socket of a service manager, with a thread that reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.messages: list[str] = []
        self.ready = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while message := self._socket.recv(256).decode():
            self.messages.append(message)
            if message == "READY=1":
                self.ready.set()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", str(self.path))
        self._thread.join(DEADLINE_SECONDS)
        self._socket.close()


# As many files as a login usually gets. Not a `preexec_fn`: a fork beside threads of gRPC may hang before it is called.
FEW_FILES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def program(data_dir: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Systemd]]:
    """The server, ready."""
    number = len(list(tmp_path.glob("notify*")))
    systemd = Systemd(tmp_path / f"notify{number}")
    environment = {**os.environ, "NOTIFY_SOCKET": str(systemd.path), "WATCHDOG_USEC": "200000"}
    process = subprocess.Popen(
        [sys.executable, "-c", FEW_FILES, *SERVE, "serve", "--data-dir", str(data_dir), *FREE_PORTS],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert systemd.ready.wait(DEADLINE_SECONDS), "the coordinator never was ready"
        yield process, systemd
    finally:
        process.kill()
        process.communicate(timeout=DEADLINE_SECONDS)
        systemd.close()


def ctl(data_dir: Path, *arguments: str, program: Sequence[str] = CTL) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "ATOLL_CREDENTIALS": str(data_dir / "admin")}
    command = [*program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, env=environment)


def run_in_process(*arguments: str) -> AtollError:
    """The error that keeps it from serving."""
    result = CliRunner().invoke(serve.app, ["serve", *arguments])
    assert isinstance(result.exception, AtollError), result.output
    return result.exception


@pytest.mark.swarm
def test_the_program_serves_survives_a_kill_and_stops_on_sigterm(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    spec = tmp_path / "run.toml"
    spec.write_text(spec_toml())
    with program(data_dir, tmp_path) as (process, systemd):
        assert data_dir.stat().st_mode & 0o777 == 0o700
        files = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        assert files[0] == min(files[1], MAX_FILES) > 256, "it takes what the system allows"
        assert {path.stat().st_mode & 0o777 for path in data_dir.glob("coordinator.db*")} == {0o600}
        endpoints = json.loads((data_dir / "endpoints.json").read_text())
        assert endpoints["pid"] == process.pid
        assert set(endpoints) == {"version", "pid", "enrolment", "membership", "http", "public"}
        assert ctl(data_dir, "run", "create", str(spec), "--start").returncode == 0
        token = ctl(data_dir, "token", "create")
        assert re.fullmatch(r"atl1\.\S+\n", token.stdout)
        process.kill()  # nothing is flushed, nothing is closed
    with program(data_dir, tmp_path) as (process, systemd):
        runs = json.loads(ctl(data_dir, "run", "list", "--output", "json").stdout)
        assert [(run["run_id"], run["state"]) for run in runs["runs"]] == [("reef", "waiting")]
        tokens = json.loads(ctl(data_dir, "token", "list", "--output", "json").stdout)
        assert [item["id"] for item in tokens["tokens"]] == [token.stdout.split(".")[2]]
        listed = ctl(data_dir, "node", "list", program=[CTL[0], "-X", "importtime", *CTL[1:]])
        imported = {line.rpartition("|")[2].strip() for line in listed.stderr.splitlines()}
        assert (listed.returncode, "grpc" in imported, imported & SLOW) == (0, True, set())
        second = subprocess.run(
            [*SERVE, "serve", "--data-dir", str(data_dir), *FREE_PORTS],
            capture_output=True,
            text=True,
            timeout=DEADLINE_SECONDS,
        )
        assert second.returncode == ExitCode.RETRY
        assert f"another coordinator (process {process.pid})" in second.stderr
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=DEADLINE_SECONDS)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    assert systemd.messages[0] == "READY=1"  # all that was said has been read
    assert "WATCHDOG=1" in systemd.messages
    assert systemd.messages[-1] == "STOPPING=1"
    gone = ctl(data_dir, "node", "list")
    assert gone.returncode == ExitCode.UNREACHABLE
    assert "does not answer" in gone.stderr


# --- what keeps it from starting -------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--enrol-port", "--member-port", "--http-port"])
def test_a_port_in_use_is_named_with_its_flag(tmp_path: Path, flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ports = list(FREE_PORTS)
        ports[ports.index(flag) + 1] = port
        error = run_in_process("--data-dir", str(tmp_path / "d"), *ports)
    assert (error.reason, error.exit_code) == ("PortInUse", ExitCode.CONFIG)
    assert port in str(error)
    assert flag in error.remedy


def test_a_host_that_is_not_ours_is_a_config_error(tmp_path: Path) -> None:
    ports = ["--listen", "192.0.2.1", "--enrol-port", "17700"]
    error = run_in_process("--data-dir", str(tmp_path / "d"), *ports)
    assert (error.reason, error.exit_code) == ("ConfigError", ExitCode.CONFIG)


def test_a_data_directory_that_is_a_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "d").write_text("")
    error = run_in_process("--data-dir", str(tmp_path / "d"), *FREE_PORTS)
    assert (error.reason, error.exit_code) == ("DataDirUnusable", ExitCode.CONFIG)
    assert "--data-dir" in error.remedy


@pytest.mark.parametrize("name", ["ca.key", "ca.crt", "operator.key", "coordinator.db"])
def test_damaged_files_are_reported_and_never_written_over(tmp_path: Path, name: str) -> None:
    data_dir = tmp_path / "d"
    data_dir.mkdir(mode=0o700)
    if name.startswith("ca."):
        for other in ("ca.key", "ca.crt"):
            (data_dir / other).write_bytes(b"rubbish")
    damaged = b"rubbish " * 1000
    (data_dir / name).write_bytes(damaged)
    error = run_in_process("--data-dir", str(data_dir), *FREE_PORTS)
    assert error.exit_code == ExitCode.CONFIG
    assert error.reason in ("KeyFileCorrupt", "DatabaseCorrupt")
    assert (data_dir / name).read_bytes() == damaged


def test_half_an_authority_is_not_replaced(tmp_path: Path) -> None:
    data_dir = tmp_path / "d"
    data_dir.mkdir()
    (data_dir / "ca.key").write_bytes(b"rubbish")
    (data_dir / "operator.key").write_bytes(b"rubbish")  # made after the authority, so this is no first start
    error = run_in_process("--data-dir", str(data_dir), *FREE_PORTS)
    assert error.reason == "KeyFileCorrupt"
    assert "restore both" in error.remedy


def test_one_data_directory_serves_one_coordinator(tmp_path: Path) -> None:
    with lock_data_dir(tmp_path):
        error = run_in_process("--data-dir", str(tmp_path), *FREE_PORTS)
    assert (error.reason, error.exit_code) == ("AlreadyRunning", ExitCode.RETRY)
    assert f"process {os.getpid()}" in str(error)


def test_one_database_serves_one_coordinator(tmp_path: Path) -> None:
    """A second one with copied keys used to write over what the first had acknowledged."""
    shared = f"sqlite:///{tmp_path / 'shared.db'}"
    first = CoordinatorConfig(data_dir=make_private_dir(tmp_path / "first"), database=shared)
    _, controller = open_state(first, SystemClock())
    second = make_private_dir(tmp_path / "second")
    for name in ("ca.key", "ca.crt", "operator.key"):
        (second / name).write_bytes((first.data_dir / name).read_bytes())
    error = run_in_process("--data-dir", str(second), "--database", shared, *FREE_PORTS)
    assert (error.reason, error.exit_code) == ("AlreadyRunning", ExitCode.RETRY)
    assert f"process {os.getpid()} on {socket.gethostname()}, data directory {first.data_dir}" in str(error)
    controller.close()
    open_state(CoordinatorConfig(data_dir=second, database=shared), SystemClock())[1].close()


def test_a_missing_database_is_not_silently_replaced(tmp_path: Path) -> None:
    config, clock = CoordinatorConfig(data_dir=make_private_dir(tmp_path / "d")), SystemClock()
    keys, controller = open_state(config, clock)
    controller.close()
    for path in config.data_dir.glob("coordinator.db*"):
        path.unlink()
    before = {path.name for path in config.data_dir.iterdir()} | {"lock"}
    error = run_in_process("--data-dir", str(config.data_dir), *FREE_PORTS)
    assert (error.reason, error.exit_code) == ("DatabaseMissing", ExitCode.CONFIG)
    assert "--new-database" in error.remedy
    assert {path.name for path in config.data_dir.iterdir()} == before
    again, controller = open_state(config, clock, new_database=True)
    controller.close()
    assert again.ca.sha256 == keys.ca.sha256


def test_a_first_start_that_fails_for_its_database_is_a_first_start_again(tmp_path: Path) -> None:
    config = CoordinatorConfig(data_dir=tmp_path, database=f"sqlite:///{tmp_path / 'not yet' / 'c.db'}")
    with pytest.raises(DataDirUnusable):
        open_state(config, SystemClock())
    (tmp_path / "not yet").mkdir()
    open_state(config, SystemClock())[1].close()


def test_an_unknown_key_in_a_config_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("colour = 1\n")
    error = run_in_process("--config", str(tmp_path / "c.toml"), "--data-dir", str(tmp_path / "d"))
    assert error.exit_code == ExitCode.CONFIG
    assert "unknown key colour" in str(error)


def test_settings_are_shown_with_their_origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATOLL_COORDINATOR_HTTP_PORT", "8080")
    result = CliRunner().invoke(serve.app, ["config", "--output", "json"])
    settings = {item["key"]: (item["value"], item["origin"]) for item in json.loads(result.stdout)["settings"]}
    assert settings["http_port"] == (8080, "environment")
    assert settings["enrol_port"] == (7700, "default")
