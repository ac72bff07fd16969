"""What members who send garbage cost a swarm, with screening and without, and whether screening costs the honest.

Eight members in virtual time at `parity`'s size, real text; one or two of them attack in every round. Losses are
compared at equal committed tokens with the same swarm in peace, and with a peaceful swarm that lacks the attackers.
Then swarms without attackers for many rounds: how often is an honest part left out, at equal speeds and at 1:4?
With `--keep FILE` a benchmark that was ended goes on where it stopped.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.run_spec import RunSpec
from benchmarks import parity_jobs
from benchmarks.common import Report
from benchmarks.parity_jobs import STEP_TOKENS, corpus_of, warm_start
from benchmarks.parity_recipes import PUBLISHED
from benchmarks.resumable_jobs import jobs_on_python_corpus
from benchmarks.virtual_swarm import SwarmConfig, VirtualSwarm, fresh

MEMBERS = 8
INNER_STEPS = 10  # H
RATE = 2e-3
SPEEDS = {"equal": (1.0,) * MEMBERS, "1:4": (1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)}
LIMIT = {1: 0.01, 2: 0.02}  # of loss, by attackers
REPLAYED = 5  # the round whose update a replayer sends for ever
ALIE = 1.5  # standard deviations
TARGETS = {"equal": "0", "1:4": "< 1 %"}


@dataclass(frozen=True)
class Job:
    """One training run, to be carried out in a process of its own."""

    attack: str  # "" for none
    attackers: int
    screening: bool
    members: int
    speeds: str
    steps: int  # of each member, on average
    rounds: int  # 0: until that many steps are committed
    seed: int

    def key(self) -> str:
        """What names it."""
        return repr(self)


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    loss: float
    parts: int  # of honest contributions
    left_out: int  # of them
    dropped: int  # honest contributions that were left out of all parts of a round
    caught: float  # share of the attackers' parts that were left out


Attack = Callable[[int, str, Mapping[str, Tensor], "Attackers"], Tensor]


class Attackers:
    """What some members send instead of their updates."""

    def __init__(self, kind: str, names: Sequence[str], seed: int) -> None:
        self.names, self._attack = names, ATTACKS[kind]
        self.rng = torch.Generator().manual_seed(seed)
        self.kept: dict[str, Tensor] = {}
        self.noise_E = self.poison_E = torch.empty(0)

    def __call__(self, number: int, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self.noise_E = torch.randn(next(iter(gradients.values())).shape, generator=self.rng)
        self.poison_E = self.noise_E if number == 0 else self.poison_E
        for peer in self.names:
            if number <= REPLAYED:
                self.kept[peer] = gradients[peer].clone()
        return {
            peer: self._attack(number, peer, gradients, self) if peer in self.names else own
            for peer, own in gradients.items()
        }


def _noise(times: float) -> Attack:
    return lambda number, peer, sent, us: us.noise_E * (times * sent[peer].norm() / us.noise_E.norm())


def _alie(number: int, peer: str, sent: Mapping[str, Tensor], us: Attackers) -> Tensor:
    """A little is enough (Baruch et al. 2019): inside the spread of the honest, always on the same side."""
    honest = torch.stack([own for name, own in sent.items() if name not in us.names])
    return honest.mean(dim=0) - ALIE * honest.std(dim=0)


def _keeps_a_third(number: int, peer: str, sent: Mapping[str, Tensor], us: Attackers) -> Tensor:
    """A third of an honest update, and a direction that all attackers share and that stays the same."""
    return 0.3 * sent[peer] + 0.95 * us.poison_E * (sent[peer].norm() / us.poison_E.norm())


def _colluders(number: int, peer: str, sent: Mapping[str, Tensor], us: Attackers) -> Tensor:
    """They agree about as much as honest members do, in a direction of their own, and send twice the usual."""
    own_E = torch.randn(us.poison_E.shape, generator=us.rng)
    return (0.5**0.5) * (us.poison_E + own_E) * (2 * sent[peer].norm() / us.poison_E.norm())


ATTACKS: dict[str, Attack] = {
    "sign": lambda number, peer, sent, us: -sent[peer],
    "sign ×10": lambda number, peer, sent, us: -10 * sent[peer],
    "noise": _noise(1.0),
    "noise ×10": _noise(10.0),
    "×10": lambda number, peer, sent, us: 10 * sent[peer],
    "own and poison": _keeps_a_third,
    "colluders": _colluders,
    "replay": lambda number, peer, sent, us: us.kept[peer],
    "zeros": lambda number, peer, sent, us: 0 * sent[peer],
    "×0.3": lambda number, peer, sent, us: 0.3 * sent[peer],
    "ALIE": _alie,
    "NaN": lambda number, peer, sent, us: sent[peer] * float("nan"),
    "1e30": lambda number, peer, sent, us: sent[peer] * 0 + 1e30,
}


# --- one run, in a process of its own ------------------------------------------------------------------------


def run_job(job: Job, corpus_path: str) -> Outcome:
    """Train, attacked or not."""
    torch.set_num_threads(1)
    spec, speeds = spec_of(job, corpus_path), SPEEDS[job.speeds][: job.members]
    names = [f"node-{i}" for i in range(job.members - job.attackers, job.members)]
    tamper = Attackers(job.attack, names, job.seed) if job.attack else (lambda number, sent: sent)
    ingredients = SwarmConfig(speeds, "int4", 0.0, screening=job.screening)
    saved = fresh(spec, job.members, warm_start(job.seed, corpus_path))
    swarm = VirtualSwarm(spec, corpus_of(corpus_path), ingredients, saved, tamper=tamper)
    while swarm.rounds < job.rounds if job.rounds else swarm.committed_tokens < spec.run.stop_tokens:
        before = swarm.committed_tokens
        swarm.round()
        if swarm.committed_tokens == before:  # nobody's update is finite any more: it never ends
            break
    parts = sum(averaged.parts for averaged in swarm.averaged)
    lost = {peer: sum(averaged.left_out.get(peer, 0) for averaged in swarm.averaged) for peer in swarm.members}
    honest = [peer for peer in swarm.members if peer not in names]
    dropped = sum(2 * averaged.left_out.get(peer, 0) > averaged.parts for averaged in swarm.averaged for peer in honest)
    caught = sum(lost[peer] for peer in names) / (parts * len(names)) if names else 0.0
    outcome = Outcome(swarm.evaluate(), parts * len(honest), sum(lost[peer] for peer in honest), dropped, caught)
    swarm.close()
    return outcome


def spec_of(job: Job, corpus_path: str) -> RunSpec:
    """As `parity` trains, with as many tokens whoever takes part; a round is due after H steps at full speed."""
    as_there = parity_jobs.Job(
        "swarm", MEMBERS, job.steps, job.seed, RATE, recipe=replace(PUBLISHED, inner_steps=INNER_STEPS)
    )
    spec = parity_jobs.spec_of(as_there, corpus_path)
    pace = sum(1 / time for time in SPEEDS[job.speeds][: job.members])
    due = {"round_tokens": int(INNER_STEPS * pace * STEP_TOKENS)}
    return spec.model_copy(update={"sync": spec.sync.model_copy(update=due)})


# --- all of them ---------------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    report = Report("byzantine")
    with jobs_on_python_corpus(arguments.keep, arguments.workers, run_job, Outcome) as finished:
        outcomes = finished.train(_jobs(arguments))
    _tell(report, outcomes)
    report.finish(
        f"nats per byte at equal committed tokens, decoder of 0.25 M parameters, {MEMBERS} members, {arguments.steps} "
        f"steps of each, int4, H={INNER_STEPS}, mean over {arguments.seeds} seeds; caught: share of the attackers' "
        f"parts that were left out; honest_lost: of the others'; replay: the update of round {REPLAYED} for ever; "
        f"ALIE: {ALIE} standard deviations"
    )


def _jobs(arguments: argparse.Namespace) -> Iterable[Job]:
    peace = Job("", 0, True, MEMBERS, "equal", arguments.steps, 0, 0)
    for name in SPEEDS:  # the longest come first
        yield replace(peace, speeds=name, steps=arguments.clean_rounds * INNER_STEPS, rounds=arguments.clean_rounds)
    for seed in range(arguments.seeds):
        clean = replace(peace, seed=seed)
        yield from (clean, replace(clean, screening=False))
        for attackers in LIMIT:
            yield replace(clean, members=MEMBERS - attackers)
            for attack in ATTACKS:
                attacked = replace(clean, attack=attack, attackers=attackers)
                yield from (attacked, replace(attacked, screening=False))


def _tell(report: Report, outcomes: Mapping[Job, Outcome]) -> None:
    trained = [job for job in outcomes if not job.rounds]

    def mean(**wanted: object) -> tuple[float, float, float]:
        """Loss, the attackers' share that was caught, the honest share that was lost."""
        of = [outcomes[job] for job in trained if all(getattr(job, key) == value for key, value in wanted.items())]
        lost = sum(one.left_out for one in of) / sum(one.parts for one in of)
        return statistics.mean(one.loss for one in of), statistics.mean(one.caught for one in of), lost

    peace, _, lost = mean(attack="", members=MEMBERS, screening=True)
    without, _, _ = mean(attack="", members=MEMBERS, screening=False)
    report.cell(attack="none", attackers=0, unscreened=without, screened=peace, against_peace=peace / without - 1,
                against_fewer=0.0, caught=0.0, honest_lost=lost)  # fmt: skip
    report.accept("screening in peace", target="≤ +0.2 %", value=f"{peace / without - 1:+.2%}",
                  holds=peace / without - 1 <= 0.002)  # fmt: skip
    for attackers, limit in LIMIT.items():
        fewer, _, _ = mean(attack="", members=MEMBERS - attackers, screening=True)
        for attack in ATTACKS:
            loss, caught, lost = mean(attack=attack, attackers=attackers, screening=True)
            bare, _, _ = mean(attack=attack, attackers=attackers, screening=False)
            gaps = loss / peace - 1, loss / fewer - 1
            report.cell(attack=attack, attackers=attackers, unscreened=bare, screened=loss, against_peace=gaps[0],
                        against_fewer=gaps[1], caught=caught, honest_lost=lost)  # fmt: skip
            report.accept(
                f"{attackers} of {MEMBERS}: {attack}",
                target=f"≤ +{limit:.0%} of peace, or of peace without them",
                value=f"{gaps[0]:+.2%}, {gaps[1]:+.2%}",
                holds=min(gaps) <= limit,
            )
    for job, outcome in outcomes.items():
        if job.rounds:
            contributions = job.rounds * job.members
            report.accept(
                f"honest contributions dropped in {job.rounds} rounds, speeds {job.speeds}",
                target=TARGETS[job.speeds],
                value=f"{outcome.dropped} of {contributions}; {outcome.left_out} of {outcome.parts} parts",
                holds=outcome.dropped < 0.01 * contributions if job.speeds != "equal" else not outcome.dropped,
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="of each member, in peace")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--clean-rounds", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--keep", type=Path, help="file of finished runs; a run that stands in it is not made again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
