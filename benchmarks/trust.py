"""Which lies of a reducer an audit finds before they are applied, whether it accuses the honest, and what it costs.

Members train a small decoder on real text, in virtual time. In every round each reducer's averages are audited as they
are, and once more for every lie that the reducer might have sent in their place. Training goes on with the true
averages. So one run tries all lies on the pseudo-gradients of all its rounds.

The cost is that of one member in an exchange of random vectors: seconds of processor time for the audit's work, beside
those that a whole exchange takes (`exchange_cpu`); and bytes of sketches, beside those of parts.
With `--keep FILE` a benchmark that was ended goes on where it stopped.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.node.exchange.audit import AuditedPart, Evidence, draw_parts, judge
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.partition import Part, ReducerShare, part_elements, partition, reducer_shares
from atoll.node.exchange.screening import Screen
from atoll.node.exchange.sketch import SKETCH_BYTES, Sketcher
from atoll.node.rounds.policy import screen_of
from benchmarks import byzantine
from benchmarks.common import Report
from benchmarks.parity_jobs import corpus_of, warm_start
from benchmarks.resumable_jobs import jobs_on_python_corpus
from benchmarks.virtual_swarm import SwarmConfig, VirtualSwarm, fresh

PART_ELEMENTS = 8192  # several parts of each reducer of a small model
COST_MEMBERS = 8
EXCHANGE_SECONDS_PER_GB = 10.2  # of the whole exchange with int4: `exchange_cpu`
MUST_FIND = ("sign turned", "ten times", "ten times, turned", "noise ×10", "values near 1e38", "zeros")


@dataclass(frozen=True)
class Job:
    """One training run, to be carried out in a process of its own."""

    members: int
    codec: str
    speeds: str
    rounds: int
    seed: int = 0

    def key(self) -> str:
        """What names it."""
        return repr(self)


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    loss: float
    audits: int  # of honest reducers
    accused: int  # of them
    found: dict[str, int]  # lies of each kind, one for each audit


Lie = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # true average [E], the liar's own contribution [E]


def _noise(mean_E: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randn(len(mean_E), generator=rng) * (mean_E.norm() / math.sqrt(len(mean_E)))


def _some_turned(mean_E: Tensor, rng: torch.Generator) -> Tensor:
    return torch.where(torch.rand(len(mean_E), generator=rng) < 0.1, -mean_E, mean_E)


def _one_bit(mean_E: Tensor, rng: torch.Generator) -> Tensor:
    changed_E = mean_E.clone()
    changed_E[int(torch.randint(len(mean_E), (1,), generator=rng))] *= -1
    return changed_E


LIES: dict[str, Lie] = {
    "sign turned": lambda mean_E, own_E, rng: -mean_E,
    "ten times": lambda mean_E, own_E, rng: 10 * mean_E,
    "ten times, turned": lambda mean_E, own_E, rng: -10 * mean_E,
    "noise ×10": lambda mean_E, own_E, rng: 10 * _noise(mean_E, rng),
    "values near 1e38": lambda mean_E, own_E, rng: torch.full_like(mean_E, 1e38),
    "zeros": lambda mean_E, own_E, rng: 0 * mean_E,
    "noise of its size": lambda mean_E, own_E, rng: _noise(mean_E, rng),
    "only its own contribution": lambda mean_E, own_E, rng: own_E,
    "twice": lambda mean_E, own_E, rng: 2 * mean_E,
    "half": lambda mean_E, own_E, rng: mean_E / 2,
    "a tenth of the signs turned": lambda mean_E, own_E, rng: _some_turned(mean_E, rng),
    "1 % larger": lambda mean_E, own_E, rng: 1.01 * mean_E,
    "one sign turned": lambda mean_E, own_E, rng: _one_bit(mean_E, rng),
}


class AuditedSwarm(VirtualSwarm):
    """A virtual swarm whose rounds are audited, as they are and with lies."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.audits = self.accused = 0
        self.found: Counter[str] = Counter()
        self._rng = torch.Generator().manual_seed(7)
        self._summed_parts: list[tuple[ReducerShare, Part, Mapping[str, Tensor], Sequence[float], Tensor]] = []

    def _summed(
        self,
        share: ReducerShare,
        part: Part,
        gradients: Mapping[str, Tensor],
        factors: Sequence[float],
        average_E: Tensor,
    ) -> None:
        self._summed_parts.append((share, part, gradients, factors, average_E[part.start : part.end].clone()))

    def audit(self, weights: Mapping[str, int]) -> None:
        """Audit the last round: each reducer as it is, and with each lie."""
        seed = hashlib.sha256(str(self.rounds).encode()).digest()
        shares = {share.reducer: share for share, *_ in self._summed_parts}
        drawn = draw_parts(seed, shares.values())
        sketcher = Sketcher(seed, max(part.elements for _, part, *_ in self._summed_parts))
        for liar in shares:
            mine = [
                it for it in self._summed_parts if it[0].reducer == liar and it[0].first + it[1].index in drawn[liar]
            ]
            evidence = self._evidence(liar, mine, sketcher, weights)
            self.audits += 1
            self.accused += self._is_accused(liar, mine, sketcher, evidence, None)
            for name, lie in LIES.items():
                self.found[name] += self._is_accused(liar, mine, sketcher, evidence, lie)
        self._summed_parts.clear()

    def _evidence(self, liar: str, mine: Sequence[Any], sketcher: Sketcher, weights: Mapping[str, int]) -> Evidence:
        sketches: dict[int, dict[int, Tensor]] = {}
        for place, peer in enumerate(self.members):
            if peer != liar:
                sketches[place] = {
                    part.index: sketcher.of(gradients[peer][part.start : part.end]) for _, part, gradients, _, _ in mine
                }
        tokens = [weights[peer] for peer in self.members]
        return Evidence(sketches, tokens, tokens, self._config.codec, screen_of(self._spec))

    def _is_accused(
        self, liar: str, mine: Sequence[Any], sketcher: Sketcher, evidence: Evidence, lie: Lie | None
    ) -> bool:
        codec, parts = CODECS[self._config.codec], []
        for _, part, gradients, factors, mean_E in mine:
            said_E = mean_E if lie is None else lie(mean_E, gradients[liar][part.start : part.end], self._rng)
            body = codec.encode(said_E)
            error = codec.open(body, part.elements).usual_error()
            sketch = sketcher.of(codec.decode(body, part.elements))
            parts.append(AuditedPart(part.index, part.elements, sketch, factors, error))
        return judge(parts, evidence) is not None


