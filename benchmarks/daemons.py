"""Real daemons on one machine: how soon the first round of many commits, and whether every later one holds all of them.

    python -m benchmarks.daemons [--nodes 24] [--rounds 20]

Each daemon is the shipped program with its own libp2p process and its own trainer; the model is the demo's. The
machine has to start them all, so the first round is counted from the start of the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from atoll.lab.corpus import write_python_corpus
from atoll.lab.launcher import LoopbackHosts
from benchmarks.common import Report
from benchmarks.process_swarm import LabSwarm, node_names, report_on_exit, spec_of_nodes, start_run

STEP_SECONDS_A_NODE = 0.12  # of an inner step's least time: two cores compute for all
FIRST_ROUND_SECONDS = 90
NOTES = (
    "first_s: from the start of the last daemon to the first commit; starts_s: from the first daemon's start to the "
    "last one's; round_s: median seconds between commits; missing: members that rounds lack, over all rounds"
)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=20, help="after the first")
    options = parser.parse_args()
    report, names = Report("daemons"), node_names(options.nodes)
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch, report_on_exit(report, NOTES):
        corpus = Path(scratch) / "corpus.txt"
        write_python_corpus(corpus)
        toml, pace = spec_of_nodes(options.nodes, corpus), STEP_SECONDS_A_NODE * options.nodes
        root = Path(scratch) / "swarm"
        swarm = await start_run(root, names, toml, LoopbackHosts(), step_seconds=pace, rounds=1)
        try:
            for wanted in range(2, options.rounds + 2):
                await swarm.until(lambda wanted=wanted: swarm.newest() >= wanted, f"no round {wanted}")
            _tell(report, swarm, options.rounds)
        finally:
            await swarm.local.close()


def _tell(report: Report, swarm: LabSwarm, rounds: int) -> None:
    commits = swarm.first_commits()
    started = sorted((swarm.local.root / name / "token").stat().st_mtime for name in swarm.names)
    counted = [commits[number] for number in range(2, rounds + 2)]
    missing = sum(len(set(swarm.peers.values()) - set(it.head.present)) for it in counted)
    whole = sum(set(swarm.peers.values()) <= set(it.head.present) for it in counted)
    first = commits[1].when - started[-1]
    report.cell(
        daemons=len(swarm.names),
        starts_s=started[-1] - started[0],
        first_s=first,
        present_in_first=len(commits[1].head.present),
        rounds=len(counted),
        whole=whole,
        missing=missing,
        round_s=statistics.median(after.when - before.when for before, after in pairwise(counted)),
    )
    report.accept(
        f"first round of {len(swarm.names)} daemons",
        target=f"≤ {FIRST_ROUND_SECONDS} s",
        value=round(first, 1),
        holds=first <= FIRST_ROUND_SECONDS,
    )
    report.accept(
        "later rounds with every member present", target="all", value=f"{whole} of {rounds}", holds=whole == rounds
    )


if __name__ == "__main__":
    asyncio.run(main())
