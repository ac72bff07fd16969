"""Text that travels: a corpus of 10^12 tokens over home lines, and mirrors that lie, stall and crawl.

`home`: the shipped programs in the WAN lab. A web server makes the blocks of a corpus that claims 10^12 tokens. Four
nodes train it over lines of 20 Mbit/s; a newcomer joins with an empty disk. `paced`: the loader alone over such a line,
as fast as a device that trains 10,000 tokens a second. `mirrors`: the loader alone with three mirrors, of which one
lies in 1 % of its blocks, says nothing, or sends 1 kB/s; every window that it gives is compared with the truth.
`leases`: four members that train 30 s of such a device in
each round, with the shipped leases and an empty cache each; they read what they would train, as fast as they can.
`mixture`: shares of four sources after 10 M tokens.

    python -m benchmarks.data
    python -m benchmarks.data --kind mirrors paced --seconds 20
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atoll.core.clock import SystemClock
from atoll.core.data_position import SampleRange, advance, first_lease_samples, genesis_position
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.lab.launcher import LocalSwarm
from atoll.lab.wan.network import WanNetwork, wan_network
from atoll.lab.wan.topology import COORDINATOR, Topology, parse_topology
from atoll.node.data.blocks import BLOCK_BYTES
from atoll.node.data.open_corpus import CacheFolder, open_corpus
from atoll.node.data.sample_order import ShardedOrder, SourceWindows
from atoll.node.data.sharded_corpus import ShardedCorpus
from atoll.node.data.source_deal import WeighedSources
from atoll.node.training.loader import Loader
from atoll.node.training.sample_feed import SampleFeed
from benchmarks.common import Report
from benchmarks.corpus_server import CorpusServer, Files, endless_corpus

TOKENS = 10**12
SHARD_BYTES = 64 << 20
LINE_MBIT, RTT_MS = 20, 40
NODES = 4
LENGTH = 1024
TOKENS_PER_SECOND = 10_000.0
FAST_TOKENS_PER_SECOND = 300_000.0  # of the cells with bad mirrors, so that they have much to do
KINDS = ("mixture", "mirrors", "leases", "paced", "home")
LEASE_SAMPLES = 300  # of a member in a round: 30 s at 10,000 tokens a second
_STEP_SECONDS = 0.8  # of a node: two cores carry five
_START_SECONDS = 180
_LOOK_SECONDS = 0.2

SPEC = """version = 1
[run]
name = "reef"
min_nodes = {nodes}
stop_tokens = 1_000_000_000_000
seed = 3
[model]
preset = "nano"
dimension = 64
layers = 2
heads = 2
kv_heads = 2
hidden_dimension = 128
[data]
source = "corpus"
corpus = "{digest}"
mirrors = {mirrors}
sequence_length = {length}
validation_samples = 16
[optimizer]
micro_batch_samples = 4
[sync]
round_tokens = {round_tokens}
round_growth = 1000000.0
"""


def main() -> None:
    """Run the chosen kinds, print and keep the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--rounds", type=int, default=200, help="of four nodes at home, that bytes are counted in")
    parser.add_argument("--seconds", type=float, default=40.0, help="of paced loading, for each cell")
    arguments = parser.parse_args()
    report = Report("data")
    files, digest = endless_corpus(TOKENS, SHARD_BYTES)
    if "mixture" in arguments.kind:
        measure_mixture(report)
    if "mirrors" in arguments.kind:
        measure_mirrors(report, files, digest, arguments.seconds)
    if "leases" in arguments.kind:
        measure_leases(report, files, digest, arguments.rounds)
    if "paced" in arguments.kind:
        asyncio.run(measure_paced(report, files, digest, arguments.seconds))
    if "home" in arguments.kind:
        asyncio.run(measure_home(report, files, digest, arguments.rounds))
    report.finish(keep=set(arguments.kind) == set(KINDS))


def cell(report: Report, kind: str, case: str, **figures: Any) -> None:
    """A row; figures that it lacks stay empty."""
    keys = ("seconds", "stall_share", "stall_seconds", "first_batch_s", "tokens", "bytes_per_byte", "lies")
    report.cell(kind=kind, case=case, **{key: figures.get(key, "") for key in keys})


