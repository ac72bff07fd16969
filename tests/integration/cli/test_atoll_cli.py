"""The `atoll` program as people and scripts use it: start time, errors of bad input, exit codes."""

import asyncio
import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import tomllib
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from atoll.core.certs import CertificateAuthority
from atoll.core.errors import DeadlineExceeded, NotRunning
from atoll.core.tokens import new_join_token, parse_join_token
from atoll.node.cli.doctor import _port
from atoll.node.config import load
from atoll.node.control.local_api import LocalApi
from atoll.node.control.local_client import call

BIN = Path(sys.executable).parent
COMMANDS = (
    "status",
    "pause",
    "resume",
    "finish",
    "leave",
    "logs",
    "set",
    "config show",
    "doctor --help",
    "join --help",
    "data build --help",
    "eval --help",
    "identity rotate",
    "--help",
)
STATUS = {
    "name": "ann", "peer_id": "12D3Koo", "run": "reef", "roles": ["node"], "pid": 1, "coordinator": "host:1",
    "coordinator_connected": True, "stop_tokens": 1000, "state": "training", "detail": "training", "device": "cpu",
    "steps": 5, "tokens": 500, "tokens_per_second": 100.0, "step_seconds": 0.1, "train_loss": 2.5,
    "validation_loss": 2.25, "data_stall_seconds": 0.0, "samples_repeated": 0, "round": 3, "committed_tokens": 500,
    "plan_version": 1, "members": 2, "rounds_joined": 3, "rounds_committed": 3, "rounds_abandoned": 0,
    "rounds_left_out": 0, "averaging_bytes_sent": 1000, "averaging_bytes_fp32": 7700, "other_bytes_sent": 10,
    "trainer_restarts": 0, "anchor": "", "month_bytes": 10**9, "month_bytes_allowed": 0, "warnings": [],
}  # fmt: skip


def atoll(*arguments, stdin="", env=(), timeout=180):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
    return subprocess.run(
        [BIN / "atoll", *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=timeout,
        env={**environment, **dict(env)},
    )  # fmt: skip


def refused(done, code, *words):
    """Expect the exit code, a message on stderr, no traceback and an empty stdout."""
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(("place", "flags"), [("daemon.log", ()), ("runs/reef/trainer.log", ("--trainer",))])
def test_logs_prints_a_log_for_people_or_as_json(tmp_path, place, flags):
    written = tmp_path / place
    written.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        json.dumps({"event": f"step_{i}", "level": "info", "timestamp": f"2026-01-01T00:00:0{i}Z"}) for i in range(4)
    ]
    written.write_text("\n".join(lines))  # the last is still being written
    as_it_is = atoll("logs", *flags, "--data-dir", tmp_path, "--lines", 2)
    assert as_it_is.stdout.splitlines() == lines[1:]
    people = atoll("logs", *flags, "--data-dir", tmp_path, "--log-format", "console")
    assert [line.split()[-1] for line in people.stdout.splitlines()] == [f"step_{i}" for i in range(4)]
    following = [
        BIN / "atoll",
        "logs",
        *flags,
        "--follow",
        "--lines",
        "1",
        "--data-dir",
        tmp_path,
        "--log-format",
        "console",
    ]
    with subprocess.Popen(following, stdout=subprocess.PIPE, text=True) as child, written.open("a") as file:
        try:
            assert child.stdout.readline().split()[-1] == "step_2"
            for written_now, told in (("\n" + lines[0][:10], "step_3"), (lines[0][10:] + "\n", "step_0")):
                file.write(written_now)
                file.flush()
                assert child.stdout.readline().split()[-1] == told
            written.rename(written.with_name(f"{written.name}.1"))
            written.write_text(lines[1] + "\n")
            assert child.stdout.readline().split()[-1] == "step_1", "the new file after a rotation"
        finally:
            child.terminate()


