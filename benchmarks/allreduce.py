"""All-reduce over emulated wide-area links: Atoll beside hivemind, gloo and torchft, and what the link can carry.

For each setting one lab is built and its raw TCP goodput measured; then every method averages the same vectors among
the same hosts, one after the other: a first round on fresh connections ("cold"), then warm ones. A round lasts from the
first member's start to the last member's end. Its share of the link is the bound over that time; the bound is the bytes
that a butterfly or ring has to send, 2 (N-1)/N of the encoded vector a host, at the measured goodput. Between rounds is
a moment in which what ended says so to the others, as there is between real ones. For hivemind only the all-reduce is
timed, not the matchmaking before it, and for torchft the all-reduce and its vote, not the quorum.
gloo and torchft average one flat tensor, and once more (`-pieces`) 16 pieces at once over connections of their own; the
better counts. Peers run in environments of their own (`make peers`).

All hosts share this machine's cores, as no swarm's do: in `wan-100-slow` links are four times as slow and as long, so
that processors are four times as fast beside them.

    python -m benchmarks.allreduce                       # 160 MB over 100 Mbit/s × 80 ms, in fp16 and int8
    python -m benchmarks.allreduce --setting mixed --megabytes 10 40 160 --codec int4 --method atoll atoll-p2p
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from atoll.lab.wan.network import WanNetwork, wan_network
from atoll.lab.wan.topology import Topology, parse_topology
from atoll.node.exchange.codecs import CODECS
from benchmarks.common import Report
from benchmarks.lab_members import JOIN_SECONDS, ask_all, members
from benchmarks.peer_environments import python_of

METHODS = {  # what each can carry
    "atoll": ("fp32", "fp16", "int8", "int4"),
    "atoll-p2p": ("fp32", "fp16", "int8", "int4"),
    "gloo": ("fp32", "fp16"),
    "gloo-pieces": ("fp32", "fp16"),
    "hivemind": ("fp32", "fp16", "int8"),
    "torchft": ("fp32", "fp16"),  # its int8 needs a GPU
    "torchft-pieces": ("fp32", "fp16"),
}
OURS = ("atoll", "atoll-p2p")
CODEC_NAMES = ("fp32", "fp16", "int8", "int4")
WARM_ROUNDS = 3
QUEUE_MS = 100.0
SETTLE_SECONDS = 0.3  # after a round: the ends of its conversations have travelled
_ERRORS = {"fp32": 1e-6, "fp16": 1e-3, "int8": 0.03, "int4": 0.2}  # of the mean's root mean square, at most
Key = tuple[str, str, str, float]  # setting, method, codec, megabytes of fp32
_SHARES: Sequence[tuple[str, Key, str, float]] = (
    ("fp16, 160 MB, 100 Mbit/s × 80 ms, warm", ("wan-100", "atoll", "fp16", 160.0), "warm", 0.90),
    ("int8, 160 MB, 100 Mbit/s × 80 ms, warm", ("wan-100", "atoll", "int8", 160.0), "warm", 0.90),
    ("int4, 160 MB, 100 Mbit/s × 80 ms, warm", ("wan-100", "atoll", "int4", 160.0), "warm", 0.80),
    ("cold, fp16", ("wan-100", "atoll", "fp16", 160.0), "cold", 0.80),
    ("through P2P streams, fp16", ("wan-100", "atoll-p2p", "fp16", 160.0), "warm", 0.80),
    ("through P2P streams, fp16, slowly", ("wan-100-slow", "atoll-p2p", "fp16", 160.0), "warm", 0.80),
    ("250 Mbit/s × 80 ms, fp16", ("wan-250", "atoll", "fp16", 160.0), "warm", 0.85),
    ("250 Mbit/s × 80 ms, int8", ("wan-250", "atoll", "int8", 160.0), "warm", 0.85),
)
_SLOWEST = 0.08  # of the link: a round that takes longer is given up


@dataclass(frozen=True)
class Setting:
    """Hosts on links of these rates, all as far from each other."""

    name: str
    mbit: tuple[float, ...]  # by host, both ways
    rtt_ms: float
    slower: float = 1.0  # slow motion: rates divided, and times multiplied by that; queues hold as many bytes

    def topology(self) -> Topology:
        """One region, queues of 100 ms, cubic."""
        rtt_ms, queue_ms = self.rtt_ms * self.slower, QUEUE_MS * self.slower
        lines = [
            f'description = "{self.name}"', "[public]", 'region = "core"',
            "[[route]]", 'between = ["core", "core"]', f"rtt_ms = {rtt_ms}",
        ]  # fmt: skip
        for index, rate in enumerate(mbit / self.slower for mbit in self.mbit):
            lines += ["[[host]]", f'name = "h{index}"', 'region = "core"']
            lines += [f"uplink_mbit = {rate}", f"downlink_mbit = {rate}", f"queue_ms = {queue_ms}"]
        return parse_topology("\n".join(lines), self.name)


SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("wan-100", (100.0,) * 4, 80.0),
        Setting("wan-100-slow", (100.0,) * 4, 80.0, slower=4.0),
        Setting("wan-250", (250.0,) * 4, 80.0),
        Setting("metro-1000", (1000.0,) * 2, 20.0),
        Setting("near-100", (100.0,) * 4, 20.0),
        Setting("near-5", (5.0,) * 4, 15.0),
        Setting("mixed", (20.0, 100.0, 250.0, 500.0), 60.0),
    )
}


@dataclass(frozen=True)
class Task:
    """One vector to average."""

    elements: int
    codec: str

    @property
    def encoded_bytes(self) -> int:
        """Of the whole vector."""
        return CODECS[self.codec].encoded_bytes(self.elements)


def bound_seconds(encoded_bytes: float, goodput: Sequence[float]) -> float:
    """The least time in which hosts with these links (bytes per second, both ways) can average such a vector.

    Who reduces a share s sends the other shares to their reducers and s to everybody: 1 + s (N - 2) vectors, and
    receives as much. The best shares take everybody equally long; who is too slow even for its own vector reduces
    nothing.
    """
    hosts = len(goodput)
    if hosts == 2:
        return encoded_bytes / min(goodput)
    low, high = encoded_bytes / min(goodput), 2 * encoded_bytes / min(goodput)
    for _ in range(60):
        middle = (low + high) / 2
        shares = sum(max(0.0, middle * rate / encoded_bytes - 1) / (hosts - 2) for rate in goodput)
        low, high = (low, middle) if shares >= 1 else (middle, high)
    return high


async def goodput(network: WanNetwork) -> tuple[float, ...]:
    """Bytes per second of one TCP connection from each host to the next, one at a time: the raw link."""
    probe = [sys.executable, "-I", "-c", _PROBE]
    names = [host.name for host in network.topology.trainers]
    found = []
    for index, name in enumerate(names):
        fastest = max(range(len(names)), key=lambda i: (i != index, network.topology.host(names[i]).downlink_mbit))
        taker = names[fastest]
        rate = network.topology.host(name).uplink_mbit
        count = str(int(rate / 8 * 3.5 * 1e6))
        sink = await network.exec(
            taker, [*probe, "take", network.address(taker), count], stdout=asyncio.subprocess.PIPE
        )
        assert sink.stdout is not None
        await sink.stdout.readline()
        source = await network.exec(name, [*probe, "give", network.address(taker), count])
        async with asyncio.timeout(60):
            found.append(float((await sink.stdout.readline()).decode()))
            await asyncio.gather(sink.wait(), source.wait())
    return tuple(found)


_PROBE = """
import socket, sys, time
role, address, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
if role == "take":
    with socket.create_server((address, 5001)) as listening:
        print("here", flush=True)
        connection = listening.accept()[0]
        got, marks = 0, []
        while got < count:
            got += len(connection.recv(1 << 20) or sys.exit(1))
            marks.append((time.monotonic(), got))
        start = next(i for i, mark in enumerate(marks) if mark[1] > count / 3)  # after slow start
        print((marks[-1][1] - marks[start][1]) / (marks[-1][0] - marks[start][0]), flush=True)
