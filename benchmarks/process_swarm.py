"""A swarm of real processes for benchmarks that disturb it: started with the demo's model, watched through its disks.

Nodes are asked for nothing while they are measured. When a round became durable on a node is the time of its manifest
file; what a node gave up and when it fell behind stands in its log.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import accumulate
from pathlib import Path
from typing import Any

from atoll.core.errors import AtollError, DeadlineExceeded
from atoll.core.files import make_private_dir
from atoll.core.manifest import Head
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.lab.demo import RUN, spec_toml
from atoll.lab.launcher import LocalSwarm, LoopbackHosts, ProgramHosts
from atoll.node.rounds.opener import COORDINATOR_SECONDS
from atoll.node.rounds.policy import policy_of
from atoll.node.rounds.stage_deadlines import StageDeadlines
from atoll.node.state.checkpoint import read_checkpoint
from atoll.node.state.manifests import ManifestStore
from atoll.node.system import child_processes
from benchmarks.common import Report

PATIENCE = timedelta(seconds=240)
DRAIN = timedelta(seconds=90)
_PACE_SECONDS = 0.8  # of an inner step: two cores carry eight nodes and the start of three
_INNER_STEPS = 5
_WARM_ROUNDS = 6
_LOST_AFTER_SECONDS = 20


@dataclass(frozen=True)
class Committed:
    """A round as one node holds it."""

    head: Head
    when: float  # unix seconds at which it became durable there


Chain = dict[int, Committed]


@dataclass
class LabSwarm:
    """One running swarm and what it leaves on its disks."""

    local: LocalSwarm
    names: list[str]
    spec: RunSpec
    peers: dict[str, str] = field(default_factory=dict)  # name → peer id
    endpoints: dict[str, Any] = field(default_factory=dict)  # of the coordinator
    _read: dict[tuple[Path, int], Head] = field(default_factory=dict)  # by file and when it was written

    # --- the chain -----------------------------------------------------------------------------------

    def chain(self, name: str) -> Chain:
        """The rounds after genesis that a node holds on its disk."""
        directory = self._run_dir(name) / "manifests"
        if not directory.exists():
            return {}
        store = ManifestStore(directory, RUN)
        found = {}
        for number, path in self._manifests(name):
            written = path.stat().st_mtime_ns
            head = self._read.get((path, written))
            if head is None:
                committed = store.get(number)
                if committed is None:
                    continue
                head = self._read[path, written] = Head(committed)
            found[number] = Committed(head, written / 1e9)
        return found

    def first_commits(self) -> Chain:
        """Every round that any node holds."""
        return first_commits(map(self.chain, self.names))

    def newest(self) -> int:
        """The highest round on any disk."""
        return max((number for name in self.names for number, _ in self._manifests(name)), default=0)

    def decide(self) -> frozenset[str]:
        """Names of those who were present at the end of the newest round."""
        heads = self.first_commits()
        present = heads[max(heads)].head.present
        return frozenset(name for name, peer in self.peers.items() if peer in present)

    def recovered_members(self, since: float) -> frozenset[str]:
        """Names of those who hold the newest round and were present at its end, if after `since` (unix seconds)."""
        chains = {name: self.chain(name) for name in self.names}
        newest = self.newest()
        return frozenset(
            name
            for name, chain in chains.items()
            if newest in chain and chain[newest].when > since and self.peers[name] in chain[newest].head.present
        )

    def newest_checkpoint(self, name: str) -> Head:
        """The round of a node's newest checkpoint, every byte of it checked against the digests in its manifest.

        Raises `CheckpointCorrupt`, `DataDirUnusable`, `ValueError` when there is none.
        """
        directory = self._run_dir(name) / "checkpoints"
        return read_checkpoint(max(path for path in directory.iterdir() if path.name.isdecimal())).head

    # --- what nodes and coordinator tell ---------------------------------------------------------------

    def log_lines(self, name: str, event: str) -> list[dict[str, Any]]:
        """The lines of a node's log that tell this event, with `when` in unix seconds, over all its lives."""
        found = []
        for line in (self.local.root / name / "log").read_text(errors="replace").splitlines():
            if line.startswith("{") and f'"{event}"' in line:
                plain = json.loads(line)
                if plain["event"] == event:
                    found.append({**plain, "when": datetime.fromisoformat(plain["timestamp"]).timestamp()})
        return found

    async def ctl(self, *arguments: str) -> dict[str, Any]:
        """What an `atollctl … --output json` prints."""
        result: dict[str, Any] = json.loads(await self.local.ctl(*arguments, "--output", "json"))
        return result

    # --- waiting and ending ----------------------------------------------------------------------------

    async def until(self, condition: Callable[[], bool], problem: str) -> None:
        """Wait. Raises `DeadlineExceeded`, and `ChildDied` when a program ended by itself."""
        await self.local.until(condition, problem, PATIENCE)

    async def becomes_true(self, condition: Callable[[], bool]) -> bool:
        """Whether it does in time; where that is what is measured."""
        try:
            await self.until(condition, "it did not come true")
        except DeadlineExceeded:
            return False
        return True

    async def stop_nodes(self) -> None:
        """SIGTERM to all nodes; each leaves the newest round that it holds as a checkpoint."""
        programs = [self.local.programs.pop(name) for name in self.names]
        await asyncio.gather(*(child_processes.stop(program.child, DRAIN) for program in programs))

    def _run_dir(self, name: str) -> Path:
        return self.local.root / name / "runs" / RUN

    def _manifests(self, name: str) -> list[tuple[int, Path]]:
        paths = (self._run_dir(name) / "manifests").glob("*.manifest")
        return [(int(path.stem), path) for path in paths if path.stem.isdecimal() and int(path.stem)]


