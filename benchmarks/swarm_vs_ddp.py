"""Is the model as good as synchronous data parallelism on the same tokens? And better than one node alone?

Three programs on one corpus, one model, one held-out set: synchronous DDP (learning rate tuned on a grid), the
fastest node alone for the same wall clock, and the swarm: in virtual time with one ingredient changed at a time,
and as `atoll demo` really runs it, with its processes, its network and its measured speeds.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.core.run_spec import RunSpec, parse_run_spec
from benchmarks.common import Report

EQUAL, UNEQUAL = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 2.0, 4.0)
INNER_STEPS = 20  # H: inner steps of a full-speed node a round
DELAY = 2.0  # virtual step times that an exchange lasts; the demo's takes about one
GRID = {"ddp": (2e-3, 4e-3, 8e-3), "alone": (1e-3, 2e-3, 4e-3)}
VARIANTS: dict[str, tuple[tuple[float, ...], str, float]] = {
    "equal speeds, fp32, no delay": (EQUAL, "fp32", 0.0),
    "equal speeds, int4, no delay": (EQUAL, "int4", 0.0),
    "equal speeds, int4, carry": (EQUAL, "int4", DELAY),
    "unequal speeds, fp32, no delay": (UNEQUAL, "fp32", 0.0),
    "unequal speeds, int4, carry": (UNEQUAL, "int4", DELAY),
}


@dataclass(frozen=True)
class Job:
    """One training run, to be carried out in a process of its own."""

    kind: str  # "ddp", "alone", or a key of VARIANTS
    steps: int  # of a full-speed node
    seed: int
    learning_rate: float  # of DDP and of one node alone, with AdamW; a swarm trains with what specs mean by default
    tokens: int  # in all


def main() -> None:
    arguments = _arguments()
    report = Report("swarm_vs_ddp")
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        corpus = Path(folder) / "corpus.txt"
        from atoll.lab.corpus import write_python_corpus

        write_python_corpus(corpus)
        demos = {
            steps: [_demo(steps, seed, corpus) for seed in range(arguments.seeds)] if arguments.demo else []
            for steps in arguments.steps
        }
        with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:

            def train(jobs: list[Job]) -> dict[Job, float]:
                return dict(zip(jobs, pool.map(run_job, jobs, [str(corpus)] * len(jobs)), strict=True))

            rates = _tune(train, min(arguments.steps))
            for steps in arguments.steps:
                _tell(report, steps, train(list(_jobs(steps, arguments.seeds, rates))), demos[steps])
    report.finish(
        f"nats per byte, built-in 'nano' model, mean over {arguments.seeds} seeds; learning rates tuned at "
        f"T={min(arguments.steps)}, seed 0: {rates} of {GRID}, AdamW; swarms as the demo trains; "
        f"H={INNER_STEPS}; batch of DDP: {4 * _step_tokens()} tokens a step"
    )


def _tune(train: Callable[[list[Job]], dict[Job, float]], steps: int) -> dict[str, float]:
    """The best learning rate of each program on its grid, at the shortest length."""
    tokens = {"ddp": 4 * steps * _step_tokens(), "alone": steps * _step_tokens()}
    losses = train([Job(kind, steps, 0, rate, total) for kind, total in tokens.items() for rate in GRID[kind]])
    return {
        kind: min((loss, job.learning_rate) for job, loss in losses.items() if job.kind == kind)[1] for kind in tokens
    }


def run_job(job: Job, corpus_path: str) -> float:
    """Train and return the held-out loss. Runs in a spawned process with one thread."""
    import torch

    from atoll.node.data.corpus import load_corpus
    from benchmarks.synchronous_baseline import train_alone
    from benchmarks.virtual_swarm import SwarmConfig, VirtualSwarm

    torch.set_num_threads(1)
    members = 4 if job.kind == "ddp" else 1
    spec = _spec(job, corpus_path, accumulate=members)
    corpus = load_corpus(spec, None)
    if job.kind in ("ddp", "alone"):
        return train_alone(spec, corpus, job.tokens // spec.tokens_per_step)
    swarm = VirtualSwarm(spec, corpus, SwarmConfig(*VARIANTS[job.kind]))
    swarm.run(job.tokens)
    loss = swarm.evaluate()
    swarm.close()
    return loss


def _jobs(steps: int, seeds: int, rates: dict[str, float]) -> Iterable[Job]:
    totals = {speeds: _tokens(steps, speeds) for speeds in (EQUAL, UNEQUAL)}
    for seed in range(seeds):
        for tokens in totals.values():
            yield Job("ddp", steps, seed, rates["ddp"], tokens)
        yield Job("alone", steps, seed, rates["alone"], steps * _step_tokens())
        for name, (speeds, _, _) in VARIANTS.items():
            yield Job(name, steps, seed, 0.0, totals[speeds])


def _tokens(steps: int, speeds: tuple[float, ...]) -> int:
    """Of all nodes, when a full-speed node makes `steps` steps."""
    return int(steps * sum(1 / time for time in speeds)) * _step_tokens()


def _tell(report: Report, steps: int, losses: dict[Job, float], demos: list[dict[str, Any]]) -> None:
    def of(kind: str, tokens: int | None = None) -> float:
        fitting = [loss for job, loss in losses.items() if job.kind == kind and tokens in (None, job.tokens)]
        return statistics.mean(fitting)

    alone = of("alone")
    gaps: dict[str, float] = {}
    for name in VARIANTS:
        mine, ddp = of(name), of("ddp", _tokens(steps, VARIANTS[name][0]))
        gaps[name] = mine / ddp - 1
        report.cell(steps=steps, swarm=name, loss=mine, ddp=ddp, gap_percent=100 * gaps[name], alone=alone)
    equal = "equal speeds, fp32, no delay"
    report.accept(
        f"T={steps}: {equal}", target="≤ −5 % beside AdamW DDP", value=100 * gaps[equal], holds=gaps[equal] <= -0.05
    )
    if not demos:
        return
    mine = statistics.mean(demo["val_loss_last"] for demo in demos)
    ddp = of("ddp", _tokens(steps, UNEQUAL))  # the demo stops at the first round past those tokens
    gap = mine / ddp - 1
    report.cell(
        steps=steps, swarm="atoll demo (real processes)", loss=mine, ddp=ddp, gap_percent=100 * gap, alone=alone
    )
    report.accept(f"T={steps}: as the demo runs", target="≤ −5 % beside AdamW DDP", value=100 * gap, holds=gap <= -0.05)
    report.accept(
        f"T={steps}: better than the fastest node alone", target=f"< {alone:.3f}", value=mine, holds=mine < alone
    )


def _demo(steps: int, seed: int, corpus: Path) -> dict[str, Any]:
    """The shipped demo as a person runs it, on the same text, until a full-speed node has made about `steps` steps."""
    tokens = _tokens(steps, UNEQUAL)
    command = [str(Path(sys.executable).parent / "atoll"), "demo", "--output", "json", "--minutes", "30"]
    command += ["--tokens", str(tokens), "--seed", str(seed), "--data", str(corpus), "--inner-steps", str(INNER_STEPS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=2400, check=True)
    result: dict[str, Any] = json.loads(done.stdout)["demo"]
    return result


def _spec(job: Job, corpus: str, accumulate: int) -> RunSpec:
    """The demo's own spec, so that all programs train the same model on the same samples."""
    from atoll.lab.demo import spec_toml

    speeds = VARIANTS[job.kind][0] if job.kind in VARIANTS else UNEQUAL
    text = spec_toml(
        seed=job.seed,
        nodes=4,
        tokens=job.tokens,
        corpus=Path(corpus),
        codec="int4",
        slowdowns=speeds,
        inner_steps=INNER_STEPS,
        optimizer="" if job.kind in VARIANTS else f'name = "adamw"\nlearning_rate = {job.learning_rate}',
        accumulate=accumulate,
    )
    return parse_run_spec(text)


def _step_tokens() -> int:
    from atoll.lab.demo import STEP_TOKENS

    return STEP_TOKENS


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[480, 1440], help="of a full-speed node")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--no-demo", dest="demo", action="store_false", help="only the virtual swarm")
    return parser.parse_args()


if __name__ == "__main__":
    main()
