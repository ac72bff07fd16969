"""How much of its time a device computes while its swarm averages over wide-area links.

Four hosts in an emulated WAN, a step of 30 ms, 30.8 million parameters: every host runs the shipped engine (codecs,
sums, outer step, votes, disk, network) around a device that pretends to train (`utilisation_member`). A round is due
after `H` steps of every member. Utilisation is steps × 30 ms over the time between two looks, some rounds apart, of all
members. Training goes on during exchanges, so it says little alone: an exchange that lasts longer than its round makes
the next one longer. `h_real` is how many steps a round had in fact, `at_h` is utilisation × min(1, H / h_real): what a
swarm that keeps to H would have. Only that is compared with targets, and with what was measured of a DiLoCo elsewhere
(it stands still while it averages): 11.6 % at 50 Mbit/s and H = 128, 10 % at 200 Mbit/s and H = 32. hivemind's
optimiser and torchft's DiLoCo are not run here yet.

    python -m benchmarks.utilisation
    python -m benchmarks.utilisation --mbit 50 --inner-steps 128 --codec auto int4
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from atoll.node.lab.wan.network import WanNetwork, wan_network
from benchmarks.allreduce import Setting
from benchmarks.common import Report
from benchmarks.lab_members import Member, members, together

HOSTS = 4
RTT_MS = 80.0
ELEMENTS = 30_800_000
STEP_SECONDS = 0.030
WARM_ROUNDS = 4  # in which links and codec are learnt
ROUNDS = 6
_PATIENCE = 240.0  # seconds for those rounds
_LOOK_SECONDS = 0.5
_TARGETS = {(50.0, 128): 0.95, (200.0, 32): 0.90}


async def measure(network: WanNetwork, inner_steps: int, codec: str, directory: Path) -> dict[str, Any]:
    """One cell. Raises `RuntimeError`, `TimeoutError`."""
    async with members(network, "benchmarks.utilisation_member", "atoll", directory) as joined:
        begin = {"elements": ELEMENTS, "step_seconds": STEP_SECONDS, "inner_steps": inner_steps, "codec": codec}
        await together(joined, {"begin": begin}, 60)
        await rounds_done(joined, WARM_ROUNDS)
        before = await together(joined, {"look": True}, 30)
        await rounds_done(joined, min(it["rounds"] for it in before) + ROUNDS)
        after = await together(joined, {"look": True}, 30)
    pairs = list(zip(before, after, strict=True))
    steps = [b["steps"] - a["steps"] for a, b in pairs]
    seconds = [b["at"] - a["at"] for a, b in pairs]
    rounds = [b["rounds"] - a["rounds"] for a, b in pairs]
    shares = [count * STEP_SECONDS / took for count, took in zip(steps, seconds, strict=True)]
    h_real = sum(steps) / max(1, sum(rounds))
    return {
        "utilisation": statistics.mean(shares),
        "worst": min(shares),
        "h_real": h_real,
        "at_h": statistics.mean(shares) * min(1.0, inner_steps / h_real),
        "used": after[0]["codec"],
        "round_s": sum(seconds) / max(1, sum(rounds)),
        "mb_sent": sum(b["sent"] - a["sent"] for a, b in pairs) / max(1, sum(rounds)) / 1e6,
        "cpu_share": sum(b["cpu_seconds"] - a["cpu_seconds"] for a, b in pairs) / sum(seconds),
        "abandoned": sum(b["abandoned"] for b in after),
        "note": "",
    }


async def rounds_done(joined: Sequence[Member], rounds: int) -> None:
    """Until every member committed that many. Raises `TimeoutError`."""
    deadline = time.monotonic() + _PATIENCE
    while min(it["rounds"] for it in await together(joined, {"look": True}, 30)) < rounds:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {rounds} rounds within {_PATIENCE:.0f} s")
        await asyncio.sleep(_LOOK_SECONDS)


async def run(chosen: argparse.Namespace, report: Report) -> None:
    """All cells that were asked for."""
    for mbit in chosen.mbit:
        setting = Setting(f"{mbit:g} Mbit/s", (mbit,) * HOSTS, RTT_MS)
        for inner_steps, codec in product(chosen.inner_steps, chosen.codec):
            with tempfile.TemporaryDirectory(prefix="atoll-") as place:
                async with wan_network(setting.topology()) as network:
                    try:
                        figures = await measure(network, inner_steps, codec, Path(place))
                    except (RuntimeError, TimeoutError) as error:
                        names = ("utilisation", "worst", "h_real", "at_h", "used", "round_s", "mb_sent", "cpu_share")
                        figures = dict.fromkeys((*names, "abandoned"), None) | {"note": f"could not run: {error}"[:90]}
            report.cell(mbit=mbit, h=inner_steps, codec=codec, **figures)
            print(json.dumps(report.cells[-1]), flush=True)


def judge(report: Report) -> None:
    """The acceptance rows, for the cells that were measured."""
    for cell in report.cells:
        target = _TARGETS.get((cell["mbit"], cell["h"]))
        if target is not None and cell["codec"] == "auto":
            value = cell["at_h"]
            report.accept(
                f"utilisation at its H, {cell['mbit']:g} Mbit/s × {RTT_MS:g} ms, H = {cell['h']}, codec auto",
                target=f"≥ {target:.2f}",
                value=value if value is not None else cell["note"],
                holds=value is not None and value >= target,
            )


def main() -> None:
    """Choose cells, run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", nargs="+", type=float, default=[50.0, 200.0, 1000.0])
    parser.add_argument("--inner-steps", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--codec", nargs="+", default=["auto"])
    chosen = parser.parse_args()
    report = Report("utilisation")
    asyncio.run(run(chosen, report))
    judge(report)
    report.finish(
        f"{HOSTS} hosts, {ELEMENTS} parameters, {1000 * STEP_SECONDS:g} ms a step, {RTT_MS:g} ms RTT; "
        "published: a measured DiLoCo has 0.116 at 50 Mbit/s and H = 128, 0.10 at 200 Mbit/s and H = 32"
    )


if __name__ == "__main__":
    main()