@pytest.fixture
def token(tmp_path):
    """A valid token for a port on which no server listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        yield new_join_token("ab" * 32, f"127.0.0.1:{port}").text()  # bound: nobody else gets it


@pytest.fixture
def daemon(tmp_path):
    """A local API in a thread that answers like a daemon."""
    ready, done = threading.Event(), threading.Event()
    asked = []
    limits = {key: {"value": 1, "origin": "default"} for key in ("vram_fraction", "cpu_threads", "hours")}

    async def answer(request):
        asked.append(request)
        return {**STATUS, "limits": limits}

    async def serve():
        api = LocalApi(tmp_path, dict.fromkeys(("status", "pause", "resume", "finish", "leave", "set"), answer))
        await api.start()
        ready.set()
        await asyncio.to_thread(done.wait)
        await api.close()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(180)
    yield asked
    done.set()
    thread.join()


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_slow_packages_that_it_does_not_need(command, tmp_path):
    program = (
        "import sys; from atoll.lab.cli.main import main\n"
        f"sys.argv = ['atoll', *{command.split()!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('heavy:', sorted({'torch', 'hivemind', 'transformers', 'numpy', 'structlog'} & set(sys.modules)))"
    )
    environment = {**os.environ, "ATOLL_DATA_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=180)
    assert "heavy: []" in done.stdout, done.stdout + done.stderr


def test_status_prints_the_daemons_answer(daemon, tmp_path):
    done = atoll("status", "--data-dir", tmp_path, "--output", "json")
    shown = json.loads(done.stdout)
    assert shown["version"] == 1
    assert shown["status"].items() >= STATUS.items()
    text = atoll("status", "--data-dir", tmp_path)
    assert text.returncode == 0
    for word in ("ann", "reef", "training", "2.250", "7.7×"):
        assert word in text.stdout


def test_status_tells_when_the_run_is_finished_if_somebody_knows(daemon, tmp_path, monkeypatch):
    for eta, words in (
        (None, "finishes  –"),
        (round(1000 * (time.time() + 7200 + 590)), "finishes  in 2 h 0"),
        (1, "finishes  in 0 s"),
    ):
        monkeypatch.setitem(STATUS, "eta_unix_ms", eta)
        assert words in atoll("status", "--data-dir", tmp_path).stdout


def test_status_tells_what_the_node_contributed_if_the_coordinator_knows(daemon, tmp_path, monkeypatch):
    credit = {"tokens": 1_200_000, "rounds": 45, "rank": 3, "nodes": 20}
    for told, words in (
        (None, "credit  –"),
        (credit, "credit  1.20 M tokens in 45 rounds · rank 3 of 20"),
        ({**credit, "rounds": 1}, "tokens in 1 round ·"),
    ):
        monkeypatch.setitem(STATUS, "credit", told)
        assert words in atoll("status", "--data-dir", tmp_path).stdout


def test_status_tells_how_the_training_text_comes(daemon, tmp_path, monkeypatch):
    told = {
        "data_stall_seconds": 12.5,
        "data_stall_share": 0.034,
        "data_bytes_fetched": 3_000_000,
        "data_fetched_per_trained": 1.07,
        "sources": [
            {
                "name": "web",
                "tokens": 1_200_000,
                "share": 0.799,
                "share_wanted": 0.8,
                "epochs": 0.4,
                "validation_loss": 3.25,
            },
        ],
        "data_blocks": {"cache": 1, "directory": 0, "server": 3, "members": 0},
        "data_mirrors": [{"name": "https://a", "kind": "server", "bytes": 0, "problem": "https://a answers 503 [x]"}],
        "warnings": ["training text: 2 unusable lines left out (the first is a.jsonl:[7]: no JSON)"],
    }
    for key, value in told.items():
        monkeypatch.setitem(STATUS, key, value)
    lines = atoll("status", "--data-dir", tmp_path, env={"COLUMNS": "200"}).stdout
    for words in (
        "2.9 MiB fetched · 1.07 × what was trained",
        "25% from this disk's cache, 75% from mirrors",
        "3.4% of recent training time · 12.5 s",
        "1.20 M tokens · 0.40 epochs · 79.9% of what was trained, 80.0% wanted · validation 3.250",
        "https://a answers 503 [x]",
        "a.jsonl:[7]: no JSON",
    ):
        assert words in lines


def test_pause_sends_its_duration(daemon, tmp_path):
    assert atoll("pause", "--for", "2h", "--data-dir", tmp_path).returncode == 0
    assert daemon[-1] == {"command": "pause", "seconds": 7200.0}
    refused(atoll("pause", "--for", "soon", "--data-dir", tmp_path), 2, "not a duration")


def test_set_sends_the_changes_and_prints_the_limits(daemon, tmp_path):
    done = atoll("set", "cpu-threads", "2", "hours", "22:00-07:00", "--data-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert daemon[-1] == {"command": "set", "limits": {"cpu_threads": "2", "hours": "22:00-07:00"}}
    assert "cpu_threads" in done.stdout
    assert "vram_fraction" not in done.stdout
    assert "vram_fraction" in atoll("set", "--data-dir", tmp_path).stdout
    assert daemon[-1] == {"command": "set", "limits": {}}
    refused(atoll("set", "cpu_threads", "--data-dir", tmp_path), 2, "'cpu_threads' has no value")


def test_resume_sends_force_and_prints_the_limit_that_pauses_the_node(daemon, tmp_path):
    assert "Training again" in atoll("resume", "--force", "--data-dir", tmp_path).stderr
    assert daemon[-1] == {"command": "resume", "force": True}


def test_set_without_a_daemon_applies_at_the_next_start(tmp_path):
    done = atoll("set", "upload_mbit_per_second", "20", "on_battery", "train", "--data-dir", tmp_path)
    assert done.returncode == 0
    assert "next start" in done.stderr
    shown = json.loads(atoll("config", "show", "--data-dir", tmp_path, "--output", "json").stdout)["config"]
    assert (shown["upload_mbit_per_second"], shown["on_battery"]) == (20.0, "train")
    before = (tmp_path / "node.toml").read_text()
    refused(atoll("set", "cpu_threads", "1", "on_battery", "maybe", "--data-dir", tmp_path), 78, "on_battery", "pause")
    refused(atoll("set", "port", "1", "--data-dir", tmp_path), 78, "port", "vram_fraction")
    assert (tmp_path / "node.toml").read_text() == before


@pytest.fixture
def deaf(tmp_path):
    """A data directory whose daemon closes the connection without an answer."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "atoll.sock"))
        server.listen()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield tmp_path
        server.shutdown(socket.SHUT_RDWR)
        serving.join(60)


