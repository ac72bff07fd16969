"""A part of `gpu_hour`: the default recipe beside synchronous training, `recipe`'s setting with 30 M parameters.

A swarm of four members in virtual time, 480 steps of each, with int4 and exchanges of five steps; and synchronous data
parallelism of AdamW and Muon at a few rates, with equal tokens. All begin at the same weights.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from atoll.core.model_spec import ModelSection
from atoll.core.recipe import recipe_for
from atoll.core.run_spec import DataSection, OptimizerSection, RunSection, RunSpec, SyncSection
from atoll.node.data.corpus import load_corpus
from atoll.node.training.loop import InnerLoop
from benchmarks.gpu_session import Hour
from benchmarks.parity import CARRY, FRAGMENTS
from benchmarks.parity_recipes import Recipe, RecipeSwarm
from benchmarks.synchronous_baseline import train_on
from benchmarks.virtual_swarm import SwarmConfig, fresh

MEMBERS, INNER_STEPS = 4, 20
RATES: dict[Literal["adamw", "muon"], tuple[float, ...]] = {"adamw": (1e-3, 2e-3, 4e-3), "muon": (4.4e-3, 8.8e-3)}


@dataclass(frozen=True)
class Job:
    """One training run."""

    name: str
    model: ModelSection
    sequence_length: int
    samples: int  # of a member's step
    steps: int  # of each member
    optimizer: Literal["adamw", "muon"]
    learning_rate: float
    fragments: int = 0  # of a swarm; 0: synchronous

    @property
    def tokens(self) -> int:
        """That all members train together; a swarm's first round is one step of each."""
        return MEMBERS * (self.steps + 1) * self.sequence_length * self.samples


def jobs_for(cpu: bool) -> list[Job]:
    """All runs that are compared."""
    model = ModelSection(preset="nano", layers=1) if cpu else ModelSection(preset="30m")
    length, samples, steps = (64, 1, 20) if cpu else (512, 16, 480)
    rate = recipe_for(model, "auto").learning_rate
    jobs = [
        Job(f"swarm of {MEMBERS}, fragments {count}", model, length, samples, steps, "muon", rate, count)
        for count in (1, FRAGMENTS)
    ]
    titles = {"adamw": "AdamW", "muon": "Muon"}
    return jobs + [
        Job(f"{titles[name]} DDP at {rate:g}", model, length, samples, steps, name, rate)
        for name, rates in RATES.items()
        for rate in (rates[:1] if cpu else rates)
    ]


def spec_of(job: Job, corpus: Path) -> RunSpec:
    """The run spec; that of synchronous training has the batch of all members."""
    shipped = recipe_for(job.model, job.optimizer)
    step_tokens = job.sequence_length * job.samples
    return RunSpec(
        version=1,
        run=RunSection(name="recipe", stop_tokens=job.tokens),
        model=job.model,
        data=DataSection(path=str(corpus), sequence_length=job.sequence_length, validation_samples=256),
        optimizer=OptimizerSection(
            name=job.optimizer,
            learning_rate=job.learning_rate,
            weight_decay=shipped.weight_decay,
            warmup_tokens=job.tokens // 20,
            precision="bf16",
            micro_batch_samples=job.samples * (1 if job.fragments else MEMBERS),
        ),
        sync=SyncSection(
            round_tokens=MEMBERS * INNER_STEPS * step_tokens, round_growth=0.1, fragments=max(1, job.fragments)
        ),
    )


def warm_start(job: Job, corpus: Path, device: str, path: Path) -> None:
    """Write the weights that every run begins with: after a short synchronous run on samples in another order."""
    synchronous = Job("begin", job.model, job.sequence_length, job.samples, job.steps // 2, "adamw", 1e-3)
    spec = spec_of(synchronous, corpus)
    spec = spec.model_copy(update={"run": spec.run.model_copy(update={"seed": 1_000_000})})
    loop = InnerLoop(spec, load_corpus(spec), device)
    train_on(loop, synchronous.steps)
    torch.save(loop.weights.read().cpu(), path)
    loop.close()


def train(job: Job, corpus: Path, device: str, begin: Path) -> float:
    """Held-out loss at the end, nats per byte. Runs in a process of its own."""
    torch.set_num_threads(1 if device == "cpu" else 4)
    spec, weights_E = spec_of(job, corpus), torch.load(begin)
    if not job.fragments:
        loop = InnerLoop(spec, load_corpus(spec), device)
        train_on(loop, job.tokens // spec.tokens_per_step, weights_E)
        loss = loop.evaluate(loop.weights.read().cpu())
        loop.close()
        return loss
    shipped = recipe_for(job.model, "auto")
    rule = Recipe(inner="muon", outer=((0, shipped.outer_learning_rate, shipped.outer_momentum),), growth=0.1)
    config = SwarmConfig((1.0,) * MEMBERS, "int4", CARRY / job.fragments, device=device)
    swarm = RecipeSwarm(spec, load_corpus(spec), config, fresh(spec, MEMBERS, weights_E), rule)
    while swarm.trained_tokens < job.tokens:
        swarm.round(rule.weigh)
    loss = swarm.final_loss()
    swarm.close()
    return loss


def recipe(hour: Hour) -> None:
    """Held-out losses at equal tokens, all programs at once; each is a process."""
    jobs = jobs_for(hour.cpu)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as scratch:
        begin = Path(scratch) / "begin.pt"
        warm_start(jobs[0], hour.corpus, str(hour.device), begin)
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(2 if hour.cpu else len(jobs), context) as pool:
            running = {pool.submit(train, job, hour.corpus, str(hour.device), begin): job for job in jobs}
            losses: dict[str, float] = {}
            for done in concurrent.futures.as_completed(running):
                job = running[done]
                losses[job.name] = done.result()
                hour.say(job.name, loss=losses[job.name])
    best = {kind: min(loss for name, loss in losses.items() if name.startswith(kind)) for kind in ("AdamW", "Muon")}
    for name, loss in losses.items():
        if name.startswith("swarm"):
            beside = {f"beside_{kind}_percent": 100 * (loss / other - 1) for kind, other in best.items()}
            hour.say(f"{name} beside synchronous", **beside)
