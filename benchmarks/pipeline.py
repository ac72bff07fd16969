"""Routes of 2, 4 and 8 stages over emulated wide-area links: tokens per second against what stages and links allow.

Every host of the lab runs a node's swarm process and trainer process: gate, direct TLS (or libp2p), dispatcher,
bridge, cable, codecs, schedule are the shipped ones. Compute is synthetic: a stage waits 20 ms a micro-batch forward
and 40 ms back, whatever this machine's cores do; `--compute real` trains a small model instead, where all stages share
the cores.

`share` is the bound over the median time of a flush, from step to step at the driver. The bound (`pipeline_bound`)
counts the slowest stage or link, at the raw TCP goodput measured in the same lab, and the unavoidable way of the first
micro-batch there and of the last one back; with real compute also all cores at all stages' work, by the processor time
that stages took. `steady_share` is of the slowest stage or link alone. `bubble` is the share of its time that a stage
does not compute. `most` is how many micro-batches the first and second stages held at most, `in_flight_mb` what the
inputs of those take on the second.

Beside them, in the same lab: `torch.distributed.pipelining` over gloo with its 1F1B schedule and with GPipe's, which
keeps all micro-batches in flight; with the same waiting, in bf16. And stages served by `hivemind.moe`, whose client
relays every hop, in an environment of its own (`make peers`), with as many micro-batches in flight as were best
(`TUNINGS`). Ours in its better codec is compared with the best of each; its share is of the bound of all, at its bytes.

All hosts share this machine's cores, as no swarm's do. So labs are in slow motion (`slower`, by the number of stages):
rates are divided, distances and computing multiplied by it, everything told in the time that is meant.

    python -m benchmarks.pipeline
    python -m benchmarks.pipeline --links 100x80 --stages 8 --codec int8 --method atoll
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from support.routes import equal_cuts

from atoll.lab.wan.network import WanNetwork, wan_network
from benchmarks.allreduce import Setting, goodput
from benchmarks.common import Report
from benchmarks.lab_members import Member, ask_all, members
from benchmarks.peer_environments import python_of
from benchmarks.pipeline_bound import Flush

LINKS = ((1000.0, 5.0), (200.0, 30.0), (100.0, 80.0))  # Mbit/s, RTT in ms
STAGES = (2, 4, 8)
SLOWER = {2: 1.0, 4: 1.0, 8: 2.0}
FORWARD_SECONDS, BACKWARD_SECONDS = 0.020, 0.040
DIMENSION, TOKENS = 1024, 256  # of an activation [1, T, D]
MICRO_BATCHES = 32
WARM, MEASURED = 1, 2  # flushes
METHODS = {  # and what each can carry, the least
    "atoll": ("int8", "bf16"),
    "atoll-p2p": ("int8", "bf16"),
    "gloo-1f1b": ("bf16",),
    "gloo-gpipe": ("bf16",),
    "hivemind-moe": ("fp16", "quantile8"),
}
PEERS = ("gloo-1f1b", "gloo-gpipe", "hivemind-moe")
PROGRAMS = {"atoll": "pipeline_member", "gloo": "pipeline_gloo", "hivemind": "pipeline_moe"}
TUNINGS = {"hivemind-moe": (32,)}  # micro-batches in flight; 4 and 8 were slower wherever they were tried
WIRE = {"bf16": 2.0, "fp16": 2.0, "int8": 1 + 2 / 128, "quantile8": 1.0}  # bytes an element
TARGETS = {(1000.0, 5.0): 0.90, (200.0, 30.0): 0.90, (100.0, 80.0): 0.80}
_BEGIN_SECONDS = 240.0

SPEC = """version = 1
[run]
name = "pipeline"
stop_tokens = 1000000000000
[model]
preset = "nano"
vocabulary = 256
dimension = {dimension}
layers = {blocks}
heads = 8
kv_heads = 8
hidden_dimension = {hidden}
[data]
path = "nowhere.txt"
sequence_length = {tokens}
validation_samples = 4
[optimizer]
micro_batch_samples = 1
[pipeline]
codec = "{codec}"
micro_batches = {micro_batches}
[sync]
round_tokens = 1000000000
"""


@dataclass(frozen=True)
class Case:
    """What is measured in one lab."""

    stages: int
    mbit: float
    rtt_ms: float
    slower: float
    micro_batches: int
    synthetic: bool = True

    @property
    def setting(self) -> Setting:
        """The lab, in slow motion."""
        return Setting(f"{self.mbit:g} Mbit/s", (self.mbit,) * self.stages, self.rtt_ms, self.slower)

    @property
    def dimension(self) -> int:
        return DIMENSION if self.synthetic else 256

    def toml(self, codec: str) -> str:
        """The run: eight layers or as many as there are stages."""
        blocks = max(self.stages, 8) - 2
        hidden = 64 if self.synthetic else 768
        return SPEC.format(
            dimension=self.dimension, blocks=blocks, hidden=hidden, tokens=TOKENS, codec=codec,
            micro_batches=self.micro_batches,
        )  # fmt: skip

    def bound(
        self, codec: str, bytes_per_second: float, seconds: tuple[float, float] = (FORWARD_SECONDS, BACKWARD_SECONDS)
    ) -> Flush:
        """In the time that is meant; `seconds` of a stage's forward and backward."""
        encoded = WIRE[codec] * TOKENS * self.dimension
        return Flush(
            self.stages,
            self.micro_batches,
            *seconds,
            encoded + 4 * TOKENS,
            encoded,
            bytes_per_second * self.slower,
            self.rtt_ms / 2000,
        )


