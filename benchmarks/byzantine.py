"""What members who send garbage cost a swarm, with screening and without, and whether screening costs the honest.

Eight members in virtual time on the built-in model and real text; one or two of them attack in every round. Losses are
compared at equal committed tokens with the same swarm in peace, and with a peaceful swarm that lacks the attackers.
Then swarms without attackers for many rounds: how often is an honest part left out, at equal speeds and at 1:4?
"""

from __future__ import annotations

import argparse
import concurrent.futures
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from benchmarks.common import Report

MEMBERS = 8
INNER_STEPS = 10  # H
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
    tokens: int
    rounds: int  # 0: until `tokens` are committed
    seed: int


class Outcome(NamedTuple):
    """What a run came to."""

    loss: float
    parts: int  # of honest contributions
    left_out: int  # of them
    caught: float  # share of the attackers' parts that were left out


Attack = Callable[[int, str, Mapping[str, Tensor], "Attackers"], Tensor]


class Attackers:
    """What some members send instead of their updates."""

    def __init__(self, kind: str, names: Sequence[str], seed: int) -> None:
        import torch

        self.names, self._attack = names, ATTACKS[kind]
        self.rng = torch.Generator().manual_seed(seed)
        self.kept: dict[str, Tensor] = {}
        self.noise_E = self.poison_E = torch.empty(0)

    def __call__(self, number: int, gradients: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        import torch

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
    import torch

    honest = torch.stack([own for name, own in sent.items() if name not in us.names])
    return honest.mean(dim=0) - ALIE * honest.std(dim=0)


def _keeps_a_third(number: int, peer: str, sent: Mapping[str, Tensor], us: Attackers) -> Tensor:
    """A third of an honest update, and a direction that all attackers share and that stays the same."""
    return 0.3 * sent[peer] + 0.95 * us.poison_E * (sent[peer].norm() / us.poison_E.norm())


def _colluders(number: int, peer: str, sent: Mapping[str, Tensor], us: Attackers) -> Tensor:
    """They agree about as much as honest members do, in a direction of their own, and send twice the usual."""
    import torch

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
    "ALIE": _alie,
    "NaN": lambda number, peer, sent, us: sent[peer] * float("nan"),
    "1e30": lambda number, peer, sent, us: sent[peer] * 0 + 1e30,
}


# --- one run, in a process of its own ------------------------------------------------------------------------


def run_job(job: Job, corpus_path: str) -> Outcome:
    """Train, attacked or not."""
    import torch

    from atoll.core.run_spec import parse_run_spec
    from atoll.node.lab.demo import LEARNING_RATE, spec_toml
    from atoll.node.training.corpus import load_corpus
    from benchmarks.virtual_swarm import Ingredients, VirtualSwarm

    torch.set_num_threads(1)
    speeds = SPEEDS[job.speeds][: job.members]
    text = spec_toml(
        seed=job.seed,
        nodes=job.members,
        tokens=job.tokens,
        corpus=Path(corpus_path),
        codec="int4",
        slowdowns=speeds,
        inner_steps=INNER_STEPS,
        learning_rate=LEARNING_RATE,
        accumulate=1,
    )
    spec = parse_run_spec(text)
    names = [f"node-{i}" for i in range(job.members - job.attackers, job.members)]
    tamper = Attackers(job.attack, names, job.seed) if job.attack else (lambda number, sent: sent)
    ingredients = Ingredients(speeds, "int4", 0.0, screening=job.screening)
    swarm = VirtualSwarm(spec, load_corpus(spec, None), ingredients, tamper=tamper)
    while swarm.rounds < job.rounds if job.rounds else swarm.committed_tokens < job.tokens:
        before = swarm.committed_tokens
        swarm.round()
        if swarm.committed_tokens == before:  # nobody's update is finite any more: it never ends
            break
    parts = sum(averaged.parts for averaged in swarm.averaged)
    lost = {peer: sum(averaged.left_out.get(peer, 0) for averaged in swarm.averaged) for peer in swarm.members}
    honest = [peer for peer in swarm.members if peer not in names]
    caught = sum(lost[peer] for peer in names) / (parts * len(names)) if names else 0.0
    outcome = Outcome(swarm.evaluate(), parts * len(honest), sum(lost[peer] for peer in honest), caught)
    swarm.close()
    return outcome


# --- all of them ---------------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    report = Report("byzantine")
    from atoll.node.lab.corpus import write_python_corpus

    jobs = list(_jobs(arguments))
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        corpus = Path(folder) / "corpus.txt"
        write_python_corpus(corpus)
        with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            outcomes = {}
            for job, outcome in zip(jobs, pool.map(run_job, jobs, [str(corpus)] * len(jobs)), strict=True):
                outcomes[job] = outcome
                print(f"{len(outcomes)} of {len(jobs)}: {job} {outcome}", flush=True)
    _tell(report, outcomes)
    report.finish(
        f"nats per byte at equal committed tokens, built-in 'nano' model, {MEMBERS} members, int4, H={INNER_STEPS}, "
        f"mean over {arguments.seeds} seeds; caught: share of the attackers' parts that were left out; honest_lost: of "
        f"the others'; replay: the update of round {REPLAYED} for ever; ALIE: {ALIE} standard deviations"
    )


def _jobs(arguments: argparse.Namespace) -> Iterable[Job]:
    from atoll.node.lab.demo import STEP_TOKENS

    peace = Job("", 0, True, MEMBERS, "equal", arguments.steps * MEMBERS * STEP_TOKENS, 0, 0)
    for seed in range(arguments.seeds):
        clean = replace(peace, seed=seed)
        yield from (clean, replace(clean, screening=False))
        for attackers in LIMIT:
            yield replace(clean, members=MEMBERS - attackers)
            for attack in ATTACKS:
                attacked = replace(clean, attack=attack, attackers=attackers)
                yield from (attacked, replace(attacked, screening=False))
    for name, speeds in SPEEDS.items():
        steps = int(INNER_STEPS * sum(1 / time for time in speeds))  # of a round
        rounds = arguments.clean_rounds
        yield replace(peace, speeds=name, tokens=rounds * steps * STEP_TOKENS, rounds=rounds)


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
            gaps = loss / without - 1, loss / fewer - 1
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
            share = outcome.left_out / outcome.parts
            report.accept(
                f"honest parts left out in {job.rounds} rounds, speeds {job.speeds}",
                target=TARGETS[job.speeds],
                value=f"{outcome.left_out} of {outcome.parts}",
                holds=share < 0.01 if job.speeds != "equal" else not outcome.left_out,
            )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=160, help="of each member, in peace")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--clean-rounds", type=int, default=1000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
