"""The whole way of a newcomer in a WAN, with the shipped programs: from `atoll join` to a first round that counts it.

Donors train all the while, so what they hold moves on every round. What the newcomer is doing is asked of its local
API; when a round counted it stands in the manifests on the donors' disks.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import RUN
from atoll.lab.wan.network import WanNetwork
from benchmarks.process_swarm import LabSwarm, start_run

_SEQUENCE = 128
_WARM_ROUNDS = 2  # one of them is timed
_LOOK_SECONDS = 0.2
_PATIENCE_ROUNDS = 8
_START_SECONDS = 120  # for programs to load

SPEC = """
version = 1
[run]
name = "{run}"
min_nodes = {donors}
stop_tokens = 1000000000
[model]
preset = "{preset}"
layers = {layers}
[data]
path = {corpus}
sequence_length = {sequence}
validation_samples = 2
[optimizer]
learning_rate = 1e-4
micro_batch_samples = 1
[sync]
round_tokens = {round_tokens}
round_growth = 1000000.0
round_max_seconds = {longest}
codec = "int4"
"""


@dataclass(frozen=True)
class Size:
    """A model whose state is about so large, and how it is trained: no more than two cores can bear."""

    megabytes: int
    preset: str
    layers: int
    core_seconds: float  # of a step of one sequence, on one core
    round_seconds: float  # much longer than the state takes on the link

    def toml(self, donors: int, corpus: Path) -> str:
        """The run's spec."""
        return SPEC.format(
            run=RUN,
            donors=donors,
            preset=self.preset,
            layers=self.layers,
            corpus=json.dumps(str(corpus)),
            sequence=_SEQUENCE,
            round_tokens=int(donors * self.round_seconds / self.pace(donors) * _SEQUENCE),
            longest=3 * self.round_seconds,
        )

    def pace(self, donors: int) -> float:
        """Seconds of a step, so that one core carries all nodes."""
        return max(0.5, self.core_seconds * (donors + 1))


SIZES = (Size(40, "micro", 6, 0.2, 15.0), Size(400, "30m", 16, 1.2, 60.0))


@dataclass(frozen=True)
class JoinTimes:
    """What one newcomer's way took."""

    state_bytes: int
    start_seconds: float  # until it asked for the state: programs load, the corpus is read
    fetch_seconds: float
    restarts: int  # times that donors moved on while it fetched
    rounds: int  # committed after it had the state, the first that counts it included
    total_seconds: float
    round_seconds: float  # before it came, median


@dataclass
class _Milestones:
    """Unix seconds."""

    began: float
    states: dict[str, float] = field(default_factory=dict)  # when the newcomer was first seen so
    counted: float = 0.0  # when the first round that counts it was committed


async def time_join(network: WanNetwork, root: Path, size: Size, donors: int, least: float) -> JoinTimes:
    """One newcomer; `least` seconds are what the state takes on its downlink.

    Raises `TimeoutError` when it is not counted in time, and as `start_run`.
    """
    corpus = root / "corpus.txt"
    write_python_corpus(corpus)
    hosts = [host.name for host in network.topology.trainers]
    names, newcomer = hosts[:donors], hosts[-1]
    toml, pace = size.toml(donors, corpus), size.pace(donors)
    swarm = await start_run(root / "swarm", names, toml, network, step_seconds=pace, rounds=_WARM_ROUNDS)
    try:
        seen = _Milestones(time.time())
        flags = ("--cpu-threads", "1", "--minimum-step-seconds", f"{pace:g}", "--log-format", "json")
        await swarm.local.start_member(newcomer, "node", *flags)
        async with asyncio.timeout(_START_SECONDS + 5 * least + _PATIENCE_ROUNDS * size.round_seconds):
            await _follow(swarm, newcomer, seen)
        commits = sorted(item.when for item in swarm.first_commits().values())
        layers = (await swarm.ctl("run", "show", RUN))["run"]["layers"]["layers"]
    finally:
        await swarm.local.close()
    complete = seen.states["training"]
    asked = seen.states.get("catching-up", complete)  # so short that no look saw it
    return JoinTimes(
        state_bytes=sum(8 * int(layer["parameters"]) for layer in layers),
        start_seconds=asked - seen.began,
        fetch_seconds=complete - asked,
        restarts=len(swarm.log_lines(newcomer, "head moved on during fetch")),
        rounds=sum(complete < it <= seen.counted for it in commits),
        total_seconds=seen.counted - seen.began,
        round_seconds=statistics.median(after - one for one, after in pairwise(commits) if after < seen.began),
    )


async def _follow(swarm: LabSwarm, newcomer: str, seen: _Milestones) -> None:
    """Until a round counted it."""
    while not seen.counted:
        swarm.local.check()
        status = await asyncio.to_thread(swarm.local.status, newcomer)
        if status is not None:
            seen.states.setdefault(status["state"], time.time())
            seen.counted = _first_counted(swarm, status["peer_id"])
        await asyncio.sleep(_LOOK_SECONDS)


def _first_counted(swarm: LabSwarm, peer_id: str) -> float:
    for _, item in sorted(swarm.first_commits().items()):
        if any(it.peer_id == peer_id and it.weight for it in item.head.manifest.contributions):
            return item.when
    return 0.0