def first_commits(chains: Iterable[Chain]) -> Chain:
    """Every round that is in one of these, as the node that had it first holds it."""
    merged: Chain = {}
    for chain in chains:
        for number, item in chain.items():
            if number not in merged or item.when < merged[number].when:
                merged[number] = item
    return merged


def node_names(count: int) -> list[str]:
    """What nodes on this machine are called."""
    return [f"node-{i + 1}" for i in range(count)]


async def start(root: Path, names: Sequence[str], corpus: Path, program_hosts: ProgramHosts | None = None) -> LabSwarm:
    """Coordinator, seed and nodes below `root`, some rounds after the first. The caller closes `local`, always.

    `program_hosts` is where they run: this machine as it is, or the hosts of a WAN.
    """
    toml = spec_of_nodes(len(names), corpus)
    return await start_run(
        root, names, toml, program_hosts or LoopbackHosts(), step_seconds=_PACE_SECONDS, rounds=_WARM_ROUNDS
    )


async def start_run(
    root: Path, names: Sequence[str], toml: str, program_hosts: ProgramHosts, *, step_seconds: float, rounds: int
) -> LabSwarm:
    """The same with a run of one's own, named as the demo's, whose steps take so long at least; after `rounds`."""
    local = LocalSwarm(make_private_dir(root), program_hosts)
    swarm = LabSwarm(local, list(names), parse_run_spec(toml))
    try:
        swarm.endpoints = await local.start_coordinator("--lost-after-seconds", str(_LOST_AFTER_SECONDS))
        await local.create_run(toml)
        await local.start_member("seed", "seed")
        await swarm.until(lambda: local.in_state("seed", "ready"), "the seed did not become ready")
        pace = ("--cpu-threads", "1", "--minimum-step-seconds", str(step_seconds))
        for name in names:
            await local.start_member(name, "node", *pace, "--log-format", "json")
        await swarm.until(lambda: swarm.newest() >= rounds, "the swarm did not begin")
        for name in names:
            status = await asyncio.to_thread(local.status, name)
            assert status is not None, f"{name} does not answer"
            swarm.peers[name] = status["peer_id"]
    except BaseException:
        await local.close()
        raise
    return swarm


def spec_of_nodes(nodes: int, corpus: Path) -> str:
    """The demo's run without an end, at full outer steps soon after the first rounds."""
    tokens = 10**9
    toml = spec_toml(
        seed=0,
        nodes=nodes,
        tokens=tokens,
        corpus=corpus,
        codec="int4",
        slowdowns=[1.0] * nodes,
        inner_steps=_INNER_STEPS,
    )
    toml = toml.replace(f"outer_warmup_tokens = {tokens}", "outer_warmup_tokens = 200000")
    return toml.replace(f"warmup_tokens = {tokens // 20}", "warmup_tokens = 20000")


def longest_round_seconds(spec: RunSpec, sizes: Sequence[int], nodes: int) -> float:
    """Seconds after a commit by which the next attempt is over whatever happens, from shipped deadlines.

    `sizes` are the layers' elements.

    A round is due after `round_max` at the latest; every peer before the opener may have to be passed over; each stage
    may take its ceiling, and the coordinator may be asked for a promise and for a vote.
    """
    policy = policy_of(spec, [0, *accumulate(sizes)])
    paces = StageDeadlines.of(policy)[0]
    due = policy.round_max + nodes * policy.open_timeout
    stages = (
        paces.ready.ceiling_seconds
        + paces.exchange_ceiling
        + paces.result.floor_seconds
        + paces.result.ceiling_seconds
        + paces.vote.ceiling_seconds
    )
    return due.total_seconds() + stages + 2 * COORDINATOR_SECONDS


@contextmanager
def report_on_exit(report: Report, notes: str) -> Iterator[None]:
    """Print and keep what was measured in the block, also when it fails: then marked as incomplete."""
    started = time.monotonic()
    child_processes.treat_sigterm_as_sigint()
    try:
        yield
    except BaseException as error:
        told = str(error) if isinstance(error, AtollError) else repr(error)
        minutes = (time.monotonic() - started) / 60
        report.accept("the benchmark runs to its end", target="yes", value=f"{minutes:.1f} min: {told}", holds=False)
        report.finish(f"INCOMPLETE. {notes}")
        raise
    report.finish(notes)
