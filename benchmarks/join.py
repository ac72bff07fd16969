"""Joining: seconds from nothing to verified anchor and momentum, from one to seven donors, honest and poisoned.

Donors are processes with a p2pd each, on loopback. The yardstick is one raw libp2p stream of the same run that
carries as many bytes in frames of the same size, and nothing is hashed. To the first counted round it is the round's
time more, whatever that is.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from atoll.core import log
from atoll.core.frames import FrameKind
from atoll.core.identity import Identity
from atoll.core.plan import Plan
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.outer_step import matches_digests
from atoll.node.state.state_server import StateServer
from atoll.node.swarm.host import SwarmHost
from atoll.node.wire.transport import Stream
from benchmarks.common import Report
from benchmarks.join_state import RUN, commit, make_state, mapped, offsets_of, plan_of, read_head, write_head
from benchmarks.member_host import OPERATOR_KEY, start_host

MEGABYTES = (40, 400)  # anchor and momentum together
DONORS = (1, 3, 4, 7)
REPETITIONS = 3
FRAME_BYTES = 1 << 20
START = timedelta(seconds=60)
POISONED_TIMES = 2.0
RAW = "/bench/raw/1"
POISONING_DONORS = ("liar1", "liar2", "liar3")
FORGER = "forger"
HONEST = tuple(f"donor{number}" for number in range(1, max(DONORS) + 1))


def main() -> None:
    log.configure("error")
    if len(sys.argv) > 1:
        asyncio.run(_donate(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
        return
    report = Report("join")
    for megabytes in MEGABYTES:
        with tempfile.TemporaryDirectory(prefix="atoll-") as folder:
            asyncio.run(_measure(report, Path(folder), megabytes))
    report.finish(
        "medians of three; `of_raw`: seconds that one raw stream takes for the bytes, over the seconds of the join; "
        "poisoned: three of four donors send wrong bytes for true digests; forged: one of four offers a forged head"
    )


# --- the joiner ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Swarm:
    """The joiner and the donors that it can reach, by name."""

    host: SwarmHost
    operator: Identity
    peers: dict[str, str]
    offsets: tuple[int, ...]
    genesis_hash: bytes
    head_hash: bytes

    def plan(self, donors: tuple[str, ...]) -> Plan:
        """A plan whose members are these donors and the joiner; the first seven decided the first round."""
        peers = [self.host.peer_id, *(self.peers[name] for name in donors)]
        return plan_of(peers, [self.peers[name] for name in HONEST], self.genesis_hash, len(self.offsets) - 1)


async def _measure(report: Report, folder: Path, megabytes: int) -> None:
    elements = megabytes * 1_000_000 // 8
    async with AsyncExitStack() as stack:
        swarm = await _prepare(stack, folder, elements)
        clean = 0.0
        for count in DONORS:
            seconds = await _cell(report, swarm, megabytes, "all true", HONEST[:count])
            clean = seconds if count == len(POISONING_DONORS) + 1 else clean
        poisoned = await _cell(report, swarm, megabytes, "3 send wrong bytes", (HONEST[0], *POISONING_DONORS))
        forged = await _cell(
            report, swarm, megabytes, "1 offers a forged head", (*HONEST[: len(POISONING_DONORS)], FORGER)
        )
    for name, seconds in (("3 of 4 donors send wrong bytes", poisoned), ("1 of 4 offers a forged head", forged)):
        times = seconds / clean
        report.accept(f"{megabytes} MB, {name}", target="≤ 2 × clean", value=times, holds=times <= POISONED_TIMES)


async def _cell(report: Report, swarm: Swarm, megabytes: int, what: str, donors: tuple[str, ...]) -> float:
    """One row. Raw stream and join take turns, so that both see the same machine."""
    elements = swarm.offsets[-1]
    raws, joins = [], []
    for _ in range(REPETITIONS):
        raws.append(await _raw(swarm, 8 * elements))
        joins.append(await _join(swarm, donors, elements))
    raw, seconds = statistics.median(raws), statistics.median(joins)
    report.cell(
        state=f"{megabytes} MB",
        donors=len(donors),
        what=what,
        seconds=seconds,
        mb_per_second=megabytes / seconds,
        raw_stream_mb_per_second=megabytes / raw,
        of_raw=raw / seconds,
    )
    return seconds


async def _join(swarm: Swarm, donors: tuple[str, ...], elements: int) -> float:
    state = AnchorState(torch.zeros(elements), swarm.offsets)
    started = time.perf_counter()
    fetched = await catch_up(swarm.host, swarm.plan(donors), state, None, operator_key=swarm.operator.public_key)
    seconds = time.perf_counter() - started
    assert fetched is not None
    assert fetched.head.hash == swarm.head_hash
    assert matches_digests(fetched.head.manifest.layers, fetched.anchor_E, fetched.momentum_E, swarm.offsets)
    return seconds


async def _raw(swarm: Swarm, wanted_bytes: int) -> float:
    started = time.perf_counter()
    stream = await swarm.host.open(swarm.peers[HONEST[0]], RAW, START)
    await stream.send(FrameKind.MESSAGE, str(wanted_bytes).encode())
    received = 0
    while received < wanted_bytes:
        received += len((await stream.receive(START)).body)
    await stream.close()
    return time.perf_counter() - started


async def _prepare(stack: AsyncExitStack, folder: Path, elements: int) -> Swarm:
    names = (*HONEST, *POISONING_DONORS, FORGER)
    offsets = offsets_of(elements)
    identities = {name: Identity.load_or_create(folder / f"{name}.key") for name in names}
    true, poison = make_state(folder / "true", elements, 1), make_state(folder / "poison", elements, 2)
    genesis = commit(true, 0, b"", [])
    head = commit(true, 1, genesis.hash, [identities[name] for name in HONEST])
    forged = commit(poison, 10**6, head.hash, [identities[FORGER]])
    for name, item in (("genesis", genesis), ("head", head), ("forged", forged)):
        write_head(folder / f"{name}.manifest", item)
    operator = Identity.load_or_create(folder / OPERATOR_KEY)
    host = await start_host(folder, "joiner", (), run_id=RUN, relay_service=True)
    stack.push_async_callback(host.close, timedelta(seconds=5))
    peers = {}
    for name in names:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.join", folder, name, " ".join(host.multiaddrs()),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        stack.push_async_callback(_end, child)
        assert child.stdout is not None
        async with asyncio.timeout(START.total_seconds()):
            told = json.loads(await child.stdout.readline())
        peers[name] = told["peer"]
        host.learn_addresses(told["peer"], told["addresses"])
    return Swarm(host, operator, peers, offsets, genesis.hash, head.hash)


async def _end(child: asyncio.subprocess.Process) -> None:
    assert child.stdin is not None
    child.stdin.close()
    await child.wait()


# --- a donor, in a process of its own ----------------------------------------------------------------------


async def _donate(folder: Path, name: str, seeds: str) -> None:
    """Serve until standard input ends."""
    torch.set_num_threads(1)
    state = mapped(folder / ("true" if name in HONEST else "poison"))
    store = ManifestStore(folder / f"{name}-manifests", RUN)
    heads = ("genesis", "head", "forged") if name == FORGER else ("genesis", "head")
    for item in heads:
        head = read_head(folder / f"{item}.manifest")
        store.append(head)
    host = await start_host(folder, name, tuple(seeds.split()), run_id=RUN, relay_service=False)
    try:
        StateServer(host, RUN, store, lambda: (head, state))
        host.handle(RAW, _pour)
        await host.ready()
        print(json.dumps({"peer": host.peer_id, "addresses": host.multiaddrs()}), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await host.close(timedelta(seconds=5))


async def _pour(stream: Stream) -> None:
    left = int((await stream.receive(START)).header)
    body = bytes(FRAME_BYTES)
    while left > 0:
        await stream.send(FrameKind.BODY, b"", body[: min(left, FRAME_BYTES)])
        left -= FRAME_BYTES
    await stream.receive(START)  # until the reader hangs up


if __name__ == "__main__":
    main()