def test_set_writes_nothing_if_the_daemon_does_not_answer(deaf):
    refused(atoll("set", "cpu_threads", "3", "--data-dir", deaf), 69, "closed the connection")
    assert not (deaf / "node.toml").exists()


def test_a_daemon_that_answers_late_is_not_reported_as_missing(tmp_path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "atoll.sock"))
        server.listen()
        with pytest.raises(DeadlineExceeded, match="did not answer within 0 s"):
            call(tmp_path, "status", timedelta(milliseconds=100))
        waiting = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(1000):  # as many as may wait
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(str(tmp_path / "atoll.sock"))
        with pytest.raises(DeadlineExceeded):
            call(tmp_path, "status", timedelta(milliseconds=100))
        for one in waiting:
            one.close()
    with pytest.raises(NotRunning):
        call(tmp_path, "status")


def test_doctor_accepts_a_port_used_by_the_node_itself(daemon, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = load({"data_dir": tmp_path, "listen": "127.0.0.1", "port": taken.getsockname()[1]}, {}, None).config
        (ours,) = _port(config)
        assert (ours.ok, ours.found) == (True, f"{config.port} is in use by this node")
        (others,) = _port(replace(config, data_dir=tmp_path / "another"))
        assert not others.ok
    (free,) = _port(config)
    assert free.ok


def test_doctor_names_limits_that_have_no_effect(tmp_path):
    environment = {"ATOLL_VRAM_FRACTION": "0.5", "ATOLL_DEVICE": "cpu", "ATOLL_HOURS": "22:00-07:00"}
    found = json.loads(atoll("doctor", "--data-dir", tmp_path, "--output", "json", env=environment).stdout)["doctor"]
    said = {item["name"]: item["found"] for item in found}
    assert "has no effect on a CPU" in said["vram_fraction"]
    assert "at 22:00-07:00" in said["limits"]


def test_only_the_owner_can_use_the_socket(daemon, tmp_path):
    assert (tmp_path / "atoll.sock").stat().st_mode & 0o777 == 0o600


def test_a_data_directory_with_a_long_path_works_too(tmp_path):
    deep = tmp_path / ("deep" * 20) / ("deeper" * 10)
    deep.mkdir(parents=True)

    async def serve():
        api = LocalApi(deep, {"status": lambda _: _status()})
        await api.start()
        answer = await asyncio.to_thread(call, deep, "status")
        await api.close()
        return answer

    async def _status():
        return STATUS

    assert asyncio.run(serve()) == STATUS


@pytest.mark.parametrize("command", ["status", "pause", "resume", "finish", "leave"])
def test_commands_report_that_no_daemon_runs(command, tmp_path):
    refused(atoll(command, "--data-dir", tmp_path), 69, "no atoll daemon runs", "atoll join")


# --- joining with bad input ------------------------------------------------------------------------


def test_a_token_in_argv_is_refused_without_being_repeated(token, tmp_path):
    done = atoll("join", "--token", token, "--data-dir", tmp_path)
    refused(done, 2, "command line")
    assert token.split(".")[3] not in done.stderr


@pytest.mark.parametrize("text", ["", "atl1.nonsense", "hello", "atl2." + "a" * 64])
def test_an_invalid_token_is_refused(text, tmp_path):
    refused(atoll("join", "--token", "-", "--data-dir", tmp_path, stdin=text + "\n"), 77, "join token")


@pytest.mark.parametrize("quotes", ['""', "''", "``", "“”", "<>"])
def test_a_token_may_be_pasted_with_its_quotation_marks(token, quotes):
    assert parse_join_token(f" {quotes[0]}{token}{quotes[1]}\n").text() == token


def test_status_advises_up_to_a_node_that_left(tmp_path):
    refused(atoll("status", "--data-dir", tmp_path), 69, "start one with `atoll join`")
    (tmp_path / "credentials.json").write_text("{}")
    refused(atoll("status", "--data-dir", tmp_path), 69, "start one with `atoll up`")


def test_config_show_prints_toml_that_reads_back(tmp_path):
    odd = tmp_path / 'a "name" 🪸\x7f'
    environment = {"ATOLL_DATA_DIR": str(odd), "ATOLL_DATA": "é \\ 🪸", "ATOLL_DIRECT": "false", "ATOLL_PORT": "7711"}
    for flags in ((), ("--origin",)):
        shown = atoll("config", "show", *flags, env=environment).stdout
        (tmp_path / "shown.toml").write_text(shown)
        again = json.loads(atoll("config", "show", "--config", tmp_path / "shown.toml", "--output", "json").stdout)
        assert again["config"] == json.loads(atoll("config", "show", "-o", "json", env=environment).stdout)["config"]
    assert tomllib.loads(shown)["direct"] is False


def test_up_takes_every_setting_of_join(tmp_path):
    told = [atoll(verb, "--help", env={"COLUMNS": "200"}).stdout for verb in ("join", "up")]
    options = [set(re.findall(r"--[a-z][a-z-]+", text)) for text in told]
    assert options[0] - options[1] == {"--token", "--yes"}


def test_join_without_a_token_is_refused(tmp_path):
    refused(atoll("join", "--data-dir", tmp_path), 2, "no token")
    refused(atoll("join", "--token", f"file:{tmp_path}/none", "--data-dir", tmp_path), 78, "cannot read the token")
    (tmp_path / "seed.tok").write_text("…")
    refused(atoll("join", "--token", tmp_path / "seed.tok", "--data-dir", tmp_path), 2, "neither", f"file:{tmp_path}")
    refused(atoll("up", "--data-dir", tmp_path), 2, "has not joined")
    refused(atoll("up", "--data-dir", tmp_path / "new", "--data", __file__), 2, "has not joined")
    assert not (tmp_path / "node.toml").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--device", "nonsense"], "'nonsense' is not a device"),
        (["--device", "cpu,"], "has an empty name at a comma"),
        (["--device", "cuda:99"], "cuda:99 does not exist"),
        (["--data", "/no/such/text"], "no training text at /no/such/text"),
    ],
)
def test_join_checks_the_machine_before_it_spends_a_token(tmp_path, token, flags, words):
    refused(atoll("join", "--token", "-", "--data-dir", tmp_path / "node", *flags, stdin=token), 78, words)
    assert not (tmp_path / "node").exists()


