"""Swarms under fire on wide-area links: what killing, freezing and cutting costs two regions of four nodes.

    python -m benchmarks.faults_wan [--minutes 10]

The schedule of `faults` in the WAN lab's `two-regions-8` (100 Mbit/s, 20 ms inside a region, 100 ms across): a swarm in
peace, one whose nodes are killed, one whose nodes are frozen. And a fourth: after some rounds the regions are cut off
from each other for 60 s, four nodes with the coordinator and four without; when all are one lineage again, the
coordinator is killed and comes back after 60 s. Needs root.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from atoll.lab.corpus import write_python_corpus
from atoll.lab.faults import kill, same_ports
from atoll.lab.wan.network import WanNetwork, wan_network
from atoll.lab.wan.topology import COORDINATOR, load_topology
from benchmarks.attempt_audit import Fault
from benchmarks.common import Report
from benchmarks.fault_outcome import FaultOutcome
from benchmarks.faults import KINDS, NOTES, FaultSession, run_with_faults, strikes, tell, tell_loss
from benchmarks.process_swarm import LabSwarm, report_on_exit, start

TOPOLOGY = "two-regions-8"
AWAY = "america"  # the region without the coordinator
CUT_SECONDS = 60.0
HEAL_SECONDS = 30.0
UNDER_WAY_SECONDS = 20.0  # from a cut on: what commits by then may have been under way before it
_BEFORE_SECONDS = 30.0  # and after


@dataclass
class Partition:
    """Cuts one region off, later kills the coordinator; remembers what that came to."""

    network: WanNetwork
    away: list[str] = field(default_factory=list)
    healed_seconds: float | None = None  # until all were of one lineage; None: they never were
    rounds_in_cut: int = 0
    rounds_without_coordinator: int = 0

    async def attack(self, swarm: LabSwarm, session: FaultSession) -> None:
        """Over when everything is back."""
        self.away = [host.name for host in self.network.topology.trainers if host.region == AWAY]
        await asyncio.sleep(_BEFORE_SECONDS)
        began = time.time()
        self.network.partition(self.away)
        self.rounds_in_cut = await new_rounds(swarm)
        self.network.heal()
        healed = time.time()
        session.strikes += [Fault(name, "cut off", began, ended=healed) for name in self.away]
        if await swarm.becomes_true(lambda: len(swarm.recovered_members(healed)) == len(swarm.names)):
            self.healed_seconds = time.time() - healed
        await kill(swarm.local, COORDINATOR)
        self.rounds_without_coordinator = await new_rounds(swarm)
        await swarm.local.start_coordinator(*same_ports(swarm.endpoints))
        await asyncio.sleep(_BEFORE_SECONDS)


async def new_rounds(swarm: LabSwarm) -> int:
    """That begin and commit in a cut that began just now; returns when it is due to end."""
    await asyncio.sleep(UNDER_WAY_SECONDS)
    before = swarm.newest()
    await asyncio.sleep(CUT_SECONDS - UNDER_WAY_SECONDS)
    return swarm.newest() - before


def tell_partition(report: Report, it: Partition) -> None:
    """What only the fourth swarm shows."""
    told = "never" if it.healed_seconds is None else f"{it.healed_seconds:.0f} s"
    report.accept(
        f"partition of {CUT_SECONDS:g} s: after it, one lineage of all nodes",
        target=f"≤ {HEAL_SECONDS:g} s",
        value=told,
        holds=it.healed_seconds is not None and it.healed_seconds <= HEAL_SECONDS,
    )
    for what, rounds in (("in the cut", it.rounds_in_cut), ("without the coordinator", it.rounds_without_coordinator)):
        name = f"rounds committed {what}, from its second {UNDER_WAY_SECONDS:g} to {CUT_SECONDS:g}"
        report.accept(name, target="> 0", value=rounds, holds=rounds > 0)


async def main() -> None:
    """Four swarms, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of each swarm, under fire")
    parser.add_argument("--kind", nargs="+", choices=(*KINDS, "partition"), default=[*KINDS, "partition"])
    options = parser.parse_args()
    report, topology = Report("faults_wan"), load_topology(TOPOLOGY)
    names = [host.name for host in topology.trainers]
    notes = f"{TOPOLOGY}, {options.minutes:g} minutes for each swarm of {len(names)} nodes. {NOTES}"
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch, report_on_exit(report, notes):
        corpus = Path(scratch) / "corpus.txt"
        write_python_corpus(corpus)
        peace: FaultOutcome | None = None
        for kind in options.kind:
            async with wan_network(topology) as network:
                partition = Partition(network)
                attack = partition.attack if kind == "partition" else strikes(kind, 60 * options.minutes)
                swarm = await start(Path(scratch) / kind, names, corpus, network)
                outcome = await run_with_faults(swarm, kind, attack)
            tell(report, outcome)
            if kind == "partition":
                tell_partition(report, partition)
            if peace is not None:
                tell_loss(report, outcome, peace)
            peace = peace or (outcome if kind == KINDS[0] else None)


if __name__ == "__main__":
    asyncio.run(main())
