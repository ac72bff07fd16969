"""Does a swarm reach the loss of synchronous data parallelism on the same tokens, and what does each ingredient cost?

Swarms in virtual time (`virtual_swarm`), made of the shipped parts, in the setting of the published recipe at a small
size (`parity_jobs`): members begin at shared weights and train real text. Each row changes one thing: the codec,
carry, members of unequal speeds in rounds of fixed time, members replaced all the time, screening. The learning rates
of DDP, of a swarm and of one member alone are each tuned on a grid at the short length. `--explore` compares other
recipes with the published one (`parity_explore`). That such a swarm has the bits of real processes is tested in
`tests/swarm/test_virtual_swarm.py`.

Runs are kept in a file (`--keep`) as they end; a benchmark that is started again with it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.common import Report
from benchmarks.parity_explore import Train, explore
from benchmarks.parity_jobs import STEP_TOKENS, WARM_STEPS, Job, Outcome, run_job
from benchmarks.parity_recipes import Recipe
from benchmarks.resumable_jobs import jobs_on_python_corpus

CELLS = ((4, 480), (8, 240), (4, 1440), (8, 960))  # members, steps of each on average
GRIDS = {"ddp": (2e-3, 4e-3, 8e-3), "swarm": (1e-3, 2e-3, 4e-3), "alone": (1e-3, 2e-3, 4e-3)}
SPEEDS = (4.0, 4.0, 2.0, 1.0)  # step times of every four members: speeds 1:1:2:4
CARRY = 5.0  # steps of a member that an exchange lasts
FRAGMENTS = 4
CHURN = 0.1  # of the members, a round
GENTLE = Recipe(outer=((0, 1.0, 0.0), (0.25, 0.7, 0.8)))  # the best of the outer steps that `--explore` compares
BETTER = "fp32, plain to 0.7/0.8"
ROWS: Mapping[str, Mapping[str, object]] = {
    "fp32": {},
    "int8": {"codec": "int8"},
    "int4": {"codec": "int4"},
    "int2": {"codec": "int2"},
    "int4, screening": {"codec": "int4", "screening": True},
    "int4, carry": {"codec": "int4", "delay": CARRY},
    "fp32, 4 fragments": {"fragments": FRAGMENTS},
    "int4, 4 fragments, carry": {"codec": "int4", "fragments": FRAGMENTS, "delay": CARRY / FRAGMENTS},
    "fp32, speeds 1:1:2:4": {"speeds": SPEEDS},
    "int4, churn": {"codec": "int4", "churn": CHURN},
    BETTER: {"recipe": GENTLE},
    f"{BETTER}, carry": {"recipe": GENTLE, "delay": CARRY},
    f"{BETTER}, speeds 1:1:2:4 by roots": {"recipe": replace(GENTLE, weights="roots"), "speeds": SPEEDS},
}
GAP = {(4, 480): 5.0, (4, 1440): 4.5, (8, 240): 5.2, (8, 960): 7.3}  # percent above DDP, at most
CODECS_COST = {"int4": (0.3, 0.8), "int2": (1.0, 1.0)}  # percent above fp32 in the short and the long run, at most

Key = tuple[int, int, str]  # members, steps, row


def main() -> None:
    arguments = _arguments()
    with jobs_on_python_corpus(arguments.keep, arguments.workers, run_job, Outcome) as finished:
        _measure(arguments, finished.train)


def _measure(arguments: argparse.Namespace, train: Train) -> None:
    rates = {members: tuned(train, members, steps) for members, steps in _shortest(arguments.cells).items()}
    if arguments.explore is not None:
        members, steps = arguments.cells[0]
        explore(train, members, steps, rates[members], arguments.seeds, arguments.explore)
        return
    found: dict[Key, list[Outcome]] = {}
    for members, steps in arguments.cells:
        for name, jobs in _jobs(members, steps, arguments.seeds, rates[members]).items():
            found[members, steps, name] = list(train(jobs).values())
    _tell(found, arguments, rates)


def tuned(train: Train, members: int, steps: int) -> dict[str, float]:
    """The best learning rate of each program at seed 0; a grid grows while the best is at its edge."""
    best = {}
    for program, grid in GRIDS.items():
        rates = list(grid)
        while True:
            done = train(Job(program, members, steps, 0, rate) for rate in rates)
            _, rate = min((outcome.loss, job.learning_rate) for job, outcome in done.items())
            if rate not in (min(rates), max(rates)):
                break
            rates.append(rate / 2 if rate == min(rates) else rate * 2)
        best[program] = rate
    return best


def _shortest(cells: Iterable[tuple[int, int]]) -> dict[int, int]:
    """The steps at which rates are tuned, by number of members: those of the shortest known cell."""
    wanted = {members for members, _ in cells}
    return {members: min(steps for count, steps in {*CELLS, *cells} if count == members) for members in wanted}


def _jobs(members: int, steps: int, seeds: int, rates: Mapping[str, float]) -> dict[str, list[Job]]:
    """Every row's jobs, one a seed."""
    rows = {}
    for name, fields in {"ddp": {}, "alone": {}, **ROWS}.items():
        program = name if name in rates else "swarm"
        given = dict(fields)
        if "speeds" in given:
            given["speeds"] = SPEEDS * (members // len(SPEEDS))
        plain = Job(program, members, steps, 0, rates[program])
        rows[name] = [replace(plain, seed=seed, **given) for seed in range(seeds)]
    return rows


# --- telling ----------------------------------------------------------------------------------------------


def _tell(found: Mapping[Key, list[Outcome]], arguments: argparse.Namespace, rates: Mapping[int, object]) -> None:
    report = Report("parity")
    for (members, steps, name), outcomes in found.items():
        if name in ("ddp", "alone"):
            continue
        report.cell(
            members=members,
            steps=steps,
            swarm=name,
            loss=_loss(outcomes),
            ddp=_loss(found[members, steps, "ddp"]),
            alone=_loss(found[members, steps, "alone"]),
            gap=_above(outcomes, found[members, steps, "ddp"]),
            by_seed=_by_seed(outcomes, found[members, steps, "ddp"]),
            time=outcomes[0].time,
        )
    for members, steps in arguments.cells:
        _accept(report, found, members, steps)
    report.finish(
        f"nats per byte on held-out text, decoder of 0.25 M parameters, {arguments.seeds} seeds; all begin at the "
        f"weights of {WARM_STEPS} synchronous steps; H={Recipe().inner_steps}, {STEP_TOKENS} tokens a step of a "
        f"member, AdamW, outer Nesterov 0.7/0.9 where no other is named. `gap`, `by_seed`: percent above DDP at equal "
        f"tokens. `alone`: one member, as many steps. `time`: in steps of the fastest member; carry: {CARRY:g} of "
        f"them. Of {FRAGMENTS} fragments each is exchanged in that part of the time. Churn: each member is replaced "
        f"with a chance of {CHURN:g} a round. Rates tuned at the short length, seed 0: {rates} (grids {GRIDS}, grown "
        "at their edges)"
    )


def _accept(report: Report, found: Mapping[Key, list[Outcome]], members: int, steps: int) -> None:
    def of(name: str) -> list[Outcome]:
        return found[members, steps, name]

    def accept(what: str, most: float, value: float) -> None:
        name = f"K={members}, T={steps}: {what}"
        report.accept(name, target=f"≤ {most:g} %", value=value, holds=value <= most)

    is_long = steps > _shortest([(members, steps)])[members]
    for recipe in ("fp32", BETTER):
        accept(f"{recipe} above DDP", GAP.get((members, steps), GAP[4, 480]), _above(of(recipe), of("ddp")))
    for codec, most in CODECS_COST.items():
        accept(f"{codec} above fp32", most[is_long], _above(of(codec), of("fp32")))
    unequal = of("fp32, speeds 1:1:2:4")
    accept("speeds 1:1:2:4 above equal steps", 0.7, _above(unequal, of("fp32")))
    equal_steps = max(SPEEDS) * of("fp32")[0].time  # everybody waits for the slowest
    accept("their time beside equal steps", 55.0, 100 * unequal[0].time / equal_steps)
    accept("churn above none", 2.0, _above(of("int4, churn"), of("int4")))
    accept("4 fragments above whole rounds", 0.3, _above(of("fp32, 4 fragments"), of("fp32")))
    accept("screening above none", 0.2, _above(of("int4, screening"), of("int4")))


def _loss(outcomes: list[Outcome]) -> float:
    return statistics.mean(outcome.loss for outcome in outcomes)


def _above(mine: list[Outcome], other: list[Outcome]) -> float:
    """Percent, of the means over seeds."""
    return 100 * (_loss(mine) / _loss(other) - 1)


def _by_seed(mine: list[Outcome], other: list[Outcome]) -> str:
    return " ".join(f"{_above([one], [two]):+.2f}" for one, two in zip(mine, other, strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=_cell, nargs="+", default=list(CELLS), metavar="MEMBERSxSTEPS")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--keep", type=Path, help="file of finished runs; a run that stands in it is not made again")
    parser.add_argument(
        "--explore", nargs="?", const="", metavar="WORD", help="other recipes instead, in the first cell: all, or some"
    )
    return parser.parse_args()


def _cell(text: str) -> tuple[int, int]:
    members, steps = text.split("x")
    return int(members), int(steps)


if __name__ == "__main__":
    main()
