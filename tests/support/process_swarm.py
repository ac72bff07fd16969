"""Whole swarms for tests: the lab's launcher, a small corpus and spec, and proof that nothing was left behind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from atoll.core.errors import Unreachable
from atoll.core.manifest import Head
from atoll.lab.launcher import LocalSwarm
from atoll.node.control.local_client import call
from atoll.node.state.manifests import ManifestStore

READY = ROUNDS = timedelta(seconds=300)  # these only end a test that hangs: a busy machine costs time, not a verdict
GONE = timedelta(seconds=60)
BUSY = timedelta(seconds=60)
SWARM_TEST = [pytest.mark.swarm, pytest.mark.timeout(1800)]
LOG_LINES, LOG_WIDTH = 80, 400  # of each log, after a failure
MARK = "REEF_TEST_ROOT"

SPEC = """
version = 1
[run]
name = "reef"
min_nodes = {nodes}
stop_tokens = {tokens}
{model}
[data]
path = "{corpus}"
sequence_length = 64
validation_samples = 8
[optimizer]
micro_batch_samples = 2
[sync]
round_tokens = {round_tokens}
round_max_seconds = 20
exchange_share = 1.0  # rounds come as fast as they can
codec = "{codec}"
part_elements = 8192
"""


MODEL = """[model]
preset = "nano"
dimension = 64
layers = 2
heads = 2
kv_heads = 2
hidden_dimension = 128"""


def write_corpus(path: Path) -> Path:
    path.write_text("".join(f"The {i}th wave of {i * i} broke on the reef; {i % 7} terns rose.\n" for i in range(6000)))
    return path


class ProcessSwarm(LocalSwarm):
    """A launcher with a test's shorthands."""

    endpoints: dict[str, Any]

    async def begin(
        self,
        *,
        nodes: int,
        tokens: int,
        round_tokens: int = 3000,
        codec: str = "int4",
        fragments: int = 1,
        round_growth: float = 0.1,
        model: str = MODEL,
        data: str = "",
        optimizer: str = "",
        seed_flags: Sequence[str] = (),
        **flags: str,
    ) -> None:
        """Coordinator, run and seed. `data`: keys of the run's corpus; default: a text file. `optimizer`: more keys."""
        corpus = write_corpus(self.root / "corpus.txt")
        self.endpoints = await self.start_coordinator(
            *(word for name, value in flags.items() for word in (f"--{name}", value))
        )
        rounds = {"round_tokens": round_tokens, "codec": codec}
        spec = SPEC.format(nodes=nodes, tokens=tokens, corpus=corpus, model=model, **rounds)
        spec = spec.replace("[optimizer]\n", f"[optimizer]\n{optimizer}\n")
        if data:
            spec = spec.replace(f'path = "{corpus}"\nsequence_length = 64', data)
        await self.create_run(f"{spec}fragments = {fragments}\nround_growth = {round_growth}\n")
        await self.start_member("seed", "seed", *seed_flags)
        await self.until(lambda: self.in_state("seed", "ready"), "seed not ready", READY)

    async def node(self, name: str, pace: float = 0.05, *flags: str) -> None:
        await self.start_member(name, "node", "--cpu-threads", "1", "--minimum-step-seconds", str(pace), *flags)

    async def reach(self, name: str, state: str) -> None:
        await self.until(lambda: self.in_state(name, state), f"{name} did not become {state}", READY)

    def status(self, name: str) -> dict[str, Any] | None:
        """None where no daemon runs, or hangs up. One that is busy for a while is waited for."""
        try:
            return call(self.root / name, "status", BUSY)
        except Unreachable:
            return None

    def round(self, name: str) -> int:
        status = self.status(name)
        return status["round"] if status else -1

    async def rounds(self, name: str, more: int) -> None:
        """Wait for `more` further committed rounds."""
        await self.until(lambda: self.status(name) is not None, f"{name} does not answer", READY)
        target = max(0, self.round(name)) + more
        await self.until(lambda: self.round(name) >= target, f"{name} did not reach round {target}", ROUNDS)

    async def json(self, *arguments: str) -> dict[str, Any]:
        """What an `atollctl … --output json` prints."""
        result: dict[str, Any] = json.loads(await self.ctl(*arguments, "--output", "json"))
        return result

    def anchor_digest(self, name: str) -> str:
        status = self.status(name)
        assert status is not None
        return hashlib.sha256(Path(status["anchor"]).read_bytes()).hexdigest()

    def chain(self, name: str) -> dict[int, Head]:
        """The manifests that a node has on disk, by round."""
        store = ManifestStore(self.root / name / "runs/reef/manifests", "reef")
        newest = store.newest()
        found = {number: store.get(number) for number in range(1, newest.round + 1)} if newest else {}
        return {number: Head(committed) for number, committed in found.items() if committed is not None}


def processes_of(root: Path) -> list[psutil.Process]:
    """Every living process that names a path below `root`, or whose ancestors' environment does (orphans too)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            ours = any(str(root) in word for word in process.cmdline()) or process.environ().get(MARK) == str(root)
            if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@contextlib.asynccontextmanager
async def process_swarm(root: Path) -> AsyncIterator[ProcessSwarm]:
    """A swarm that is ended afterwards, whatever happened, leaving no process, socket or temporary file."""
    swarm = ProcessSwarm(root)
    with nothing_left(root):
        try:
            yield swarm
        except BaseException:
            print_logs(root)
            raise
        finally:
            await swarm.close()


def print_logs(root: Path) -> None:
    """What the programs said, so that a failure which is seldom can be explained from what the test printed."""
    for log in sorted(root.glob("*/log")):
        lines = log.read_text(errors="replace").splitlines()
        print(f"--- {log}: {len(lines)} lines")
        for line in lines[-LOG_LINES:]:
            print(line[:LOG_WIDTH])


@contextlib.contextmanager
def nothing_left(root: Path) -> Iterator[None]:
    """Fails if the block leaves a process, a socket below `root`, or a temporary file.

    Whatever is started in the block inherits a mark and a temporary directory of its own, and so do its children.
    """
    temporary = root / "tmp"
    temporary.mkdir()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(MARK, str(root))
        environment.setenv("TMPDIR", str(temporary))
        yield
    _, alive = psutil.wait_procs(processes_of(root), timeout=GONE.total_seconds())
    assert not alive, [process.cmdline() for process in alive]
    left = [path for path in root.rglob("*") if path.is_socket()] + list(temporary.iterdir())
    assert not left, left
