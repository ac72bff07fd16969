"""Nodes behind NAT: does every one of them contribute to every round?

The shipped programs in the WAN lab's `nat-4`: four homes, three of them behind NAT, one of which no hole punching
helps. And again with nobody that it helps: two nodes behind NAT then meet through the seed's relay alone. Counted are
the rounds after the first that all contributed to; a node contributed when the manifest gives it weight, and wholly
when no sum had to do without it. Needs root.

    python -m benchmarks.nat [--minutes 5] [--topology nat-4-unpunched]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll.core.verdicts import partial_contributions
from atoll.lab.corpus import write_python_corpus
from atoll.lab.wan.network import wan_network
from atoll.lab.wan.topology import SEED, Topology, load_topology
from benchmarks.common import Report
from benchmarks.process_swarm import Chain, LabSwarm, report_on_exit, start

TOPOLOGY = "nat-4"


def without_hole_punching(topology: Topology) -> Topology:
    """The same for the unlucky: routers that give every call another port."""
    hosts = tuple(replace(host, hole_punching=False) for host in topology.hosts)
    return replace(topology, name=f"{topology.name}-unpunched", hosts=hosts)


async def watch(swarm: LabSwarm, minutes: float) -> tuple[Chain, int]:
    """The rounds of so many minutes after all had contributed to one, and how many were given up then."""
    await swarm.until(lambda: first_complete_round(swarm.first_commits(), swarm.peers) > 0, "no round had everybody")
    first = first_complete_round(swarm.first_commits(), swarm.peers)
    await asyncio.sleep(60 * minutes)
    swarm.local.check()
    chain = {number: item for number, item in swarm.first_commits().items() if number > first}
    page = await swarm.ctl("run", "rounds", swarm.spec.run.name, "--after", str(first))
    return chain, sum(not row["committed"] for row in page["rounds"])


def first_complete_round(chain: Chain, peers: Mapping[str, str]) -> int:
    """The first round that all of `peers` (by name) contributed to; 0 for none."""
    return next((number for number, item in sorted(chain.items()) if not absent_members(item.head.manifest, peers)), 0)


def absent_members(manifest: Any, peers: Mapping[str, str]) -> set[str]:
    """Names of those whose weight it does not have."""
    present = {item.peer_id for item in manifest.contributions if item.weight}
    return {name for name, peer in peers.items() if peer not in present}


async def measure(topology: Topology, place: Path, corpus: Path, minutes: float) -> dict[str, Any]:
    """One swarm."""
    names = [host.name for host in topology.trainers]
    async with wan_network(topology) as network:
        swarm = await start(place, names, corpus, network)
        try:
            before = network.counters().hosts[SEED].sent_bytes
            chain, abandoned = await watch(swarm, minutes)
            relayed = network.counters().hosts[SEED].sent_bytes - before
        finally:
            await swarm.local.close()
        late = network.counters().late
    absent = Counter(name for item in chain.values() for name in absent_members(item.head.manifest, swarm.peers))
    partial = sum(len(partial_contributions(item.head.manifest)) for item in chain.values())
    times = [item.when for _, item in sorted(chain.items())]
    return {
        "rounds": len(chain),
        "by_all": sum(not absent_members(item.head.manifest, swarm.peers) for item in chain.values()),
        "absent": ", ".join(f"{name} {count}" for name, count in absent.most_common()) or "nobody",
        "partial": partial,
        "abandoned": abandoned,
        "median_s": statistics.median(after - one for one, after in pairwise(times)),
        "seed_mb_per_round": relayed / max(1, len(chain)) / 1e6,
        "late": late,
    }


async def main() -> None:
    """Both, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    punched = load_topology(TOPOLOGY)
    labs = {lab.name: lab for lab in (punched, without_hole_punching(punched))}
    parser.add_argument("--minutes", type=float, default=5.0, help="of each swarm")
    parser.add_argument("--topology", nargs="+", choices=labs, default=list(labs))
    options = parser.parse_args()
    report = Report("nat")
    notes = (
        f"{options.minutes:g} minutes of each swarm; `absent`: who had no weight, and in how many rounds; `partial`: "
        "contributions that some sums lack; seed: what it sent a round, most of it relayed"
    )
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch, report_on_exit(report, notes):
        corpus = Path(scratch) / "corpus.txt"
        write_python_corpus(corpus)
        for lab in (labs[name] for name in options.topology):
            cell = await measure(lab, Path(scratch) / lab.name, corpus, options.minutes)
            report.cell(topology=lab.name, **cell)
            report.accept(
                f"{lab.name}: every node contributes to every round",
                target="all rounds",
                value=f"{cell['by_all']} of {cell['rounds']}; {cell['partial']} in part; absent: {cell['absent']}",
                holds=cell["rounds"] > 0 and cell["by_all"] == cell["rounds"] and not cell["partial"],
            )


if __name__ == "__main__":
    asyncio.run(main())