def test_a_corpus_file_named_like_a_pattern_is_found(tmp_path, token):
    text = tmp_path / "books [1]"
    text.mkdir()
    flags = "--data-dir", tmp_path / "node", "--data", text
    refused(atoll("join", "--token", "-", *flags, stdin=token), 69, "no coordinator answers")


def test_doctor_checks_the_configured_device(tmp_path):
    done = atoll("doctor", "--data-dir", tmp_path, env={"ATOLL_DEVICE": "cuda:99"})
    assert done.returncode != 0
    assert "cuda:99 does not exist" in done.stdout
    assert "2 × " in atoll("doctor", "--data-dir", tmp_path, env={"ATOLL_DEVICE": "cpu,cpu"}).stdout


def test_join_reports_an_unreachable_coordinator(token, tmp_path):
    refused(
        atoll("join", "--token", "-", "--data-dir", tmp_path, stdin=token), 69, "no coordinator answers", "firewall"
    )
    assert not (tmp_path / "credentials.json").exists()


def test_join_refuses_a_coordinator_with_another_authority(tmp_path):
    """Another server listens at the token's address: the node sends it nothing."""
    authority = CertificateAuthority.load_or_create(tmp_path / "ca.key", tmp_path / "ca.crt", time.time())
    leaf = authority.issue_with_new_key("atoll://coordinator", time.time(), server=True)
    (tmp_path / "leaf.pem").write_bytes(leaf.chain_pem + leaf.key_pem)
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "leaf.pem")
    context.num_tickets = 0  # a client that closes before it reads one resets the connection
    received = []

    def serve(listener):
        connection, _ = listener.accept()
        with context.wrap_socket(connection, server_side=True) as tls:
            received.append(tls.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        token = new_join_token("cd" * 32, f"127.0.0.1:{listener.getsockname()[1]}").text()
        done = atoll("join", "--token", "-", "--data-dir", tmp_path / "node", stdin=token)
        thread.join(60)
    refused(done, 77, "is not the coordinator that created this token")
    assert received == [b""]


def test_a_corrupt_key_is_named_and_kept(token, tmp_path):
    (tmp_path / "identity.key").write_bytes(b"garbage")
    refused(atoll("join", "--token", "-", "--data-dir", tmp_path, stdin=token), 78, "identity.key", "backup")
    assert (tmp_path / "identity.key").read_bytes() == b"garbage"


def test_corrupt_credentials_are_named_and_kept(tmp_path):
    (tmp_path / "credentials.json").write_text("{")
    refused(atoll("up", "--data-dir", tmp_path), 78, "credentials.json")
    assert (tmp_path / "credentials.json").read_text() == "{"


def test_an_unwritable_data_directory_is_reported(token, tmp_path):
    file = tmp_path / "file"
    file.write_text("not a directory")
    refused(atoll("join", "--token", "-", "--data-dir", file / "node", stdin=token), 78, "cannot use")


def test_a_data_directory_in_use_is_reported(token, tmp_path):
    import fcntl

    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused(atoll("join", "--token", "-", "--data-dir", tmp_path, stdin=token), 75, "another atoll daemon")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("colour = 'red'", ["unknown key 'colour'"]),
        ("port = 'many'", ["port", "whole number"]),
        ("port = 70000", ["port", "between"]),
        ("log_level = 'loud'", ["log_level", "debug"]),
        ("port =", ["not TOML"]),
    ],
)
def test_a_bad_configuration_names_the_key_and_the_file(text, words, tmp_path):
    config = tmp_path / "node.toml"
    config.write_text(text)
    refused(atoll("config", "show", "--config", config, "--data-dir", tmp_path / "d"), 78, str(config), *words)