else:
    with socket.create_connection((address, 5001)) as connection:
        piece = bytes(1 << 18)
        for _ in range(0, count, len(piece)):
            connection.sendall(piece)
"""


@dataclass(frozen=True)
class RoundFigures:
    """What one round came to."""

    seconds: float
    cpu_seconds: float  # of all members
    peak_bytes: float  # of the member that grew most, beyond what it held before
    error: float  # root mean square of the difference to the true mean, of its own, in the worst piece
    equal: bool  # all members hold the same bits

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> RoundFigures:
        """From all members' answers."""
        return cls(
            max(answer["ended"] for answer in answers) - min(answer["began"] for answer in answers),
            sum(answer["cpu_seconds"] for answer in answers),
            max(answer["peak_bytes"] for answer in answers),
            max(answer["error"] for answer in answers),
            len({answer["digest"] for answer in answers}) == 1,
        )


async def measure(
    network: WanNetwork, method: str, task: Task, bound: float, rounds: int, directory: Path, slower: float
) -> list[RoundFigures]:
    """The rounds, the cold one first."""
    limit = bound / _SLOWEST + 20
    rates = [min(host.uplink_mbit, host.downlink_mbit) for host in network.topology.trainers]
    done = []
    async with members(network, "benchmarks.allreduce_member", method, directory, python_of(method)) as joined:
        for number in range(rounds):
            request = {"elements": task.elements, "codec": task.codec, "number": number, "mbit": rates}
            await ask_all(joined, request, JOIN_SECONDS)
            await asyncio.sleep(SETTLE_SECONDS * slower if number else 0)
            answers = await ask_all(joined, {"go": limit}, limit + 30)
            problems = [answer["problem"] for answer in answers if answer.get("problem")]
            if problems:
                raise RuntimeError(problems[0])
            checks = await ask_all(joined, {"check": True}, JOIN_SECONDS)
            done.append(RoundFigures.of([answer | check for answer, check in zip(answers, checks, strict=True)]))
    return done


