"""Recipes that may come closer to synchronous DDP than the published one; `parity --explore` compares them.

Every recipe trains the same tokens from the same weights as the published one, and each is compared with the DDP that
has the same inner optimiser: it is the gap that is to shrink, not only the loss. Rates are tuned again for Muon.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.common import Report
from benchmarks.parity_jobs import Job, Outcome
from benchmarks.parity_recipes import PUBLISHED, WHOLE, Recipe

SPEEDS = (4.0, 4.0, 2.0, 1.0)
MUON_RATES = (4e-3, 8e-3)
Train = Callable[[Iterable[Job]], dict[Job, Outcome]]


@dataclass(frozen=True)
class Trial:
    """One recipe, and what its loss is compared with."""

    recipe: Recipe
    codec: str = "fp32"
    speeds: tuple[float, ...] = ()
    ddp: Recipe = PUBLISHED  # the inner optimiser of the DDP beside it
    delay: float = 0.0  # steps that an exchange takes


SHARES = (1.0, 0.5, 0.25)  # of a round's time, that an exchange may take
SLOWER, GENTLE, PLAIN = ((0, 0.7, 0.8),), ((0, 1.0, 0.0), (0.25, 0.7, 0.8)), ((0, 1.0, 0.0),)
MUON, FLOOR = Recipe(inner="muon"), Recipe(floor=0.3)
TRIALS: Mapping[str, Trial] = {
    "published: 0.7, 0.9": Trial(PUBLISHED),
    "0.7, 0.8": Trial(Recipe(outer=SLOWER)),
    "0.7 to 1.0, 0.8": Trial(Recipe(outer=((0, 0.7, 0.8), (1, 1.0, 0.8)))),
    "1.0, 0.7": Trial(Recipe(outer=((0, 1.0, 0.7),))),
    "plain to 0.7, 0.8 in a quarter": Trial(Recipe(outer=GENTLE)),
    "plain to 0.7, 0.9 over all (demo)": Trial(Recipe(outer=((0, 1.0, 0.0), (1, 0.7, 0.9)))),
    "plain 0.8 to 1.0, 0.9 over all": Trial(Recipe(outer=((0, 0.8, 0.0), (1, 1.0, 0.9)))),
    "0.35 to 1.0, 0.9": Trial(Recipe(outer=((0, 0.35, 0.9), (1, 1.0, 0.9)))),
    "0.5 to 1.2, 0.8": Trial(Recipe(outer=((0, 0.5, 0.8), (1, 1.2, 0.8)))),
    "rounds grow by 0.1": Trial(Recipe(growth=0.1)),
    "layers by agreement": Trial(Recipe(layers="agreement")),
    "layers by agreement; 0.7, 0.8": Trial(Recipe(layers="agreement", outer=SLOWER)),
    "inner rate falls to 0.3": Trial(FLOOR, ddp=FLOOR),
    "inner rate falls to 0.3; 0.7, 0.8": Trial(replace(FLOOR, outer=SLOWER), ddp=FLOOR),
    "AdamW β₂ 0.99": Trial(Recipe(betas=(0.9, 0.99)), ddp=Recipe(betas=(0.9, 0.99))),
    "Muon": Trial(MUON, ddp=MUON),
    "Muon; plain to 0.7, 0.8 in a quarter": Trial(replace(MUON, outer=GENTLE), ddp=MUON),
    "the largest 1/64, feedback 0.95, plain": Trial(Recipe(kept_share=1 / 64, feedback=0.95, outer=PLAIN)),
    "the largest 1/64, plain": Trial(Recipe(kept_share=1 / 64, outer=PLAIN)),
    "the largest 1/64, feedback 0.95; 0.7, 0.8": Trial(Recipe(kept_share=1 / 64, feedback=0.95, outer=SLOWER)),
    "int2, H=80; 0.7, 0.8": Trial(Recipe(inner_steps=80, outer=SLOWER), "int2"),
    "int2, H=120; 0.7, 0.8": Trial(Recipe(inner_steps=120, outer=SLOWER), "int2"),
    "speeds 1:1:2:4": Trial(PUBLISHED, speeds=SPEEDS),
    "speeds 1:1:2:4, weights by roots": Trial(Recipe(weights="roots"), speeds=SPEEDS),
    "speeds 1:1:2:4, weights equal": Trial(Recipe(weights="equal"), speeds=SPEEDS),
    "speeds 1:1:2:4, weights by roots; 0.7, 0.8": Trial(Recipe(weights="roots", outer=SLOWER), speeds=SPEEDS),
    "speeds 1:1:2:4, weights by roots; plain to 0.7, 0.8 in a quarter": Trial(
        Recipe(weights="roots", outer=GENTLE), speeds=SPEEDS
    ),
    "carry of 5 steps": Trial(Recipe(outer=SLOWER), "int4", delay=5.0),
    "carry of 5 steps, a half is kept": Trial(Recipe(outer=SLOWER, carry_share=0.5), "int4", delay=5.0),
    "carry of 5 steps, nothing is kept": Trial(Recipe(outer=SLOWER, carry_share=0.0), "int4", delay=5.0),
    "carry of 5 steps, ahead": Trial(Recipe(outer=SLOWER, eager_outer_step=True), "int4", delay=5.0),
    **{
        f"exchanges of {delay:g} steps, at most {share:g} of a round{words}": Trial(
            Recipe(exchange_share=share, growth=growth), "int4", delay=delay
        )
        for delay, share, (words, growth) in product((10.0, 20.0), SHARES, (("", WHOLE), ("; rounds grow by 0.1", 0.1)))
    },
}


def explore(train: Train, members: int, steps: int, rates: Mapping[str, float], seeds: int, word: str) -> None:
    """Run those whose names begin with `word`, and tell."""
    report = Report(f"parity_explore_{word}" if word else "parity_explore")
    muon: dict[str, float] = {}

    def losses(
        program: str, recipe: Recipe, speeds: tuple[float, ...] = (), codec: str = "fp32", delay: float = 0.0
    ) -> list[float]:
        if recipe.inner == "muon" and program not in muon:
            muon[program] = _best(train, Job(program, members, steps, 0, 1.0, recipe=MUON))
        rate = (muon if recipe.inner == "muon" else rates)[program]
        plain = Job(program, members, steps, 0, rate, codec, speeds, delay, recipe=recipe)
        jobs = [replace(plain, seed=seed) for seed in range(seeds)]
        return [outcome.loss for outcome in train(jobs).values()]

    for name, it in ((name, it) for name, it in TRIALS.items() if name.startswith(word)):
        mine, ddp = losses("swarm", it.recipe, it.speeds, it.codec, it.delay), losses("ddp", it.ddp)
        published = losses("swarm", PUBLISHED, it.speeds)
        report.cell(
            recipe=name,
            loss=statistics.mean(mine),
            ddp=statistics.mean(ddp),
            gap=_percent(statistics.mean(mine), statistics.mean(ddp)),
            gap_by_seed=_by_seed(mine, ddp),
            beside_published=_by_seed(mine, published),
        )
    report.finish(
        f"K={members}, T={steps}, fp32 where no codec is named, int4 where exchanges take steps (else they take none), "
        f"{seeds} seeds; `gap`: percent above the DDP of the same inner optimiser; `beside_published`: percent, by "
        f"seed, beside the published recipe at the same speeds. Outer learning rate and momentum move in a line over "
        f"the run where two are named. Rates: {rates}; Muon {muon}"
    )


def _best(train: Train, job: Job) -> float:
    done = train(replace(job, learning_rate=rate) for rate in MUON_RATES)
    return min((outcome.loss, it.learning_rate) for it, outcome in done.items())[1]


def _by_seed(mine: list[float], others: list[float]) -> str:
    return " ".join(f"{_percent(one, other):+.2f}" for one, other in zip(mine, others, strict=True))


def _percent(mine: float, other: float) -> float:
    return 100 * (mine / other - 1)
