"""Recovery: one of four nodes is struck at a random moment; how long until a round is committed without it?

    python -m benchmarks.recovery [--strikes 8]

SIGKILL, and SIGSTOP of all the node's processes. The clock runs from the signal until the first commit of which the
victim was no part is durable on another node, against the median time between the commits just before. Then the
victim comes back, and the next strike waits until it is part of rounds again.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from atoll.lab.corpus import write_python_corpus
from atoll.lab.faults import frozen, kill
from benchmarks.common import Report
from benchmarks.process_swarm import LabSwarm, node_names, report_on_exit, start

NODES = 4
PEACEFUL_ROUNDS = 5  # whose times make the usual one
TIMES = 3.0  # the usual round, at most
NOTES = (
    "seconds from the strike to the first commit without the victim; usual_s: median round just before the strikes; "
    "x: seconds over that of the same strike; q1, q3: quartiles over the strikes"
)


@dataclass(frozen=True)
class Outage:
    """One victim's absence."""

    usual: float  # seconds between commits before it
    seconds: float  # until a commit without the victim

    @property
    def ratio(self) -> float:
        """In usual rounds."""
        return self.seconds / self.usual


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strikes", type=int, default=8, help="of each kind")
    options = parser.parse_args()
    report, rng = Report("recovery"), random.Random(7)
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch, report_on_exit(report, NOTES):
        corpus = Path(scratch) / "corpus.txt"
        write_python_corpus(corpus)
        swarm = await start(Path(scratch) / "swarm", node_names(NODES), corpus)
        try:
            for kind in ("SIGSTOP", "SIGKILL"):
                _tell(report, kind, [await _measure_outage(swarm, rng, kind) for _ in range(options.strikes)])
        finally:
            await swarm.local.close()


def _tell(report: Report, kind: str, outages: list[Outage]) -> None:
    seconds, ratios = [item.seconds for item in outages], [item.ratio for item in outages]
    (low_s, middle_s, high_s), (low, middle, high) = _quartiles(seconds), _quartiles(ratios)
    within = sum(ratio <= TIMES for ratio in ratios)
    report.cell(
        outage=kind,
        outages=len(outages),
        usual_s=statistics.median(item.usual for item in outages),
        q1_s=low_s,
        median_s=middle_s,
        q3_s=high_s,
        worst_s=max(seconds),
        q1_x=low,
        median_x=middle,
        q3_x=high,
        worst_x=max(ratios),
        within_3x=f"{within} of {len(outages)}",
    )
    report.accept(
        f"{kind} of one of {NODES}: every time a commit without it",
        target=f"≤ {TIMES:g} × the median round",
        value=f"{within} of {len(outages)}; median {middle:.2f} ×, worst {max(ratios):.2f} ×",
        holds=within == len(outages) > 0,
    )


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


async def _measure_outage(swarm: LabSwarm, rng: random.Random, kind: str) -> Outage:
    """Returns when the victim is part of rounds again."""
    usual = await _usual_round(swarm)
    victim = rng.choice(swarm.names)
    await asyncio.sleep(rng.uniform(0, usual))  # any moment of a round
    struck = time.time()
    if kind == "SIGKILL":
        await kill(swarm.local, victim)
        first = await _first_without(swarm, victim, struck)
        await swarm.local.restart_member(victim)
    else:
        with frozen(swarm.local, victim):
            first = await _first_without(swarm, victim, struck)
    await swarm.until(lambda: victim in swarm.decide(), f"{victim} did not come back")
    return Outage(usual, first - struck)


async def _usual_round(swarm: LabSwarm) -> float:
    """Median seconds between the commits of some rounds in which everyone is present."""
    before = swarm.newest()
    await swarm.until(lambda: swarm.newest() >= before + PEACEFUL_ROUNDS, "no rounds in peace")
    times = [item.when for number, item in sorted(swarm.first_commits().items()) if number >= before]
    return statistics.median(after - before for before, after in pairwise(times))


async def _first_without(swarm: LabSwarm, victim: str, struck: float) -> float:
    """When the first round since `struck` in which the victim is not present was durable on another node."""
    others = [name for name in swarm.names if name != victim]

    def found() -> list[float]:
        return [
            item.when
            for name in others
            for item in swarm.chain(name).values()
            if item.when > struck and swarm.peers[victim] not in item.head.present
        ]

    await swarm.until(lambda: bool(found()), f"no round without {victim}")
    return min(found())


if __name__ == "__main__":
    asyncio.run(main())
