"""One training run of `parity`: what it is, and how it is carried out in a process of its own.

The setting is that of the published recipe at a small size: a byte-level decoder of 0.25 M parameters, all programs
begin at the same weights (a short synchronous warm start, AdamW fresh after it), H = 20 inner steps of 2×128 tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from atoll.core.model_spec import ModelSection
from atoll.core.run_spec import DataSection, OptimizerSection, RunSection, RunSpec, SyncSection
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.training.loop import InnerLoop
from benchmarks.parity_recipes import PUBLISHED, Recipe, RecipeSwarm
from benchmarks.synchronous_baseline import train_on
from benchmarks.virtual_swarm import SwarmConfig, fresh

SEQUENCE_LENGTH, MICRO_BATCH = 128, 2
STEP_TOKENS = SEQUENCE_LENGTH * MICRO_BATCH
WARM_STEPS, WARM_MEMBERS, WARM_RATE = 240, 4, 4e-3
WARM_SEEDS = 1_000_000  # a warm start is trained on samples in another order
MODEL = ModelSection(dimension=80, layers=3, heads=4, kv_heads=2, hidden_dimension=208)


@dataclass(frozen=True)
class Job:
    """One run. All speeds are step times in those of the fastest member."""

    program: str  # "ddp", "alone" or "swarm"
    members: int  # of DDP: by how many the batch is larger
    steps: int  # of each member, on average
    seed: int
    learning_rate: float
    codec: str = "fp32"
    speeds: tuple[float, ...] = ()  # none: equal
    delay: float = 0.0
    churn: float = 0.0  # chance of each member to be replaced after a round
    screening: bool = False
    fragments: int = 1
    recipe: Recipe = PUBLISHED

    @property
    def tokens(self) -> int:
        """That all train together; a swarm's first round is one step of each."""
        return (1 if self.program == "alone" else self.members) * (self.steps + 1) * STEP_TOKENS

    def key(self) -> str:
        """What names it, also in the file of finished runs: its fields that are not the usual ones."""
        usual = Job(self.program, self.members, self.steps, self.seed, self.learning_rate)
        said = [f"{name} {value}" for name, value in vars(self).items() if value != getattr(usual, name)]
        told = f"{self.program} {self.members}x{self.steps} seed {self.seed} rate {self.learning_rate:g}"
        return ", ".join([told, *said])


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    loss: float  # held-out, nats per byte
    tokens: int  # committed; all but what screening left out
    time: float = 0.0  # steps of the fastest member
    looks: dict[str, list[float]] = field(default_factory=dict)  # what a recipe wanted to know of every round


# --- in the worker ----------------------------------------------------------------------------------------


def run_job(job: Job, corpus_path: str) -> Outcome:
    """Train and evaluate. Runs in a spawned process with one thread."""
    torch.set_num_threads(1)
    if job.program == "swarm":
        return _run_swarm(job, corpus_path)
    loop = _loop(spec_of(job, corpus_path))
    steps = job.tokens // loop.spec.tokens_per_step
    train_on(loop, steps, warm_start(job.seed, corpus_path))
    loss = loop.evaluate(loop.weights_E)
    loop.close()
    return Outcome(loss, job.tokens, float(steps))


def _run_swarm(job: Job, corpus_path: str) -> Outcome:
    spec, rng = spec_of(job, corpus_path), random.Random(job.seed)
    speeds = job.speeds or (1.0,) * job.members
    ingredients = SwarmConfig(speeds, job.codec, job.delay, job.screening)
    saved = fresh(spec, job.members, warm_start(job.seed, corpus_path))
    swarm = RecipeSwarm(spec, corpus_of(corpus_path), ingredients, saved, job.recipe)
    while swarm.trained_tokens < job.tokens:  # screening may keep some from being committed
        swarm.round(job.recipe.weigh)
        for member in list(swarm.members):
            if rng.random() < job.churn:
                swarm.replace(member, f"newcomer-{swarm.rounds}-{member}")
    outcome = Outcome(swarm.final_loss(), swarm.committed_tokens, swarm.time, dict(swarm.looks))
    swarm.close()
    return outcome


def spec_of(job: Job, corpus_path: str) -> RunSpec:
    """The run spec; DDP's has a larger batch."""
    members = job.members if job.program == "ddp" else 1
    return RunSpec(
        version=1,
        run=RunSection(name="parity", seed=job.seed, stop_tokens=job.tokens),
        model=MODEL,
        data=DataSection(path=corpus_path, sequence_length=SEQUENCE_LENGTH, validation_samples=256),
        optimizer=OptimizerSection(
            name=job.recipe.inner,
            learning_rate=job.learning_rate,
            warmup_tokens=job.tokens // 20,
            micro_batch_samples=MICRO_BATCH * members,
            betas=job.recipe.betas,
            weight_decay=job.recipe.weight_decay,
            minimum_learning_rate_fraction=job.recipe.floor,
        ),
        sync=SyncSection(
            round_tokens=job.members * job.recipe.inner_steps * STEP_TOKENS,
            round_growth=job.recipe.growth,
            exchange_share=job.recipe.exchange_share,
            fragments=job.fragments,
        ),
    )


@cache
def warm_start(seed: int, corpus_path: str) -> Tensor:
    """Weights that every program of a seed begins with."""
    job = Job("ddp", WARM_MEMBERS, WARM_STEPS, WARM_SEEDS + seed, WARM_RATE)
    loop = _loop(spec_of(job, corpus_path))
    train_on(loop, WARM_STEPS)
    weights_E = loop.weights_E.clone()
    loop.close()
    return weights_E


def _loop(spec: RunSpec) -> InnerLoop:
    return InnerLoop(spec, corpus_of(spec.data.path), "cpu")


@cache
def corpus_of(path: str) -> Corpus:
    return load_corpus(spec_of(Job("alone", 1, 1, 0, WARM_RATE), path), None)
