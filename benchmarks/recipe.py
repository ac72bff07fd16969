"""Is a swarm that trains as run specs mean by default better than synchronous training, and by how much?

The setting is `parity`'s: members in virtual time made of the shipped parts, real text, 0.25 M parameters, equal
tokens, all begin at the same weights. The swarm has what `core/recipe.py` says, int4, and exchanges during which
members train on: five steps of a whole model, or a quarter of that for each of four fragments. Synchronous
data parallelism has AdamW or Muon, each at the best rate of a grid. Finished runs are kept with `--keep`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from atoll.core.recipe import recipe_for
from benchmarks.common import Report
from benchmarks.parity import CARRY, FRAGMENTS
from benchmarks.parity_explore import Train
from benchmarks.parity_jobs import MODEL, Job, Outcome, run_job
from benchmarks.parity_recipes import PUBLISHED, Recipe
from benchmarks.resumable_jobs import jobs_on_python_corpus

CELLS = {(4, 480): -8.0, (8, 240): -5.0}  # members, steps of each → percent beside AdamW DDP, at most
MUON_GAP = 3.0  # percent above Muon DDP, at most
SHIPPED = recipe_for(MODEL, "auto")
DEFAULT = Recipe(
    inner=SHIPPED.optimizer,
    outer=((0, SHIPPED.outer_learning_rate, SHIPPED.outer_momentum),),
    weight_decay=SHIPPED.weight_decay,
    growth=0.1,
)
DDP: Mapping[str, tuple[Recipe, tuple[float, ...]]] = {
    "AdamW": (PUBLISHED, (4e-3, 8e-3, 16e-3)),
    "Muon": (Recipe(inner="muon", weight_decay=SHIPPED.weight_decay), (8e-3, 16e-3, 32e-3)),
}


def main() -> None:
    arguments = _arguments()
    report = Report("recipe")
    with jobs_on_python_corpus(arguments.keep, arguments.workers, run_job, Outcome) as finished:
        for (members, steps), most in CELLS.items():
            _measure(report, finished.train, members, steps, most, arguments.seeds)
    report.finish(
        f"nats per byte on held-out text, {arguments.seeds} seeds, percent beside DDP at equal tokens, H=20. Swarm: "
        f"{SHIPPED}, rounds grow by {DEFAULT.growth:g}, int4, exchanges of {CARRY:g} steps (of {FRAGMENTS} fragments: "
        f"a quarter). DDP: the best rate of {', '.join(f'{name} {grid}' for name, (_, grid) in DDP.items())} at seed 0"
    )


def _measure(report: Report, train: Train, members: int, steps: int, most: float, seeds: int) -> None:
    ddp = {name: _ddp(train, name, members, steps, seeds) for name in DDP}
    for fragments in (FRAGMENTS, 1):
        plain = Job("swarm", members, steps, 0, SHIPPED.learning_rate, "int4", delay=CARRY / fragments)
        job = replace(plain, fragments=fragments, recipe=DEFAULT)
        losses = [it.loss for it in train(replace(job, seed=seed) for seed in range(seeds)).values()]
        beside = {name: 100 * (statistics.mean(losses) / statistics.mean(other) - 1) for name, other in ddp.items()}
        report.cell(
            members=members,
            steps=steps,
            fragments=fragments,
            loss=statistics.mean(losses),
            adamw_ddp=statistics.mean(ddp["AdamW"]),
            muon_ddp=statistics.mean(ddp["Muon"]),
            beside_adamw=beside["AdamW"],
            beside_muon=beside["Muon"],
            by_seed=" ".join(f"{100 * (a / b - 1):+.2f}" for a, b in zip(losses, ddp["AdamW"], strict=True)),
        )
        for name, limit in (("AdamW", most), ("Muon", MUON_GAP)):
            what = f"K={members}, T={steps}, {fragments} fragments: beside {name} DDP"
            report.accept(what, target=f"≤ {limit:+g} %", value=beside[name], holds=beside[name] <= limit)


def _ddp(train: Train, name: str, members: int, steps: int, seeds: int) -> list[float]:
    """Losses by seed at the rate that is best at seed 0."""
    recipe, grid = DDP[name]
    plain = Job("ddp", members, steps, 0, 0.0, recipe=recipe)
    tried = train(replace(plain, learning_rate=rate) for rate in grid)
    _, best = min((outcome.loss, job.learning_rate) for job, outcome in tried.items())
    jobs = [replace(plain, learning_rate=best, seed=seed) for seed in range(seeds)]
    return [outcome.loss for outcome in train(jobs).values()]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--keep", type=Path, help="file of finished runs; a run that stands in it is not made again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