def test_settings_have_the_documented_precedence(tmp_path):
    config = tmp_path / "mine.toml"
    config.write_text("port = 1111\ncpu_threads = 3\nname = 'from-file'\n")
    environment = {"ATOLL_PORT": "2222", "ATOLL_DATA_DIR": str(tmp_path / "node")}
    done = atoll("config", "show", "--origin", "--config", config, "--output", "json", env=environment)
    shown = json.loads(done.stdout)["config"]
    assert shown["port"] == {"value": 2222, "origin": "environment"}
    assert shown["cpu_threads"] == {"value": 3, "origin": str(config)}
    assert shown["device"]["origin"] == "default"
    refused(atoll("config", "show", env={"ATOLL_COLOUR": "red"}), 78, "unknown key 'colour'", "environment")


def test_up_uses_the_settings_of_join(token, tmp_path):
    atoll("join", "--token", "-", "--data-dir", tmp_path, "--port", "7711", "--cpu-threads", "1", stdin=token)
    shown = json.loads(atoll("config", "show", "--data-dir", tmp_path, "--output", "json").stdout)["config"]
    assert (shown["port"], shown["cpu_threads"]) == (7711, 1)
    assert "secret" not in (tmp_path / "node.toml").read_text()
    assert token.split(".")[3] not in (tmp_path / "node.toml").read_text()