async def run(chosen: argparse.Namespace, report: Report) -> None:
    """All cells that were asked for, setting by setting."""
    for setting in (SETTINGS[name] for name in chosen.setting):
        with tempfile.TemporaryDirectory(prefix="atoll-") as place:
            async with wan_network(setting.topology()) as network:
                links = await goodput(network)
                for megabytes, codec, method in product(chosen.megabytes, chosen.codec, chosen.method):
                    if codec in METHODS[method]:
                        task = Task(int(megabytes * 1e6 / 4), codec)
                        directory = Path(place) / f"{method}-{codec}-{megabytes}"
                        shown = {"setting": setting.name, "mb": megabytes, "codec": codec, "method": method}
                        report.cell(
                            **shown,
                            **await cell(network, method, task, links, chosen.rounds, directory, setting.slower),
                        )
                        print(json.dumps(report.cells[-1]), flush=True)


async def cell(
    network: WanNetwork,
    method: str,
    task: Task,
    links: Sequence[float],
    warm: int,
    directory: Path,
    slower: float = 1.0,
) -> dict[str, Any]:
    """The figures of one; one that does not run is told with its reason, and counts for nobody."""
    bound = bound_seconds(task.encoded_bytes, links)
    try:
        rounds = await measure(network, method, task, bound, warm + 1, directory, slower)
    except (RuntimeError, TimeoutError) as error:
        figures = dict.fromkeys(("cold", "warm", "warm_worst", "seconds", "cpu_s_per_gb", "extra_memory", "error"))
        return {
            "bound_s": bound,
            "link_mb_per_s": min(links) / 1e6,
            **figures,
            "note": f"could not run: {str(error) or type(error).__name__}"[:90],
        }
    seconds = [it.seconds for it in rounds[1:]]
    gigabytes = 2 * (len(links) - 1) * task.encoded_bytes / 1e9
    return {
        "bound_s": bound,
        "link_mb_per_s": min(links) / 1e6,
        "cold": bound / rounds[0].seconds,
        "warm": bound / statistics.median(seconds),
        "warm_worst": bound / max(seconds),
        "seconds": statistics.median(seconds),
        "cpu_s_per_gb": statistics.median(it.cpu_seconds for it in rounds[1:]) / gigabytes,
        "extra_memory": max(it.peak_bytes for it in rounds) / (4 * task.elements),
        "error": max(it.error for it in rounds),
        "note": "" if all(it.equal for it in rounds) else "members differ",
    }