async def measure(joined: Sequence[Member], case: Case, codec: str, in_flight: int | None = None) -> dict[str, Any]:
    """One row, of a peer with that tuning if it has any. Raises `RuntimeError`, `TimeoutError`."""
    seconds = [case.slower * FORWARD_SECONDS, case.slower * BACKWARD_SECONDS] if case.synthetic else None
    spans = equal_cuts(max(case.stages, 8), case.stages)
    told = {"toml": case.toml(codec), "seconds": seconds} | ({"in_flight": in_flight} if in_flight else {})
    try:
        begun = (
            member.ask({"begin": {**told, "span": [span.first, span.last]}}, _BEGIN_SECONDS)
            for member, span in zip(joined, spans, strict=True)
        )
        await asyncio.gather(*begun)
        relayed = case.stages if in_flight else 1  # as often over the driver's link
        longest = 6 * relayed * case.slower * case.bound(codec, case.mbit * 1e6 / 8 / case.slower).seconds + 60
        before = await _flushed(joined, 1 + WARM, longest)
        after = await _flushed(joined, 1 + WARM + MEASURED, longest)
    finally:
        await ask_all(joined, {"end": True}, 60)
    ended = after[0]["ended"][WARM:]
    flushes = len(ended) - 1
    took = ended[-1] - ended[0]
    computed = [[look["seconds"][part] for look in after] for part in (0, 1)] if "seconds" in after[0] else [[0.0]] * 2
    return {
        "seconds": (statistics.mean(computed[0]), statistics.mean(computed[1])),
        "flush_s": statistics.median(b - a for a, b in pairwise(ended)) / case.slower,
        "slowest_s": max(b - a for a, b in pairwise(ended)) / case.slower,
        "most": f"{after[0]['most']}/{after[1]['most']}",
        "in_flight_mb": after[1]["most"] * 4e-6 * TOKENS * case.dimension,
        "mb_sent": sum(b["sent"] - a["sent"] for a, b in zip(before, after, strict=True)) / max(1, MEASURED) / 1e6,
        "cpu_share": sum(b["cpu_seconds"] - a["cpu_seconds"] for a, b in zip(before, after, strict=True))
        / (took * MEASURED / max(1, flushes)),
        "aborted": after[0]["aborted"],
    }


async def _flushed(joined: Sequence[Member], flushes: int, patience: float) -> list[dict[str, Any]]:
    """Until the driver ended so many."""
    deadline = time.monotonic() + patience
    while True:
        looks = await ask_all(joined, {"look": True}, 30)
        if len(looks[0]["ended"]) >= flushes:
            return looks
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(looks[0]['ended'])} flushes in {patience:.0f} s: {looks[0]['trouble']}"[:80])
        await asyncio.sleep(0.3)


async def cells(case: Case, chosen: argparse.Namespace, report: Report) -> None:
    """All methods in one lab."""
    with tempfile.TemporaryDirectory(prefix="atoll-") as place:
        async with wan_network(case.setting.topology()) as network:
            rate = min(await goodput(network))
            for method in chosen.method:
                await _cells_of(method, network, rate, case, chosen, report, Path(place) / method)


async def _cells_of(
    method: str, network: WanNetwork, rate: float, case: Case, chosen: argparse.Namespace, report: Report, place: Path
) -> None:
    """Ours have one set of members for all codecs; a peer has fresh ones for each row."""
    rows = list(product((it for it in METHODS[method] if it in chosen.codec), TUNINGS.get(method, (None,))))
    family = method.partition("-")[0]
    for some in [rows] if family == "atoll" and rows else [[row] for row in rows]:
        try:
            program = f"benchmarks.{PROGRAMS[family]}"
            async with members(network, program, method, place, python_of(family)) as joined:
                for codec, in_flight in some:
                    try:
                        figures = await measure(joined, case, codec, in_flight)
                        add(report, case, method, codec, rate, figures, _noted(in_flight))
                    except (RuntimeError, TimeoutError) as error:
                        add(report, case, method, codec, rate, {}, _noted(in_flight, error))
        except (RuntimeError, TimeoutError) as error:
            for codec, in_flight in some:
                add(report, case, method, codec, rate, {}, _noted(in_flight, error))


def _noted(in_flight: int | None, error: Exception | None = None) -> str:
    """Of a row: its tuning, and why it has no figures."""
    words = [f"{in_flight} in flight"] if in_flight else []
    words += [f"could not run: {error or type(error).__name__}"] if error else []
    return ", ".join(words)[:110]


