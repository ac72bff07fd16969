"""How often committed rounds hold each sample of an epoch, while members die, leave, come back, stall and restart.

The rules that run are the shipped ones of `core/data_position.py`, `SampleFeed` and `Progress`; nothing is trained
(`tests/support/sample_ledger.py`). Paces differ by 1 : 4 and from round to round. In each round 5 % of the members are
replaced, half of them by dying. Plans change up to four times in a round. The figures are those of the first epoch, at
two moments: when as many trainings are committed as the epoch has samples, and when nobody can train a sample of it any
more. `lost` samples were in flight when their node died. Coverage leaves them out.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from support.sample_ledger import PEACE, Outcome, Setting, Shares, run

from benchmarks.common import Report

MEMBERS = (8, 64, 256)
SEEDS = {8: 32, 64: 8, 256: 4}
LEAST_COVERAGE, MOST_DOUBLES = 0.999, 0.001
STEADY_MEMBERS, PIECE_ROUNDS = 4, 2.0


def main() -> None:
    arguments = _arguments()
    report = Report("data_coverage")
    with ProcessPoolExecutor(arguments.workers) as pool:
        settings = [Setting(members, seed=seed) for members in MEMBERS for seed in range(SEEDS[members])]
        settings += [Setting(STEADY_MEMBERS, seed=seed, **PEACE) for seed in range(SEEDS[8])]
        outcomes = list(pool.map(run, settings))
    by_size = {
        members: [outcome for setting, outcome in zip(settings, outcomes, strict=True) if setting.members == members]
        for members in (*MEMBERS, STEADY_MEMBERS)
    }
    for members in MEMBERS:
        _tell(report, members, by_size[members])
    _tell_steady(report, by_size[STEADY_MEMBERS])
    setting = Setting(MEMBERS[0])
    report.finish(
        f"shares of the samples of an epoch of {setting.epoch_rounds} rounds, {setting.samples_each} samples a member "
        f"and round; mean of {', '.join(f'{SEEDS[members]} seeds at {members}' for members in MEMBERS)}. Each round: "
        f"{setting.replaced:.0%} replaced, {setting.restarts:.0%} restart, {setting.stalls:.0%} begin to stall for a "
        f"round or two, {setting.left_out:.0%} are left out; an exchange takes {setting.exchange:.0%} of a round. "
        f"piece_rounds: successive samples that a member trains in one go, in rounds of its own consumption"
    )


def _tell(report: Report, members: int, outcomes: Sequence[Outcome]) -> None:
    moments: dict[str, list[Shares]] = {
        "as many trainings as samples": [it.at_epoch for it in outcomes if it.at_epoch is not None],
        "no sample left": [it.at_end for it in outcomes if it.at_end is not None],
    }
    doubled: Counter[str] = Counter()
    for outcome in outcomes:
        doubled.update(outcome.doubled)
    for moment, shares in moments.items():
        coverage, more = _mean(shares, lambda it: it.coverage), _mean(shares, lambda it: it.more)
        report.cell(
            members=members,
            moment=moment,
            runs=len(shares),
            coverage=coverage,
            never=_mean(shares, lambda it: it.never),
            lost=_mean(shares, lambda it: it.lost),
            once=_mean(shares, lambda it: it.once),
            twice_or_more=more,
            worst_coverage=min(it.coverage for it in shares),
            position_bytes=max(max(it.position_bytes) for it in outcomes),
            ranges=max(max(it.ranges) for it in outcomes),
            piece_samples=statistics.mean(it.piece_samples for it in outcomes),
            piece_rounds=statistics.mean(it.piece_rounds for it in outcomes),
        )
        report.accept(
            f"{members} members, {moment}: coverage",
            target=f"≥ {LEAST_COVERAGE:.1%}",
            value=f"{coverage:.3%}",
            holds=len(shares) == len(outcomes) and coverage >= LEAST_COVERAGE,
        )
        report.accept(
            f"{members} members, {moment}: twice or more",
            target=f"≤ {MOST_DOUBLES:.1%}",
            value=f"{more:.3%}",
            holds=len(shares) == len(outcomes) and more <= MOST_DOUBLES,
        )


def _tell_steady(report: Report, outcomes: Sequence[Outcome]) -> None:
    piece = min(it.piece_rounds for it in outcomes)
    report.accept(
        f"{STEADY_MEMBERS} members of steady pace: mean piece, in rounds, of the worst run",
        target=f"≥ {PIECE_ROUNDS:g}",
        value=f"{piece:.2f}",
        holds=piece >= PIECE_ROUNDS,
    )


def _mean(shares: Sequence[Shares], of: Callable[[Shares], float]) -> float:
    return statistics.mean(of(it) for it in shares)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="processes")
    return parser.parse_args()


if __name__ == "__main__":
    main()