# --- mixture ------------------------------------------------------------------------------------------


def measure_mixture(report: Report) -> None:
    """Shares after 10 M tokens, against the weights."""
    weights, samples = (0.6, 0.25, 0.1, 0.05), 10_000_000 // LENGTH
    order = ShardedOrder(1, [SourceWindows((10**6,), 32)] * 4, [WeighedSources(0, weights)], 2 * LENGTH)
    counts = np.bincount([order.place(sample)[0] for sample in range(samples)], minlength=4)
    worst = max(abs(count / samples - weight) for count, weight in zip(counts, weights, strict=True))
    cell(report, "mixture", "10 M tokens", tokens=10_000_000)
    report.accept("shares of a mixture after 10 M tokens", target="within 0.1 %", value=worst, holds=worst <= 0.001)


# --- mirrors ------------------------------------------------------------------------------------------


def spec_of(digest: str, mirrors: list[str], round_tokens: int = 100_000) -> RunSpec:
    """A run of that corpus."""
    text = SPEC.format(nodes=NODES, digest=digest, mirrors=mirrors, length=LENGTH, round_tokens=round_tokens)
    return parse_run_spec(text)


@contextmanager
def opened(spec: RunSpec) -> Iterator[ShardedCorpus]:
    """The corpus on an empty disk."""
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(spec.data, None, CacheFolder(Path(folder)), SystemClock()).for_training(spec)
        try:
            yield corpus
        finally:
            corpus.close()


def train(corpus: ShardedCorpus, seconds: float, tokens_per_second: float) -> dict[str, Any]:
    """Take batches at the pace of a device. Returns what it took, what it waited, and a digest of the tokens."""
    loader = Loader(corpus, 4, SystemClock())
    clock, step = time.perf_counter, 4 * LENGTH / tokens_per_second
    steps = int(seconds / step)
    ranges: list[SampleRange] = [(0, 4 * steps)]
    digest, began = hashlib.sha256(), clock()
    loader.restart(SampleFeed(ranges))
    loader.next()  # the first batch is part of the join, not of the stall
    loader.stall_seconds, started = 0.0, clock()
    for number in range(1, steps):
        time.sleep(max(0.0, started + number * step - clock() - loader.stall_seconds))
        digest.update(loader.next().tokens_BT.numpy().astype(np.uint8).tobytes())
    took = clock() - started
    loader.close()
    return {
        "seconds": took,
        "stall_share": loader.stall_seconds / took,
        "first_batch_s": started - began,
        "tokens": 4 * steps * LENGTH,
        "digest": digest.hexdigest(),
    }


def truth(files: Files, spec: RunSpec, seconds: float) -> str:
    """The digest of the same windows, taken from the files without any mirror."""
    digest, step = hashlib.sha256(), 4 * LENGTH / FAST_TOKENS_PER_SECOND
    with CorpusServer(files) as server, opened(spec_of(str(spec.data.corpus), [server.address])) as corpus:
        for sample in range(4, 4 * int(seconds / step)):
            _, shard, start, stop = corpus.place(corpus.window(sample))
            digest.update(files(f"web/{shard:06d}.tokens", start, stop) or b"")
    return digest.hexdigest()


