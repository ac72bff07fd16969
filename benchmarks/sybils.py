"""What two hundred strangers cost a run of eight members who are known, if all of them attack together.

The eight train in virtual time at `parity`'s size, real text, with what run specs mean by default. The strangers train
nothing. They know every update of the others before they send their own, claim as many tokens as the hardest working
member, and all send the same kind of garbage. On probation (`core/probation.py`) their weight is limited and they have
no say in screening. Losses are compared with the run without them, at equal tokens of the eight. The same attack by
members who are not on probation, three times as many as the eight, shows what is prevented. Strangers in one group send
the same vector: each is judged alone with the eight, so a group has the effect of one stranger with all of its weight.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.probation import limit_weights
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.partition import part_elements, partition, reducer_shares
from atoll.node.exchange.screening import factors_from_products, inner_products
from atoll.node.exchange.weighted_sum import weighted_mean, weights_in_sum
from atoll.node.rounds.policy import screen_of
from benchmarks import parity_jobs
from benchmarks.byzantine import ATTACKS, INNER_STEPS, MEMBERS, Attackers
from benchmarks.common import Report
from benchmarks.parity_jobs import corpus_of, spec_of, warm_start
from benchmarks.recipe import DEFAULT, SHIPPED
from benchmarks.resumable_jobs import jobs_on_python_corpus
from benchmarks.virtual_swarm import RoundAverage, SwarmConfig, VirtualSwarm, fresh

STRANGERS, BARE = 200, 3 * MEMBERS  # on probation; not on probation
GROUPS = 4
LIMIT = 0.01  # of loss
CODEC = "int4"
COPIES = "copies of others' updates"


@dataclass(frozen=True)
class Job:
    """One training run, in a process of its own."""

    attack: str  # "" for none
    strangers: int
    on_probation: bool
    steps: int
    seed: int

    def key(self) -> str:
        """What names it."""
        return repr(self)


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    loss: float
    parts: int
    left_out: int  # of the strangers' parts
    honest_lost: int  # parts of the eight that were left out


class AttackedSwarm(VirtualSwarm):
    """A swarm whose averages have the strangers' updates in them, too."""

    def attack(self, job: Job) -> None:
        """Let strangers attack from now on."""
        self._job = job
        count = GROUPS if job.on_probation else job.strangers
        self._names = [f"stranger-{number}" for number in range(count)]
        self._garbage = Attackers(job.attack, self._names, job.seed) if job.attack in ATTACKS else None
        self.strangers_left_out = 0

    def _average(self, gradients: Mapping[str, Tensor], weights: Mapping[str, int]) -> RoundAverage:
        job, codec = self._job, CODECS[CODEC]
        sent = dict(gradients)
        for place, name in enumerate(self._names):
            sent[name] = gradients[self.members[place % MEMBERS]]
        if self._garbage is not None:
            sent = dict(self._garbage(self.rounds, sent))
        claim = max(weights.values())
        share = job.strangers // len(self._names)  # strangers of a group
        everyone = [weights[peer] for peer in self.members] + [claim] * job.strangers
        limited = limit_weights(everyone, [False] * MEMBERS + [job.on_probation] * job.strangers)
        weigh = {**weights, **dict.fromkeys(self._names, share * limited[-1])}
        average_E = torch.empty_like(next(iter(gradients.values())))
        ranges = partition(average_E.numel(), self.members, self.bandwidth)
        left_out: Counter[str] = Counter()
        cut = reducer_shares(ranges, part_elements(ranges, codec.encoded_bytes, self._spec.sync.part_elements))
        for reducer in cut:
            for part in reducer.parts:
                values = {}
                for peer, sent_E in sent.items():
                    part_E = sent_E[part.start : part.end]
                    if weigh[peer] and bool(part_E.isfinite().all()):
                        values[peer] = codec.decode(codec.encode(part_E), part.elements)
                tokens = [claim if peer in self._names else weights[peer] for peer in values]
                flags = [peer in self._names and job.on_probation for peer in values]
                products = inner_products(list(values.values()))
                factors = factors_from_products(products, tokens, part.elements, screen_of(self._spec), flags)
                kept = {peer for peer, factor in zip(values, factors, strict=True) if factor}
                left_out.update(peer for peer in self.members if peer not in kept)
                self.strangers_left_out += sum(peer not in kept for peer in self._names)
                weights_here = weights_in_sum([weigh[peer] for peer in values], factors, flags)
                mean_E = weighted_mean(list(values.values()), weights_here, factors)
                average_E[part.start : part.end] = codec.decode(codec.encode(mean_E), part.elements)
        return RoundAverage(average_E, left_out, sum(len(it.parts) for it in cut))


