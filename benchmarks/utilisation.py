"""How much of its time a device computes while its swarm averages over wide-area links: Atoll, hivemind, torchft.

Four hosts in an emulated WAN, a step of 30 ms, 30.8 million parameters: every host runs the shipped engine (codecs,
sums, outer step, votes, disk, network) around a device that pretends to train (`utilisation_member`). A round is due
after `H` steps of every member. Utilisation is steps × 30 ms over the time between two looks, some rounds apart, of all
members. Training goes on during exchanges, so it says little alone: an exchange that lasts longer than its round makes
the next one longer. `h_real` is how many steps a round had in fact, `at_h` is utilisation × min(1, H / h_real): what a
swarm that keeps to H would have. Only that is compared with targets, and with what was measured of a DiLoCo elsewhere
(it stands still while it averages): 11.6 % at 50 Mbit/s and H = 128, 10 % at 200 Mbit/s and H = 32.

`hivemind.Optimizer` and torchft's `DiLoCo` do the same beside it, in environments of their own (`make peers`), with
every tuning of a small grid (`TUNINGS` of `utilisation_hivemind` and `utilisation_torchft`); the best one counts. A
cell of theirs in which a round failed, or that did not run, is measured once more, and the better figures count. Peers
are looked at where a round ended. Their optimisers compute in the training thread, on this machine's cores: `at_h_free`
is `at_h` if that had taken no time, as on a GPU, and what Atoll is compared with.

All hosts share this machine's cores, as no swarm's do. So Atoll is also measured in slow motion (`slower`): rates are
divided, distances, steps and copies multiplied by the same factor, everything told in the time that is meant. Then all
is as it was but for processors, which are so much faster; and for fixed times, such as our tick of 0.1 s, which are so
much shorter.

    python -m benchmarks.utilisation
    python -m benchmarks.utilisation --cells 50x128 --method atoll --codec auto int4
    python -m benchmarks.utilisation --cells 1000x32 1000x128 --method torchft --tuning delayed 4-fragments-delayed
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from atoll.lab.wan.network import WanNetwork, wan_network
from benchmarks.allreduce import Setting
from benchmarks.common import Report
from benchmarks.lab_members import Member, ask_all, members
from benchmarks.peer_environments import python_of

HOSTS = 4
RTT_MS = 80.0
ELEMENTS = 30_800_000
STEP_SECONDS = 0.030
COPY_SECONDS = 6e9  # bytes per second between a device and pinned memory: PCIe 3.0 × 8 carries as much
TUNINGS = {
    "hivemind": ("waiting-2", "waiting-5", "waiting-2-int8", "delayed-5", "accumulating-5"),
    "torchft": ("waiting", "delayed", "4-fragments-delayed", "delayed-bf16", "4-fragments-delayed-bf16"),
}
METHODS = ("atoll", *TUNINGS)
_LOOK_SECONDS = 0.5
CELLS = tuple(product((50.0, 200.0, 1000.0), (32, 128)))  # rate of the links in Mbit/s, H
_TARGETS = {(50.0, 128): 0.95, (200.0, 32): 0.90}


@dataclass(frozen=True)
class Case:
    """A method with its setting: Atoll's codec, or a peer's tuning."""

    method: str
    setting: str
    warm_rounds: int  # in which links and codec, or speeds, are learnt
    rounds: int
    patience: float  # seconds for those rounds
    slower: float = 1.0

    def member_config(self, mbit: float) -> dict[str, Any]:
        """What its members need to know of it."""
        copy_seconds = self.slower * 4 * ELEMENTS / COPY_SECONDS
        ours = {"codec": self.setting, "copy_seconds": copy_seconds}
        return ours if self.method == "atoll" else {"tuning": self.setting, "mbit": mbit}

    @property
    def program(self) -> str:
        """Of a member."""
        return f"benchmarks.utilisation_{'member' if self.method == 'atoll' else self.method}"


def cases(chosen: argparse.Namespace) -> Iterator[Case]:
    """What was asked for; peers need minutes for a round."""
    for method in chosen.method:
        if method == "atoll":
            for codec, slower in product(chosen.codec, chosen.slower):
                yield Case(method, codec, warm_rounds=4, rounds=6, patience=240 * slower, slower=slower)
        for tuning in TUNINGS.get(method, ()):
            if chosen.tuning is None or tuning in chosen.tuning:
                yield Case(method, tuning, warm_rounds=2, rounds=3, patience=300)


async def measure(network: WanNetwork, case: Case, inner_steps: int, directory: Path) -> dict[str, Any]:
    """One cell. Raises `RuntimeError`, `TimeoutError`."""
    async with members(network, case.program, case.method, directory, python_of(case.method)) as joined:
        rate = min(host.uplink_mbit for host in network.topology.trainers)
        step_seconds = STEP_SECONDS * case.slower
        begin = {
            "elements": ELEMENTS,
            "step_seconds": step_seconds,
            "inner_steps": inner_steps,
            **case.member_config(rate),
        }
        await ask_all(joined, {"begin": begin}, 60)
        await rounds_done(joined, case.warm_rounds, case.patience)
        before = await ask_all(joined, {"look": True}, 30)
        await rounds_done(joined, min(it["rounds"] for it in before) + case.rounds, case.patience)
        after = await ask_all(joined, {"look": True}, 30)
    pairs = list(zip(before, after, strict=True))
    steps = [b["steps"] - a["steps"] for a, b in pairs]
    seconds = [(b["at"] - a["at"]) / case.slower for a, b in pairs]
    rounds = [b["rounds"] - a["rounds"] for a, b in pairs]
    arithmetic = [b.get("arithmetic", 0.0) - a.get("arithmetic", 0.0) for a, b in pairs]
    shares = [count * STEP_SECONDS / took for count, took in zip(steps, seconds, strict=True)]
    free = [count * STEP_SECONDS / (t - a) for count, t, a in zip(steps, seconds, arithmetic, strict=True)]
    h_real = sum(steps) / max(1, sum(rounds))
    kept = min(1.0, inner_steps / h_real)
    return {
        "utilisation": statistics.mean(shares),
        "worst": min(shares),
        "h_real": h_real,
        "at_h": statistics.mean(shares) * kept,
        "at_h_free": statistics.mean(free) * kept,
        "used": after[0]["codec"],
        "round_s": sum(seconds) / max(1, sum(rounds)),
        "mb_sent": sum(b["sent"] - a["sent"] for a, b in pairs) / max(1, sum(rounds)) / 1e6,
        "cpu_share": sum(b["cpu_seconds"] - a["cpu_seconds"] for a, b in pairs) / sum(seconds) / case.slower,
        "abandoned": sum(b["abandoned"] for b in after),
        "note": "",
    }


async def rounds_done(joined: Sequence[Member], rounds: float, patience: float) -> None:
    """Until every member committed that many. Raises `TimeoutError`."""
    deadline = time.monotonic() + patience
    while min(it["rounds"] for it in await ask_all(joined, {"look": True}, 30)) < rounds:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not {rounds:g} rounds within {patience:g} s")
        await asyncio.sleep(_LOOK_SECONDS)


async def run(chosen: argparse.Namespace, report: Report) -> None:
    """All cells that were asked for."""
    for mbit, inner_steps in chosen.cells:
        for case in cases(chosen):
            figures = await cell(mbit, inner_steps, case) | {"tries": 1}
            if case.method != "atoll" and (figures["note"] or figures["abandoned"]):
                again = await cell(mbit, inner_steps, case)
                figures = {**max((figures, again), key=lambda it: it["at_h_free"] or 0.0), "tries": 2}
            report.cell(
                mbit=mbit, h=inner_steps, method=case.method, setting=case.setting, slower=case.slower, **figures
            )
            print(json.dumps(report.cells[-1]), flush=True)


async def cell(mbit: float, inner_steps: int, case: Case) -> dict[str, Any]:
    """The figures of one; one that does not run is told with its reason."""
    setting = Setting(f"{mbit:g} Mbit/s", (mbit,) * HOSTS, RTT_MS, case.slower)
    with tempfile.TemporaryDirectory(prefix="atoll-") as place:
        async with wan_network(setting.topology()) as network:
            try:
                return await measure(network, case, inner_steps, Path(place))
            except (RuntimeError, TimeoutError) as error:
                names = ("utilisation", "worst", "h_real", "at_h", "at_h_free", "used", "round_s", "mb_sent")
                figures: dict[str, Any] = dict.fromkeys((*names, "cpu_share", "abandoned"))
                figures["note"] = f"could not run: {str(error) or type(error).__name__}"[:90]
                return figures


def judge(report: Report) -> None:
    """The acceptance rows, for the cells that were measured."""
    ours = [cell for cell in report.cells if cell["method"] == "atoll" and cell["setting"] == "auto"]
    for cell in ours:
        target = _TARGETS.get((cell["mbit"], cell["h"]))
        if target is not None:
            value = cell["at_h"]
            report.accept(
                f"at its H, {cell['mbit']:g} Mbit/s × {RTT_MS:g} ms, H = {cell['h']}, auto, {slowly(cell['slower'])}",
                target=f"≥ {target:.2f}",
                value=value if value is not None else cell["note"],
                holds=value is not None and value >= target,
            )
    for cell, peer in product((it for it in ours if it["slower"] == 1), TUNINGS):  # peers were not slowed down
        theirs = [it for it in report.cells if (it["method"], it["mbit"], it["h"]) == (peer, cell["mbit"], cell["h"])]
        ran = [it for it in theirs if it["at_h_free"] is not None]
        best = max(ran, key=lambda it: it["at_h_free"], default=None)
        if best is not None:
            report.accept(
                f"above {peer} ({best['setting']}, of {len(ran)} that ran), {cell['mbit']:g} Mbit/s, H = {cell['h']}",
                target=f"> {best['at_h_free']:.3f}",
                value=cell["at_h"] if cell["at_h"] is not None else cell["note"],
                holds=cell["at_h"] is not None and cell["at_h"] > best["at_h_free"],
            )
        elif theirs:
            report.accept(
                f"above {peer}, {cell['mbit']:g} Mbit/s, H = {cell['h']}",
                target="a figure to be above",
                value=theirs[0]["note"],
                holds=False,
            )


def cell_of(text: str) -> tuple[float, int]:
    """Of an argument. Raises `ValueError`."""
    mbit, inner_steps = text.split("x")
    return float(mbit), int(inner_steps)


def slowly(factor: float) -> str:
    """In words."""
    return "as it is" if factor == 1 else f"{factor:g} times slower"


def main() -> None:
    """Choose cells, run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=cell_of, nargs="+", default=list(CELLS), metavar="MBITxSTEPS")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--codec", nargs="+", default=["auto"], help="of Atoll")
    parser.add_argument("--slower", nargs="+", type=float, default=[1.0, 4.0], help="Atoll's slow motion")
    parser.add_argument("--tuning", nargs="+", help="of peers; all of the grid if not given")
    parser.add_argument("--name", default="utilisation", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    asyncio.run(run(chosen, report))
    judge(report)
    tried = {peer: dict.fromkeys(it["setting"] for it in report.cells if it["method"] == peer) for peer in TUNINGS}
    grid = "; ".join(f"{peer}: {', '.join(tunings)}" for peer, tunings in tried.items() if tunings) or "none"
    report.finish(
        f"{HOSTS} hosts, {ELEMENTS} parameters, {1000 * STEP_SECONDS:g} ms a step, {RTT_MS:g} ms RTT; "
        "published: a measured DiLoCo has 0.116 at 50 Mbit/s and H = 128, 0.10 at 200 Mbit/s and H = 32; "
        f"grid of peers, of which the best counts: {grid}; "
        "a peer's command in each host: .make/peers/PEER/bin/python -m benchmarks.utilisation_PEER"
    )


if __name__ == "__main__":
    main()