def measure_mirrors(report: Report, files: Files, digest: str, seconds: float) -> None:
    """Three mirrors, of which one is bad."""

    def lie(path: str, start: int, body: bytes) -> bytes:
        spoiled = bytearray(body)
        for at in range(0, len(body), BLOCK_BYTES):
            if hashlib.sha256(f"{path} {start + at}".encode()).digest()[0] < 3:  # 1 % of blocks
                spoiled[at] ^= 1
        return bytes(spoiled)

    cases: dict[str, Callable[[CorpusServer], None]] = {
        "honest": lambda server: None,
        "lies in 1 % of blocks": lambda server: setattr(server.faults, "spoil", lie),
        "says nothing": lambda server: setattr(server.faults, "stalls", True),
        "1 kB/s": lambda server: setattr(server.faults, "bytes_per_second", 1000.0),
    }
    right, usual = truth(files, spec_of(digest, ["-"]), seconds), 0.0
    for case, spoil in cases.items():
        with ExitStack() as stack:
            servers = [stack.enter_context(CorpusServer(files)) for _ in range(3)]
            for server in servers[1:]:
                server.faults.delay_seconds = 0.05  # so that the bad one is preferred while it is good
            with opened(spec_of(digest, [server.address for server in servers])) as corpus:
                spoil(servers[0])
                before = sum(server.body_bytes for server in servers)
                taken = train(corpus, seconds, FAST_TOKENS_PER_SECOND)
                bad = corpus.fetcher.mirrors[0]
                sent = sum(server.body_bytes for server in servers) - before
                cell(report, "mirrors", case, **_figures(taken, sent), lies=bad.lies)
        usual, times = usual or taken["seconds"], taken["seconds"] / (usual or taken["seconds"])
        same = taken["digest"] == right
        report.accept(f"{case}: no wrong token", target="digest of the truth", value=taken["digest"][:8], holds=same)
        report.accept(f"{case}: seconds", target="≤ 1.10 ×", value=times, holds=times <= 1.1)


def _figures(taken: dict[str, Any], sent: int) -> dict[str, Any]:
    keys = ("seconds", "stall_share", "first_batch_s", "tokens")
    return {**{key: taken[key] for key in keys}, "bytes_per_byte": sent / taken["tokens"]}


# --- leases -------------------------------------------------------------------------------------------


def measure_leases(report: Report, files: Files, digest: str, rounds: int) -> None:
    """Bytes that four members fetch for each byte that they train, with the leases of commits."""
    members, rng = [f"m{number}" for number in range(NODES)], np.random.default_rng(1)
    round_samples = NODES * LEASE_SAMPLES
    position = genesis_position(members, first_lease_samples(round_samples, NODES))
    trained = 0
    with ExitStack() as stack:
        server = stack.enter_context(CorpusServer(files))
        corpora = {peer: stack.enter_context(opened(spec_of(digest, [server.address]))) for peer in members}
        before, began = server.body_bytes, time.perf_counter()
        for _ in range(rounds):
            consumed = {}
            for peer, corpus in corpora.items():
                feed = SampleFeed(position.holdings[peer])
                corpus.follow(feed.upcoming)
                taken = feed.take(int(LEASE_SAMPLES * rng.uniform(0.8, 1.2)))
                consumed[peer] = taken.fresh
                for start in range(0, len(taken.samples), 16):
                    corpus.windows([corpus.window(sample) for sample in taken.samples[start : start + 16]])
            trained += sum(consumed.values()) * LENGTH
            position = advance(position, members, consumed, round_samples)
        seconds, ratio = time.perf_counter() - began, (server.body_bytes - before) / trained
    cell(report, "leases", f"{NODES} members, {rounds} rounds", seconds=seconds, tokens=trained, bytes_per_byte=ratio)
    name = f"bytes fetched per byte trained, {rounds} rounds of {NODES} members"
    report.accept(name, target="≤ 1.1", value=ratio, holds=ratio <= 1.1)


# --- a home line ---------------------------------------------------------------------------------------


def topology() -> Topology:
    """Homes with lines of 20 Mbit/s, and the coordinator's host, which has the mirror."""
    hosts = "".join(f'[[host]]\nname = "h{number}"\nregion = "homes"\n' for number in range(NODES + 1))
    routes = "".join(
        f'[[route]]\nbetween = ["{one}", "{other}"]\nrtt_ms = {rtt}\n'
        for one, other, rtt in (("centre", "centre", 1), ("centre", "homes", RTT_MS), ("homes", "homes", RTT_MS))
    )
    text = f"""description = "Homes of 20 Mbit/s"
[defaults]
uplink_mbit = {LINE_MBIT}
downlink_mbit = {LINE_MBIT}
[public]
region = "centre"
{hosts}{routes}"""
    return parse_topology(text, "homes")


async def mirror(network: WanNetwork, files: Files) -> CorpusServer:
    """A server on the coordinator's host."""
    address = network.address(COORDINATOR)
    return await network.inside(COORDINATOR, partial(CorpusServer, files, address))