def judge(report: Report) -> None:
    """The issue's acceptance rows, for the cells that were asked for; one that could not run holds nothing."""
    cells = {(it["setting"], it["method"], it["codec"], it["mb"]): it for it in report.cells}
    failed = [it for it in report.cells if it["method"] in OURS and not _is_right(it)]
    report.accept(
        "every cell of ours ran, with equal bits and the true mean",
        target="yes",
        value=", ".join(f"{it['setting']} {it['mb']} {it['codec']} {it['method']}" for it in failed) or "yes",
        holds=not failed,
    )
    for name, key, figure, target in _SHARES:
        if cell := cells.get(key):
            value = cell[figure]
            report.accept(
                f"share of the link: {name}",
                target=f"≥ {target:.2f}",
                value=cell["note"] if value is None else value,
                holds=value is not None and value >= target,
            )
    for peer, target in (("hivemind", 1.6), ("gloo", 1.3), ("torchft", 1.0)):
        _judge_peer(report, cells, peer, target)
    memory = [it["extra_memory"] for it in report.cells if it["method"] in OURS and it["extra_memory"]]
    if memory:
        report.accept("extra memory over the fp32 size", target="≤ 1.5", value=max(memory), holds=max(memory) <= 1.5)


def _is_right(cell: dict[str, Any]) -> bool:
    return not cell["note"] and cell["error"] < _ERRORS[cell["codec"]]


def _judge_peer(report: Report, cells: dict[Key, dict[str, Any]], peer: str, target: float) -> None:
    """How many times as fast we are, beside the best of the peer's variants that ran."""
    theirs: dict[tuple[str, str, float], list[float | None]] = {}
    for (setting, method, codec, megabytes), it in cells.items():
        if method.partition("-")[0] == peer and (setting, "atoll", codec, megabytes) in cells:
            theirs.setdefault((setting, codec, megabytes), []).append(it["seconds"])
    ratios = []
    for (setting, codec, megabytes), seconds in theirs.items():
        ours = cells[setting, "atoll", codec, megabytes]["seconds"]
        if ran := [it for it in seconds if it]:
            ratios.append(min(ran) / ours if ours else 0.0)
    if not theirs:
        return
    of = f"of {len(theirs)} cells" + (
        f", {len(theirs) - len(ratios)} could not run" if len(ratios) < len(theirs) else ""
    )
    median, worst = (statistics.median(ratios), min(ratios)) if ratios else (None, None)
    report.accept(f"times {peer}, median {of}", target=f"≥ {target}", value=median,
                  holds=median is not None and median >= target)  # fmt: skip
    report.accept(f"times {peer}, worst {of}", target="> 1", value=worst, holds=worst is not None and worst > 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setting", nargs="+", choices=SETTINGS, default=["wan-100"])
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--codec", nargs="+", choices=CODEC_NAMES, default=["fp16", "int8"])
    parser.add_argument("--megabytes", nargs="+", type=float, default=[160.0], help="of fp32")
    parser.add_argument("--rounds", type=int, default=WARM_ROUNDS, help="warm ones")
    parser.add_argument("--name", default="allreduce", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    asyncio.run(run(chosen, report))
    judge(report)
    report.finish(
        "warm: median of the rounds after the first; shares are of raw TCP goodput in the same lab; extra memory is "
        "the peak beyond the vector and the result; processor time is of all members, per GB that they send; all hosts "
        "keep their congestion windows over idle times (deploy/sysctl.conf)"
    )


if __name__ == "__main__":
    main()