def run_job(job: Job, corpus_path: str) -> Outcome:
    """Train, and audit every round."""
    torch.set_num_threads(1)
    like = byzantine.Job("", 0, True, job.members, job.speeds, job.rounds * byzantine.INNER_STEPS, job.rounds, job.seed)
    spec = byzantine.spec_of(like, corpus_path)
    spec = spec.model_copy(update={"sync": spec.sync.model_copy(update={"part_elements": PART_ELEMENTS})})
    config = SwarmConfig(byzantine.SPEEDS[job.speeds][: job.members], job.codec, 0.0, screening=True)
    saved = fresh(spec, job.members, warm_start(job.seed, corpus_path))
    swarm = AuditedSwarm(spec, corpus_of(corpus_path), config, saved)
    weights: dict[str, int] = {}

    def noted(contributions: Mapping[str, Any]) -> Mapping[str, int]:
        weights.update({peer: work.tokens for peer, work in contributions.items()})
        return weights

    while swarm.rounds < job.rounds:
        swarm.round(noted)
        swarm.audit(weights)
    outcome = Outcome(swarm.evaluate(), swarm.audits, swarm.accused, dict(swarm.found))
    swarm.close()
    return outcome


# --- what it costs -------------------------------------------------------------------------------------------


def cost(parameters: int, codec_name: str) -> dict[str, float]:
    """Seconds and bytes of one of `COST_MEMBERS` members. Parts are timed a few times each and counted."""
    codec, peers = CODECS[codec_name], [str(number) for number in range(COST_MEMBERS)]
    ranges = partition(parameters, peers, {})
    length = part_elements(ranges, codec.encoded_bytes, 2**20)
    shares = reducer_shares(ranges, length)
    drawn = draw_parts(bytes(32), shares)
    values_E = torch.randn(length)
    body = codec.encode(values_E)
    tokens, screen = [1000] * COST_MEMBERS, Screen(1.0)
    own = len(shares[0].parts)
    total = sum(len(share.parts) for share in shares)
    received = total - own
    sketcher = Sketcher(bytes(32), length)
    others = sum(len(indices) for reducer, indices in drawn.items() if reducer != "0")
    evidence = Evidence(
        {place: dict.fromkeys(range(2), sketcher.of(values_E)) for place in range(1, COST_MEMBERS)},
        tokens, tokens, codec_name, screen,
    )  # fmt: skip
    part = AuditedPart(0, length, sketcher.of(values_E), [1.0] * COST_MEMBERS)
    audit = _seconds(lambda: Sketcher(bytes(32), length)) + others * _seconds(lambda: sketcher.of(values_E))
    audit += others * _seconds(lambda: sketcher.of(codec.decode(body, length)))
    audit += others * _seconds(lambda: judge([part], evidence))
    sent = (received * len(body) + own * len(body) * (COST_MEMBERS - 1)) / 1e9
    sketched = others * SKETCH_BYTES * (COST_MEMBERS - 1) / 1e9
    return {
        "audit": audit,
        "gigabytes": sent,
        "share_of_bytes": sketched / sent,
        "share_of_exchange": audit / (sent * EXCHANGE_SECONDS_PER_GB),
    }