async def measure_paced(report: Report, files: Files, digest: str, seconds: float) -> None:
    """One device at 10,000 tokens a second behind a line of 20 Mbit/s."""
    async with wan_network(topology()) as network:
        with await mirror(network, files) as server:
            spec = spec_of(digest, [server.address])

            def at_home() -> dict[str, Any]:
                began = time.perf_counter()
                with opened(spec) as corpus:
                    opening = time.perf_counter() - began
                    before = server.body_bytes
                    taken = train(corpus, seconds, TOKENS_PER_SECOND)
                    return {**taken, "opening_s": opening, "sent": server.body_bytes - before}

            taken = await network.inside("h0", at_home)
    cell(report, "paced", "20 Mbit/s, 40 ms", **_figures(taken, taken["sent"]))
    cell(report, "paced", "until the first batch", first_batch_s=taken["opening_s"] + taken["first_batch_s"])
    stall = taken["stall_share"]
    report.accept("data stall at 10 k tokens/s", target="≤ 0.01", value=stall, holds=stall <= 0.01)


async def measure_home(report: Report, files: Files, digest: str, rounds: int) -> None:
    """The shipped programs: bytes of four nodes over many rounds, then a newcomer with an empty disk."""
    with tempfile.TemporaryDirectory() as folder:
        async with wan_network(topology()) as network:
            with await mirror(network, files) as server:
                swarm = LocalSwarm(Path(folder), network)
                try:
                    await _home(report, swarm, server, digest, rounds)
                finally:
                    await swarm.close()


async def _home(report: Report, swarm: LocalSwarm, server: CorpusServer, digest: str, rounds: int) -> None:
    per_round = NODES * 2 * 4 * LENGTH  # about two inner steps of each
    await swarm.start_coordinator()
    await swarm.create_run(
        SPEC.format(nodes=NODES, digest=digest, mirrors=[server.address], length=LENGTH, round_tokens=per_round)
    )
    await swarm.start_member("seed", "seed")
    flags = ("--cpu-threads", "1", "--minimum-step-seconds", f"{_STEP_SECONDS:g}")
    for number in range(NODES):
        await swarm.start_member(f"h{number}", "node", *flags)
    await _wait_for(swarm, "h0", lambda status: status["round"] >= 2, _START_SECONDS)
    first, sent = _status(swarm, "h0"), server.body_bytes
    await _wait_for(swarm, "h0", lambda status: status["round"] >= first["round"] + rounds, 30.0 * rounds)
    last, sent = _status(swarm, "h0"), server.body_bytes - sent
    tokens = last["committed_tokens"] - first["committed_tokens"]
    ratio = sent / tokens
    stalls = [_status(swarm, f"h{number}")["data_stall_seconds"] for number in range(NODES)]
    case = f"{NODES} nodes, {last['round'] - first['round']} rounds"
    cell(report, "home", case, tokens=tokens, bytes_per_byte=ratio, stall_seconds=max(stalls))
    name = f"bytes fetched per byte trained, {rounds} rounds of {NODES} nodes, 8 samples of each in a round"
    report.accept(name, target="≤ 1.1", value=ratio, holds=ratio <= 1.1)
    began = time.time()
    await swarm.start_member(f"h{NODES}", "node", *flags)
    enrolled = swarm.root / f"h{NODES}" / "credentials.json"
    await swarm.until(enrolled.exists, "the newcomer did not enrol", timedelta(seconds=_START_SECONDS))
    since = enrolled.stat().st_mtime
    await _wait_for(swarm, f"h{NODES}", lambda status: status["steps"] >= 1, _START_SECONDS)
    took = time.time() - since
    cell(report, "home", "newcomer, empty disk", seconds=time.time() - began, first_batch_s=took)
    report.accept("first step after enrolment", target="≤ 60 s", value=took, holds=took <= 60)


def _status(swarm: LocalSwarm, name: str) -> dict[str, Any]:
    status = None
    while status is None:
        swarm.check()
        status = swarm.status(name)
    return status


async def _wait_for(swarm: LocalSwarm, name: str, holds: Callable[[dict[str, Any]], bool], seconds: float) -> None:
    await swarm.until(
        lambda: (status := swarm.status(name)) is not None and holds(status),
        f"{name} is late",
        timedelta(seconds=seconds),
    )


if __name__ == "__main__":
    main()
