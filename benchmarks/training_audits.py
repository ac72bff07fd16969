"""What audits of training tell: scores of honest contributions, and of those that were not trained as claimed.

    python -m benchmarks.training_audits [--turns 60] [--fragments 1,4]

Eight members in virtual time at `parity`'s size, real text. One of them makes a tenth of the steps that it claims, and
scales its update to the usual norm. After every commit three contributions are audited as `core/training_audits.py`
says, on the samples that their senders claim: an honest one, that of the cheat, and a copy of another member's update.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from collections import defaultdict, deque
from collections.abc import Mapping
from itertools import chain, islice, product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from atoll.coordinator.rounds.training_scores import compare
from atoll.coordinator.state.run_memory import TrainingScore
from atoll.core.data_position import DataPosition
from atoll.core.training_audits import draw_samples
from atoll.lab.corpus import write_python_corpus
from atoll.node.exchange.codecs import CODECS
from benchmarks import byzantine
from benchmarks.common import Report
from benchmarks.parity_jobs import corpus_of, warm_start
from benchmarks.virtual_swarm import RoundAverage, SwarmConfig, VirtualSwarm, fresh

CODEC = "int4"
CHEAT = byzantine.MEMBERS - 1
TIMES_SLOWER = 10.0
FIRST_TURN = 3
AUDITS = (5, 8)  # within which a cheat must be doubted
TRIALS = 2000
NOTES = (
    "scores in standard errors; a node would measure less of so short rounds; samples: of each kind, all that a member "
    "trains in a round of 10 steps; doubted: share "
    f"of {TRIALS} trials in which the coordinator doubts a member that got so many of the measured scores of its kind, "
    "among seven members that got honest ones"
)


class AuditedSwarm(VirtualSwarm):
    """Keeps what every member sent in the last round, and what it says it was trained on."""

    sent: Mapping[str, Tensor]
    claimed: Mapping[str, list[int]]
    moved: slice  # what it averaged
    _turn: deque[DataPosition] | None = None  # before each round of the last turn of the fragments

    def _average(self, gradients: Mapping[str, Tensor], weights: Mapping[str, int]) -> RoundAverage:
        self.sent = {peer: own.clone() for peer, own in gradients.items()}
        self.moved = self._part
        count = max(weights.values()) // self._spec.data.sequence_length  # as many as the fastest
        self._turn = self._turn or deque(maxlen=self._spec.sync.fragments)
        self._turn.append(self.position)
        holdings = self._turn[0].holdings
        self.claimed = {
            peer: list(islice(chain.from_iterable(range(*held) for held in holdings[peer]), count))
            for peer in self.members
        }
        return super()._average(gradients, weights)

    def audit(self, update_of: str, samples_of: str, compared: str) -> tuple[float, int]:
        """The score of an update on the samples that `samples_of` claims, and their number."""
        codec, usual = CODECS[CODEC], statistics.median(float(own.norm()) for own in self.sent.values())
        own_E = self.sent[update_of]
        update_E = torch.empty_like(self.anchor_E)
        update_E[self.moved] = codec.decode(codec.encode(own_E * (usual / float(own_E.norm()))), own_E.numel())
        seed = f"{self.rounds}/{samples_of}".encode()
        own, other = (draw_samples(seed, self.claimed[peer]) for peer in (samples_of, compared))
        found = self.loops[compared].audit(self.anchor_E, update_E, own, other, self.moved)
        return found.score, found.samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=60, help="times that each element is averaged")
    parser.add_argument("--fragments", default="1,4")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = Report("training_audits")
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch:
        path = str(Path(scratch) / "corpus.txt")
        write_python_corpus(Path(path))
        for fragments in map(int, options.fragments.split(",")):
            _tell(report, fragments, *_scores(path, fragments, options.turns))
    report.finish(NOTES)


class Score(NamedTuple):
    """What one audit found."""

    fragment: int
    score: float


def _scores(path: str, fragments: int, turns: int) -> tuple[Mapping[str, list[Score]], int]:
    """The scores of each kind of contribution, and how many samples of each kind they are of."""
    scores, samples = defaultdict[str, list[Score]](list), 0
    job = byzantine.Job("", 0, True, byzantine.MEMBERS, "equal", turns * byzantine.INNER_STEPS, 0, 0)
    spec = byzantine.spec_of(job, path)
    spec = spec.model_copy(update={"sync": spec.sync.model_copy(update={"fragments": fragments})})
    speeds = (*[1.0] * CHEAT, TIMES_SLOWER)
    saved = fresh(spec, byzantine.MEMBERS, warm_start(0, path))
    swarm = AuditedSwarm(spec, corpus_of(path), SwarmConfig(speeds, CODEC, 0.0), saved)
    for _ in range(turns * fragments):
        swarm.round()
        if swarm.rounds > FIRST_TURN * fragments and swarm.rounds % fragments == swarm.rounds // fragments % fragments:
            turn = swarm.rounds // fragments
            honest, other, third = (swarm.members[(turn + step) % CHEAT] for step in (0, 2, 5))
            for kind, update, claims in (
                ("honest", honest, honest),
                ("a tenth", swarm.members[CHEAT], swarm.members[CHEAT]),
                ("a copy", other, honest),
            ):
                score, samples = swarm.audit(update, claims, third)
                scores[kind].append(Score((swarm.rounds - 1) % fragments, score))
    swarm.close()
    return scores, samples


def _tell(report: Report, fragments: int, scores: Mapping[str, list[Score]], samples: int) -> None:
    where = f", {fragments} fragments" if fragments > 1 else ""
    for kind, found in scores.items():
        told = [it.score for it in found]
        low, middle, high = statistics.quantiles(told, n=4)
        of_each = [statistics.fmean(it.score for it in found if it.fragment == place) for place in range(fragments)]
        doubted = {f"doubted_{count}": _doubted(scores["honest"], found, count) for count in AUDITS}
        report.cell(
            fragments=fragments, contribution=kind, audits=len(found), samples=samples, q1=low, median=middle, q3=high,
            mean=statistics.fmean(told), sd=statistics.stdev(told), **doubted,
            of_each_fragment=", ".join(f"{mean:.1f}" for mean in of_each),
        )  # fmt: skip
    for kind, count in product(("a tenth", "a copy"), AUDITS):
        share = _doubted(scores["honest"], scores[kind], count)
        what = f"{kind}{where}: doubted within {count} audits"
        report.accept(what, target="≥ 0.99", value=share, holds=share >= 0.99)
    for count in AUDITS:
        share = _doubted(scores["honest"], scores["honest"], count)
        report.accept(f"honest{where}: doubted, {TRIALS} × {count} audits", target="0", value=share, holds=share == 0)


def _doubted(honest: list[Score], found: list[Score], audits: int) -> float:
    """How often the coordinator doubts a member whose scores are drawn from `found`."""
    rng, doubted = random.Random(5), 0
    for _ in range(TRIALS):
        told = {
            f"m{place}": tuple(
                TrainingScore(number, f"a{number}", it.score, it.fragment)
                for number, it in enumerate(rng.choices(found if place == CHEAT else honest, k=audits))
            )
            for place in range(byzantine.MEMBERS)
        }
        doubted += compare(told)[f"m{CHEAT}"].doubted
    return doubted / TRIALS


if __name__ == "__main__":
    main()
