"""Wrong starts of `atoll join`: each ends with a sentence, and spends no use of the token.

The coordinator is a real one, and so is the program. The operator's list has no node afterwards.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import socket
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from integration.coordinator.lab import Coordinator, Node, coordinator
from unit.coordinator.world import spec_toml

from atoll.coordinator.state.draft import Draft, Step
from atoll.coordinator.state.snapshot import State, StepTime
from atoll.core.clock import SystemClock
from atoll.core.files import make_private_dir
from atoll.core.identity import Identity
from atoll.core.node_reasons import reason_words
from atoll.core.tokens import JoinToken
from atoll.node.config import load
from atoll.node.start import enrol_only
from atoll.v1 import admin_pb2 as admin

BIN = Path(sys.executable).parent
TEXT = "".join(f"The {i}th wave of {i * i} broke on the reef; {i % 7} terns rose.\n" for i in range(3000))
BASE = b"weights"
WRONG = {
    "a port that another program uses": (78, "cannot listen on 127.0.0.1 port"),
    "a direct port that another program uses": (78, "cannot listen on 127.0.0.1 port"),
    "one port for two purposes": (78, "are both"),
    "an address of another machine": (78, "cannot listen on 192.0.2.1"),
    "a public address that is none": (78, "is not a host name"),
    "a name with capitals": (78, "cannot be a node's name"),
    "a device that does not exist": (78, "'quantum' is not a device"),
    "a GPU that does not exist": (78, "cuda:99 does not exist"),
    "a path without text": (78, "no training text at"),
    "a text that is empty": (78, "is empty"),
    "a text that is binary": (78, "text.bin"),
    "a text that is too small": (78, "is too small"),
    "another text than the run's": (78, "is not the run's"),
    "a directory that is no corpus": (78, "is not a corpus"),
    "another corpus than the run's": (78, "has another corpus"),
    "no directory of pretrained weights": (78, "has no directory of them"),
    "a directory of weights that is not there": (78, "no directory of pretrained weights at"),
    "a directory that lacks the weights": (78, "lacks model.safetensors"),
    "other pretrained weights": (78, "has SHA-256"),
    "too little memory for one layer": (78, "the model is too large for this device"),
    "a data directory that is a file": (78, "is not a directory"),
    "a full disk": (78, "cannot use"),
    "a daemon that uses the directory": (75, "another atoll daemon uses"),
    "a damaged key": (78, "identity.key"),
    "a clock that is wrong": (77, "behind the coordinator's"),
    "a banned identity": (77, "the operator banned this node"),
    "a run that was stopped": (1, "the operator stopped the run"),
    "a token that was revoked": (77, "revoked"),
    "a token with a wrong secret": (77, "its secret is wrong"),
    "an unknown setting": (78, "unknown key 'colour'"),
    "a limit out of its bounds": (78, "vram_fraction"),
    "hours that are none": (78, "not a window of the day"),
    "private ranges that are none": (78, "dial_ranges"),
}


@dataclass
class Start:
    """One try to join."""

    home: Coordinator
    token: JoinToken
    folder: Path
    undo: ExitStack
    flags: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    full_disk: bool = False

    @property
    def data_dir(self) -> Path:
        return self.folder / "node"

    def write(self, name: str, content: bytes | str) -> str:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return str(path)

    def taken_port(self) -> str:
        server = self.undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        return str(server.getsockname()[1])

    async def change_run(self, **changes: Any) -> None:
        """Change the row of the run, as what happened before would have."""

        def put(state: State, now: StepTime) -> Step[None]:
            draft = Draft(state, now)
            draft.put(replace(state.runs["reef"], **changes))
            return draft.done(None)

        await self.home.controller.do(put)

    async def run(self, verb: str = "join", *more: str) -> tuple[int, str]:
        """Exit code and standard error."""
        self.flags.pop("--base", None) if verb == "up" else None
        flags = {"--listen": "127.0.0.1", "--device": "cpu", "--cpu-threads": "1", **self.flags}
        command = [BIN / "atoll", verb, *more, "--data-dir", self.data_dir]
        command += ["--yes", "--token", "-"] if verb == "join" else []
        command = [*command, *(word for pair in flags.items() for word in pair)]
        if self.full_disk:  # no file grows beyond 4 KiB
            command = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *command]
        child = await asyncio.create_subprocess_exec(
            *map(str, command),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**{key: value for key, value in os.environ.items() if "ATOLL_" not in key}, **self.variables},
        )
        try:
            async with asyncio.timeout(240):
                printed, problems = await child.communicate(self.token.text().encode())
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        assert printed == b""
        return child.returncode or 0, problems.decode()


async def _spoil(start: Start, what: str) -> None:
    flags = start.flags
    match what:
        case "a port that another program uses":
            flags["--port"] = start.taken_port()
        case "a direct port that another program uses":
            start.variables["ATOLL_DIRECT_PORT"] = start.taken_port()
        case "one port for two purposes":
            flags["--port"] = start.variables["ATOLL_DIRECT_PORT"] = "7799"
        case "an address of another machine":
            flags["--listen"] = "192.0.2.1"
        case "a public address that is none":
            flags["--announce"] = "http://me:80"
        case "a name with capitals":
            flags["--name"] = "Basement PC"
        case "a device that does not exist":
            flags["--device"] = "quantum"
        case "a GPU that does not exist":
            flags["--device"] = "cuda:99"
        case "a path without text":
            flags["--data"] = "/no/such/text"
        case "a text that is empty":
            flags["--data"] = start.write("text.txt", "")
        case "a text that is binary":
            flags["--data"] = start.write("text.bin", bytes(range(256)) * 100)
        case "a text that is too small":
            flags["--data"] = start.write("text.txt", "One wave.")
        case "another text than the run's":
            await start.change_run(corpus_digest="ab" * 32, genesis=b"\x0a\x00")
        case "too little memory for one layer":
            flags["--memory-megabytes"] = "33.6"
        case "a data directory that is a file":
            start.write("node", "")
        case "a full disk":
            start.full_disk = True
        case "a daemon that uses the directory":
            lock = start.undo.enter_context((make_private_dir(start.data_dir) / "lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        case "a damaged key":
            start.write("node/identity.key", b"no key")
            (start.data_dir / "identity.key").chmod(0o600)
        case "a clock that is wrong":
            start.home.controller.clock = _Ahead()
        case "a banned identity":
            identity = Identity.load_or_create(make_private_dir(start.data_dir) / "identity.key")
            other = await start.home.token()
            await Node(start.home, identity, "ann").enrol(other)
            await start.home.admin.BanNode(admin.BanNodeRequest(node="ann"))
        case "a run that was stopped":
            await start.home.admin.StopRun(admin.RunRequest(run_id="reef"))
        case "a token that was revoked":
            await start.home.admin.RevokeToken(admin.RevokeTokenRequest(id=start.token.token_id))
        case "a token with a wrong secret":
            start.token = replace(start.token, secret="0" * 48)
        case "an unknown setting":
            start.variables["ATOLL_COLOUR"] = "red"
        case "a limit out of its bounds":
            flags["--vram-fraction"] = "7"
        case "hours that are none":
            flags["--hours"] = "noon"
        case "private ranges that are none":
            flags["--dial-ranges"] = "the cellar"
        case _:
            _spoil_weights(start, what)


def _spoil_weights(start: Start, what: str) -> None:
    match what:
        case "a directory that is no corpus":
            start.flags["--data"] = str(make_private_dir(start.folder / "corpus"))
        case "another corpus than the run's":
            start.write("corpus/corpus.json", "{}")
            start.flags["--data"] = str(start.folder / "corpus")
        case "no directory of pretrained weights":
            del start.flags["--base"]
        case "a directory of weights that is not there":
            start.flags["--base"] = "/no/such/weights"
        case "a directory that lacks the weights":
            start.flags["--base"] = str(make_private_dir(start.folder / "empty"))
        case "other pretrained weights":
            start.write("base/model.safetensors", b"other weights")
        case _:
            raise AssertionError(what)


def _spec(what: str, text: Path) -> str:
    if "corpus" in what:
        return spec_toml(data=f'source = "corpus"\ncorpus = "{"cd" * 32}"')
    spec = spec_toml(data=f'path = "{text}"')
    if "weights" in what:
        config = 'config = { model_type = "llama", vocab_size = 256, hidden_size = 64, num_hidden_layers = 2 }'
        digest = hashlib.sha256(BASE).hexdigest()
        files = f'[model.base]\nfiles = {{ "model.safetensors" = "{digest}" }}\n'
        spec += f'[model]\narchitecture = "huggingface"\n{config}\n{files}'
    return spec


@pytest.mark.parametrize(
    ("flags", "kind", "told"),
    [
        ({"--data": "/no/such/text"}, "failed: settings", "there is no training text at /no/such/text"),
        ({"--port": "taken"}, "failed: network", "cannot listen on 127.0.0.1 port"),
        ({"--data": "other"}, "failed: text unusable", "is too small"),
    ],
)
async def test_the_operator_sees_why_a_node_that_was_enrolled_does_not_start(
    tmp_path: Path, flags: dict[str, str], kind: str, told: str
) -> None:
    with ExitStack() as undo:
        async with coordinator(tmp_path / "c") as home:
            start = await start_of(tmp_path, home, "", undo)
            loaded = load({"data_dir": start.data_dir, "listen": "127.0.0.1", "device": "cpu"}, {}, None)
            await enrol_only(loaded, start.token, SystemClock())
            value = {"taken": start.taken_port(), "other": start.write("other.txt", "One wave.")}
            start.flags.update({key: value.get(word, word) for key, word in flags.items()})
            code, problems = await start.run("up")
            assert code == 78, problems
            (node,) = home.controller.state.nodes.values()
            view = await home.admin.GetNode(admin.GetNodeRequest(node=node.peer_id))
            assert view.left
            assert told in view.ended_detail
            assert kind == f"failed: {reason_words(view.ended)}"
            events = [event async for event in home.admin.Events(admin.EventsRequest())]
            assert [event.message for event in events if event.kind == "node.failed"] == [
                f"{node.name} {kind}: {view.ended_detail}"
            ]


async def test_a_node_that_was_banned_while_it_was_away_is_told_so(tmp_path: Path) -> None:
    with ExitStack() as undo:
        async with coordinator(tmp_path / "c") as home:
            start = await start_of(tmp_path, home, "", undo)
            loaded = load({"data_dir": start.data_dir, "listen": "127.0.0.1", "device": "cpu"}, {}, None)
            await enrol_only(loaded, start.token, SystemClock())
            (node,) = home.controller.state.nodes
            await home.admin.BanNode(admin.BanNodeRequest(node=node))
            del start.flags["--base"]
            code, problems = await start.run("up")
            assert (code, "the operator banned this node" in problems) == (77, True), problems
            assert "INTERNAL" not in problems
            assert "atollctl node unban" in problems


@pytest.mark.parametrize(
    ("what", "flags", "told"),
    [
        ("", {}, ""),
        ("ban", {}, "the operator banned this node"),
        ("stop", {}, "the operator stopped the run"),
        ("differs", {}, "is not the run's"),
        ("", {"ATOLL_DATA": "/no/such/text"}, "no training text at /no/such/text"),
        ("", {"ATOLL_MEMORY_MEGABYTES": "33.6"}, "the model is too large for this device"),
        ("weights", {}, "has no directory of them"),
    ],
)
async def test_doctor_is_red_where_training_is_impossible(
    tmp_path: Path, what: str, flags: dict[str, str], told: str
) -> None:
    with ExitStack() as undo:
        async with coordinator(tmp_path / "c") as home:
            start = await start_of(tmp_path, home, what, undo)
            base = {"base": start.flags.pop("--base")} if what == "weights" else {}
            loaded = load({"data_dir": start.data_dir, "listen": "127.0.0.1", "device": "cpu", **base}, {}, None)
            await enrol_only(loaded, start.token, SystemClock())
            (node,) = home.controller.state.nodes
            if what == "ban":
                await home.admin.BanNode(admin.BanNodeRequest(node=node))
            elif what == "stop":
                await home.admin.StopRun(admin.RunRequest(run_id="reef"))
            elif what == "differs":
                await start.change_run(corpus_digest="ab" * 32, genesis=b"\x0a\x00")
            start.variables = {"ATOLL_DEVICE": "cpu", "ATOLL_DISK_GIGABYTES": "0.1", **flags}
            child = await asyncio.create_subprocess_exec(
                *map(str, [BIN / "atoll", "doctor", "--data-dir", start.data_dir, "--output", "json"]),
                stdout=asyncio.subprocess.PIPE,
                env={**{key: value for key, value in os.environ.items() if "ATOLL_" not in key}, **start.variables},
            )
            async with asyncio.timeout(240):
                printed, _ = await child.communicate()
            findings = json.loads(printed)["doctor"]
            red = [item for item in findings if not item["ok"] and item["name"] in ("settings", "standing", "training")]
            assert bool(red) == bool(told), findings
            assert told in " ".join(item["found"] for item in red)
            assert (child.returncode != 0) or not told


class _Ahead(SystemClock):
    def unix(self) -> float:
        return super().unix() + 3600


async def start_of(tmp_path: Path, home: Coordinator, what: str, undo: ExitStack) -> Start:
    text = tmp_path / "books.txt"
    text.write_text(TEXT)
    await home.admin.CreateRun(admin.CreateRunRequest(spec_toml=_spec(what, text), start=True))
    start = Start(home, await home.token(), tmp_path, undo)
    start.write("base/model.safetensors", BASE)
    start.flags["--base"] = str(tmp_path / "base")
    return start


@pytest.mark.parametrize("what", WRONG)
async def test_a_wrong_start_spends_no_use_of_the_token_and_leaves_no_node(tmp_path: Path, what: str) -> None:
    code, words = WRONG[what]
    with ExitStack() as undo:
        async with coordinator(tmp_path / "c") as home:
            start = await start_of(tmp_path, home, what, undo)
            await _spoil(start, what)
            known = dict(home.controller.state.nodes)
            found, problems = await start.run()
            assert (found, words in problems) == (code, True), problems
            assert "Traceback" not in problems
            token = home.controller.state.tokens[start.token.token_id]
            assert token.uses_left == 1
            assert home.controller.state.nodes == known
