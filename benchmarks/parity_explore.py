"""Recipes that may come closer to synchronous DDP than the published one; `parity --explore` compares them.

Every recipe trains the same tokens from the same weights as the published one. Where a recipe changes the inner
optimiser, its learning rate is tuned again, and so is DDP's with it: it is the gap that is to shrink, not only the
loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from benchmarks.parity_jobs import Job, Outcome
from benchmarks.parity_recipes import PUBLISHED, Recipe

SPEEDS = (4.0, 4.0, 2.0, 1.0)
RECIPES: Mapping[str, Recipe] = {
    "published: 0.7, 0.9": PUBLISHED,
    "0.54, 0.9": Recipe(outer=((0, 0.54, 0.9),)),
    "0.7, 0.8": Recipe(outer=((0, 0.7, 0.8),)),
    "1.0, 0.8": Recipe(outer=((0, 1.0, 0.8),)),
    "plain to 0.7, 0.9 over all (demo)": Recipe(outer=((0, 1.0, 0.0), (1, 0.7, 0.9))),
    "momentum falls to 0.5 in the last third": Recipe(outer=((0, 0.7, 0.9), (0.67, 0.7, 0.9), (1, 0.7, 0.5))),
    "rounds grow by 0.1": Recipe(growth=0.1),
    "by agreement of members": Recipe(layers="agreement"),
    "floor 0.3": Recipe(floor=0.3),
    "AdamW β₂ 0.99": Recipe(betas=(0.9, 0.99)),
    "mean of the last 2 anchors": Recipe(last=2),
}
Train = Callable[[Iterable[Job]], dict[Job, Outcome]]


def explore(train: Train, members: int, steps: int, rates: Mapping[str, float], seeds: int) -> None:
    """Run them all and tell."""
    plain = Job("swarm", members, steps, 0, rates["swarm"])
    train([replace(plain, recipe=Recipe(look=True)), replace(plain, codec="int2", recipe=Recipe(look=True))])
    done = {name: _losses(train, replace(plain, recipe=recipe), seeds) for name, recipe in RECIPES.items()}
    unequal = replace(plain, speeds=SPEEDS)
    done |= {
        f"1:1:2:4 {weights}": _losses(train, replace(unequal, recipe=Recipe(weights=weights)), seeds)
        for weights in ("roots", "equal")
    }
    muon = Recipe(inner="muon")
    for rate in (4e-3, 8e-3, 16e-3):
        for program in ("ddp", "swarm"):
            job = Job(program, members, steps, 0, rate, recipe=muon)
            done[f"muon {program} {rate}"] = _losses(train, job, 1)
    for name, losses in done.items():
        print(f"{statistics.mean(losses):.4f} {name}")


def _losses(train: Train, job: Job, seeds: int) -> list[float]:
    return [outcome.loss for outcome in train(replace(job, seed=seed) for seed in range(seeds)).values()]