def _seconds(work: Callable[[], object], repetitions: int = 9) -> float:
    work()
    samples = []
    for _ in range(repetitions):
        began = time.thread_time()
        work()
        samples.append(time.thread_time() - began)
    return sorted(samples)[repetitions // 2]


# --- all of it -----------------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    report = Report("trust")
    with jobs_on_python_corpus(arguments.keep, arguments.workers, run_job, Outcome) as finished:
        outcomes = finished.train(_jobs(arguments.rounds))
    torch.set_num_threads(1)
    costs = {parameters: cost(parameters, "int4") for parameters in (10_000_000, 100_000_000, 1_000_000_000)}
    _tell(report, outcomes, costs)
    report.finish(
        f"decoder of 0.25 M parameters on real text, H={byzantine.INNER_STEPS}, parts of {PART_ELEMENTS} elements, two "
        "audited parts of each reducer; found: share of audits in which the lie would be found before it is applied; "
        f"cost: one of {COST_MEMBERS} members, int4, one thread"
    )


def _jobs(rounds: int) -> Iterable[Job]:
    for codec in ("int4", "int8", "fp32", "int2"):
        yield Job(8, codec, "equal", rounds)
    yield Job(8, "int4", "1:4", rounds)
    yield Job(4, "int4", "equal", rounds)
    yield Job(3, "int4", "equal", rounds)


def _tell(report: Report, outcomes: Mapping[Job, Outcome], costs: Mapping[int, Mapping[str, float]]) -> None:
    for job, outcome in outcomes.items():
        shares = {name: outcome.found[name] / outcome.audits for name in LIES}
        told = {"members": job.members, "codec": job.codec, "speeds": job.speeds, "audits": outcome.audits}
        report.cell(**told, accused=outcome.accused, **shares)
        least = min(MUST_FIND, key=shares.__getitem__)
        report.accept(
            f"{job.members} members, {job.codec}, {job.speeds}: lies that ruin a model",
            target="100 % found before they are applied",
            value=f"{shares[least]:.2%} ({least})",
            holds=shares[least] == 1.0,
        )
    audits, accused = sum(it.audits for it in outcomes.values()), sum(it.accused for it in outcomes.values())
    report.accept("honest reducers accused", target="0", value=f"{accused} of {audits} audits", holds=not accused)
    for parameters, costing in costs.items():
        report.accept(
            f"processor time at {parameters / 1e6:.0f} M parameters",
            target="≤ 3 % of the exchange's",
            value=f"{costing['share_of_exchange']:.1%} ({costing['audit']:.3f} s)",
            holds=costing["share_of_exchange"] <= 0.03,
        )
        report.accept(
            f"bytes at {parameters / 1e6:.0f} M parameters",
            target="≤ 0.5 % of the exchange's",
            value=f"{costing['share_of_bytes']:.2%}",
            holds=costing["share_of_bytes"] <= 0.005,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="of each run")
    parser.add_argument("--workers", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--keep", type=Path, help="file of finished runs; a run that stands in it is not made again")
    return parser.parse_args()


if __name__ == "__main__":
    main()