def test_a_second_join_keeps_the_settings_of_the_first(token, tmp_path):
    atoll("join", "--token", "-", "--data-dir", tmp_path, "--port", "7711", stdin=token)
    atoll("join", "--token", "-", "--data-dir", tmp_path, "--cpu-threads", "2", stdin=token)
    shown = json.loads(atoll("config", "show", "--data-dir", tmp_path, "--output", "json").stdout)["config"]
    assert (shown["port"], shown["cpu_threads"]) == (7711, 2)


def test_a_relative_data_directory_becomes_absolute(tmp_path):
    environment = {"ATOLL_DATA_DIR": "somewhere"}
    shown = json.loads(atoll("config", "show", "--output", "json", env=environment).stdout)["config"]
    assert Path(shown["data_dir"]).is_absolute()


def test_version_options_print_the_version():
    done = atoll("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("atoll ")


def test_the_pipeline_demo_refuses_options_that_it_would_ignore():
    done = atoll("demo", "--pipeline", "--nodes", "8", "--kill-coordinator")
    refused(done, 2, "--pipeline cannot be combined with --nodes, --kill-coordinator")


def test_ctrl_c_at_a_question_exits_as_elsewhere(tmp_path):
    """Runs on its own terminal, which sends the interrupt after the question."""
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # what a shell runs in the background ignores it
        environment = {key: value for key, value in os.environ.items() if not key.startswith("ATOLL_")}
        os.execve(BIN / "atoll", ["atoll", "join", "--data-dir", str(tmp_path / "node")], environment)
    shown = b""
    while b"Join token" not in shown:
        shown += os.read(terminal, 1024)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # the other end is closed
        while select.select([terminal], [], [], 180.0)[0]:
            shown += os.read(terminal, 1024)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130, shown
    assert b"Traceback" not in shown
    assert not (tmp_path / "node").exists()