def add(report: Report, case: Case, method: str, codec: str, rate: float, figures: dict[str, Any], note: str) -> None:
    """One row."""
    took = figures.get("flush_s")
    seconds = figures.get("seconds", (FORWARD_SECONDS, BACKWARD_SECONDS)) if not case.synthetic else None
    bound = case.bound(codec, rate, seconds) if seconds else case.bound(codec, rate)
    cores = case.micro_batches * case.stages * sum(seconds) / min(case.stages, os.cpu_count() or 1) if seconds else 0.0
    work = case.micro_batches * (bound.forward_seconds + bound.backward_seconds)
    report.cell(
        mbit=case.mbit,
        rtt_ms=case.rtt_ms,
        stages=case.stages,
        compute="synthetic" if case.synthetic else "real",
        method=method,
        codec=codec,
        slower=case.slower,
        goodput_mbit=rate * case.slower * 8e-6,
        limit="cores" if cores > bound.seconds else "link" if bound.limited_by_link else "stage",
        tokens_per_s=case.micro_batches * TOKENS / took if took else None,
        share=max(bound.seconds, cores) / took if took else None,
        steady_share=max(bound.steady_seconds, cores) / took if took else None,
        bubble=1 - work / took if took else None,
        **{
            name: figures.get(name)
            for name in ("flush_s", "slowest_s", "most", "in_flight_mb", "mb_sent", "cpu_share", "aborted")
        },
        note=note,
    )
    print(json.dumps(report.cells[-1]), flush=True)


def judge(report: Report) -> None:
    """The acceptance rows, for the cells that were measured."""
    for (mbit, rtt), target in TARGETS.items():
        for codec in METHODS["atoll"]:
            wanted = (mbit, rtt, "atoll", codec, "synthetic")
            keys = ("mbit", "rtt_ms", "method", "codec", "compute")
            found = [it for it in report.cells if tuple(it[key] for key in keys) == wanted]
            if found:
                worst = min(found, key=lambda it: it["share"] or 0.0)
                report.accept(
                    f"share of the bound, {mbit:g} Mbit/s × {rtt:g} ms, {codec}, worst of {len(found)} routes",
                    target=f"≥ {target:.2f}",
                    value=worst["share"] if worst["share"] else worst["note"],
                    holds=all(it["share"] is not None and it["share"] >= target for it in found),
                )
    for peer in PEERS:
        ratios = []
        for cell in report.cells:
            if cell["method"] == peer and cell["tokens_per_s"]:
                key = ("mbit", "rtt_ms", "stages", "compute")
                ours = [
                    it["tokens_per_s"] or 0.0 for it in report.cells
                    if it["method"] == "atoll" and all(it[name] == cell[name] for name in key)
                ]  # fmt: skip
                ratios.append(max(ours, default=0.0) / cell["tokens_per_s"])
        if ratios:
            report.accept(f"times {peer}, worst cell", target="> 1", value=min(ratios), holds=min(ratios) > 1)
        elif any(cell["method"] == peer for cell in report.cells):
            report.accept(f"times {peer}", target="> 1", value="could not run", holds=False)


def link_of(text: str) -> tuple[float, float]:
    """Of an argument. Raises `ValueError`."""
    mbit, rtt = text.split("x")
    return float(mbit), float(rtt)


async def run(chosen: argparse.Namespace, report: Report) -> None:
    """All labs that were asked for."""
    for mbit, rtt in chosen.links:
        for stages in chosen.stages:
            for compute in chosen.compute:
                slower = (chosen.slower or SLOWER[stages]) if compute == "synthetic" else 1.0
                case = Case(stages, mbit, rtt, slower, chosen.micro_batches, compute == "synthetic")
                await cells(case, chosen, report)


def main() -> None:
    """Choose cells, run, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", type=link_of, nargs="+", default=list(LINKS), metavar="MBITxRTT")
    parser.add_argument("--stages", type=int, nargs="+", default=list(STAGES))
    parser.add_argument("--method", nargs="+", choices=METHODS, default=["atoll", *PEERS])
    parser.add_argument("--codec", nargs="+", choices=WIRE, default=list(WIRE))
    parser.add_argument("--compute", nargs="+", choices=("synthetic", "real"), default=["synthetic"])
    parser.add_argument("--micro-batches", type=int, default=MICRO_BATCHES, help="of a flush")
    parser.add_argument("--slower", type=float, help="slow motion; by the number of stages unless given")
    parser.add_argument("--name", default="pipeline", help="of the result's file")
    chosen = parser.parse_args()
    report = Report(chosen.name)
    asyncio.run(run(chosen, report))
    judge(report)
    grid = "; ".join(f"{peer}: {', '.join(map(str, counts))}" for peer, counts in TUNINGS.items())
    report.finish(
        f"activations of {TOKENS} × {DIMENSION}, {MICRO_BATCHES} micro-batches a flush, a stage takes "
        f"{FORWARD_SECONDS * 1000:g} + {BACKWARD_SECONDS * 1000:g} ms; medians of {MEASURED} flushes; "
        f"micro-batches in flight, the best of what was tried: {grid}"
    )


if __name__ == "__main__":
    main()