# --- one run, in a process of its own ------------------------------------------------------------------------


def run_job(job: Job, corpus_path: str) -> Outcome:
    """Train, attacked or not."""
    torch.set_num_threads(1)
    recipe = replace(DEFAULT, inner_steps=INNER_STEPS)
    spec = spec_of(
        parity_jobs.Job("swarm", MEMBERS, job.steps, job.seed, SHIPPED.learning_rate, recipe=recipe), corpus_path
    )
    saved = fresh(spec, MEMBERS, warm_start(job.seed, corpus_path))
    swarm = AttackedSwarm(spec, corpus_of(corpus_path), SwarmConfig((1.0,) * MEMBERS, CODEC, 0.0, True), saved)
    swarm.attack(job if job.attack else replace(job, strangers=0))
    while swarm.trained_tokens < spec.run.stop_tokens:
        swarm.round()
    parts = sum(averaged.parts for averaged in swarm.averaged)
    lost = sum(sum(averaged.left_out.values()) for averaged in swarm.averaged)
    strangers = parts * (GROUPS if job.on_probation else job.strangers) if job.attack else 1
    outcome = Outcome(swarm.evaluate(), strangers, swarm.strangers_left_out, lost)
    swarm.close()
    return outcome


# --- all of them ---------------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    report = Report("sybils")
    with jobs_on_python_corpus(arguments.keep, arguments.workers, run_job, Outcome) as finished:
        outcomes = finished.train(_jobs(arguments))
    _tell(report, outcomes)
    report.finish(
        f"nats per byte at equal tokens of {MEMBERS} members who are known, decoder of 0.25 M parameters, "
        f"{arguments.steps} steps of each, {CODEC}, mean over {arguments.seeds} seeds. on_probation: {STRANGERS} "
        f"strangers; not_on_probation: {BARE}, which is what their attack did without the rule. left_out: share of the "
        f"strangers' parts on probation that screening left out"
    )


def _jobs(arguments: argparse.Namespace) -> Iterable[Job]:
    for seed in range(arguments.seeds):
        peace = Job("", 0, True, arguments.steps, seed)
        yield peace
        for attack in (*ATTACKS, COPIES):
            yield replace(peace, attack=attack, strangers=STRANGERS)
            if attack in arguments.bare:
                yield replace(peace, attack=attack, strangers=BARE, on_probation=False)


def _tell(report: Report, outcomes: Mapping[Job, Outcome]) -> None:
    def mean(attack: str, *, on_probation: bool = True) -> float | None:
        of = [it.loss for job, it in outcomes.items() if (job.attack, job.on_probation) == (attack, on_probation)]
        return statistics.mean(of) if of else None

    peace = mean("")
    for attack in (*ATTACKS, COPIES):
        there = [it for job, it in outcomes.items() if job.attack == attack and job.on_probation]
        loss = mean(attack)
        assert peace is not None
        assert loss is not None
        report.cell(
            attack=attack,
            peace=peace,
            on_probation=loss,
            gap=loss / peace - 1,
            left_out=sum(it.left_out for it in there) / sum(it.parts for it in there),
            honest_parts_lost=sum(it.honest_lost for it in there),
            not_on_probation=mean(attack, on_probation=False),
        )
        report.accept(
            f"{STRANGERS} strangers: {attack}",
            target=f"≤ +{LIMIT:.0%}",
            value=f"{loss / peace - 1:+.2%}",
            holds=loss / peace - 1 <= LIMIT,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=240, help="of each member")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument(
        "--bare", nargs="*", default=["sign", "noise", "colluders"], help="attacks also without the rule"
    )
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--keep", type=Path, help="file of finished runs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
