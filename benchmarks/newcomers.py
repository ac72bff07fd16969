"""Should a newcomer's first rounds count? It starts at the committed anchor, but its AdamW knows nothing yet.

One swarm in virtual time is warmed up for a third of the tokens. From there members are replaced one after another by
newcomers, every round or every fifth, and the variants differ in what a newcomer counts: everything at once, nothing
or half for some rounds, nothing until its pseudo-gradient looks like the others'; and in what AdamW knows: moments that
the oldest member gave it, or of a dry round of its own, or a learning rate that rises slowly. Work that does not count
is thrown away, so variants are compared at equal trained tokens (the same machines for the same time; the decay of the
learning rate then lags behind where work was thrown away) and at equal committed tokens (the same state of the run).
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from atoll.core.data_position import advance, sample_count
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.lab.corpus import write_python_corpus
from atoll.lab.demo import STEP_TOKENS, spec_toml
from atoll.node.data.corpus import Corpus, load_corpus
from benchmarks.common import Report
from benchmarks.virtual_swarm import Contribution, SwarmConfig, SwarmSnapshot, VirtualSwarm, Weigh, by_tokens

INNER_STEPS = 20  # H
WARM_SHARE = 1 / 3
MOST = 1.4  # times the tokens of the undisturbed swarm: a variant that has not committed as many by then, does not
LATE = 1 / 2  # gaps are means over the rounds after that share of the tokens: a single evaluation is noisy
AGES = 3  # rounds since joining whose distance is told
NORMAL = (0.01, 0.99)  # quantiles of undisturbed members: between them a distance is normal


@dataclass(frozen=True)
class Distance:
    """One member's pseudo-gradient beside those of the others in its round."""

    age: int
    ratio: float  # its norm over the median norm of the others', each per root of its steps
    cosine: float  # with the mean of the others'


@dataclass(frozen=True)
class TypicalDistance:
    """What undisturbed members' distances are."""

    ratio: tuple[float, float]
    cosine: float  # at least

    def holds(self, distance: Distance) -> bool:
        """Whether an undisturbed member could look so."""
        return self.ratio[0] <= distance.ratio <= self.ratio[1] and distance.cosine >= self.cosine


@dataclass(frozen=True)
class Variant:
    """How often somebody is replaced, and what a newcomer counts."""

    every: int  # rounds between two newcomers; 0: there are none
    name: str
    rule: Callable[[TypicalDistance], Weigh]
    moments: bool = False  # those of the oldest member are given to a newcomer
    dry_steps: int = 0  # that a newcomer makes before, for AdamW's sake only
    ramp_steps: int = 0  # until a newcomer's learning rate is everybody's


@dataclass
class Run:
    """What one variant did since the warm start: (trained, committed, loss) after each round, and all distances."""

    tokens: int  # at which it is compared
    curve: list[tuple[int, int, float]] = field(default_factory=list)
    distances: list[Distance] = field(default_factory=list)

    def loss(self, tokens: int, *, committed: bool = False) -> float:
        """Held-out loss at so many trained (or committed) tokens, between the rounds around; NaN if never reached."""
        points = [(point[committed], point[2]) for point in self.curve]
        for (before, high), (after, low) in pairwise(points):
            if before <= tokens <= after:
                return high + (low - high) * (tokens - before) / max(1, after - before)
        return float("nan")


# --- the rules ------------------------------------------------------------------------------------------


def full(_: TypicalDistance) -> Weigh:
    """As it is shipped."""
    return by_tokens


def share(weight: float, rounds: int) -> Callable[[TypicalDistance], Weigh]:
    """So much of its tokens in its first rounds."""

    def weigh(contributions: Mapping[str, Contribution]) -> Mapping[str, int]:
        return {peer: int(work.tokens * (weight if work.age < rounds else 1)) for peer, work in contributions.items()}

    return lambda _: weigh


def until_typical(normal: TypicalDistance) -> Weigh:
    """Nothing until its distance is normal once, for `AGES` rounds at most. Where nobody's is, everybody counts."""
    admitted: set[str] = set()

    def weigh(contributions: Mapping[str, Contribution]) -> Mapping[str, int]:
        for peer, distance in distances(contributions).items():
            if distance.age >= AGES or normal.holds(distance):
                admitted.add(peer)
        counted = {peer: work.tokens if peer in admitted else 0 for peer, work in contributions.items()}
        return counted if any(counted.values()) else by_tokens(contributions)

    return weigh


def distances(contributions: Mapping[str, Contribution]) -> dict[str, Distance]:
    """Of every member, in one round."""
    norms = {peer: float(work.gradient_E.norm()) / work.steps**0.5 for peer, work in contributions.items()}
    total_E = torch.stack([work.gradient_E for work in contributions.values()]).sum(dim=0)
    found = {}
    for peer, work in contributions.items():
        median = statistics.median(norm for other, norm in norms.items() if other != peer)
        found[peer] = Distance(work.age, norms[peer] / median, _cosine(work.gradient_E, total_E - work.gradient_E))
    return found


def _cosine(one_E: Tensor, other_E: Tensor) -> float:
    return float(torch.dot(one_E, other_E) / (one_E.norm() * other_E.norm()))


UNDISTURBED = Variant(0, "undisturbed", full)
OTHER_SAMPLES = Variant(0, "undisturbed, other samples", full)
VARIANTS = (
    Variant(1, "full weight", full),
    Variant(1, "zero for 1 round", share(0, 1)),
    Variant(1, "zero for 2 rounds", share(0, 2)),
    Variant(1, "zero for 3 rounds", share(0, 3)),
    Variant(1, "half for 1 round", share(0.5, 1)),
    Variant(1, "zero until normal", until_typical),
    Variant(1, "full weight, given moments", full, moments=True),
    Variant(1, "full weight after a dry round", full, dry_steps=INNER_STEPS),
    Variant(1, "full weight, learning rate ramps", full, ramp_steps=INNER_STEPS),
    Variant(5, "full weight", full),
    Variant(5, "zero for 1 round", share(0, 1)),
    Variant(5, "full weight, given moments", full, moments=True),
)


# --- running them -----------------------------------------------------------------------------------------


def main() -> None:
    arguments = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        path = Path(folder) / "corpus.txt"
        write_python_corpus(path)
        runs: dict[Variant, list[Run]] = defaultdict(list)
        normals = []
        moments = 0
        for seed in range(arguments.seeds):
            spec = _spec(arguments.members, arguments.steps, seed, path)
            lab = SeedTrial(spec, load_corpus(spec, None), arguments.members)
            moments = lab.moment_bytes
            for variant in (UNDISTURBED, OTHER_SAMPLES):
                runs[variant].append(lab.run(variant, TypicalDistance((0.0, 1e9), -1.0)))
            normals.append(
                _typical_distance([*runs[UNDISTURBED][seed].distances, *runs[OTHER_SAMPLES][seed].distances])
            )
            for variant in VARIANTS:
                runs[variant].append(lab.run(variant, normals[-1]))
    _tell(runs, normals, moments, arguments)


class SeedTrial:
    """One seed: a warm swarm, and what becomes of it."""

    def __init__(self, spec: RunSpec, corpus: Corpus, members: int) -> None:
        self._spec, self._corpus = spec, corpus
        self._ingredients = SwarmConfig((1.0,) * members, "int4", 0.0)
        swarm = VirtualSwarm(spec, corpus, self._ingredients)
        swarm.run(int(spec.run.stop_tokens * WARM_SHARE))
        self._warm = swarm.save()
        self._minimum_lease = -(-spec.sync.round_tokens // spec.data.sequence_length)
        state = swarm.moments(swarm.members[0])["state"].values()
        self.moment_bytes = sum(4 * tensor.numel() for moments in state for tensor in moments.values())
        swarm.close()

    @property
    def tokens(self) -> int:
        """From the warm start to the end of the undisturbed run."""
        return self._spec.run.stop_tokens - self._warm.committed_tokens

    def run(self, variant: Variant, normal: TypicalDistance) -> Run:
        """From the warm start until as many tokens were trained and committed, or far too many trained."""
        began, done = time.monotonic(), Run(self.tokens)
        warm = self._with_other_samples() if variant is OTHER_SAMPLES else self._warm
        swarm = VirtualSwarm(self._spec, self._corpus, self._ingredients, warm)
        rule = variant.rule(normal)

        def weigh(contributions: Mapping[str, Contribution]) -> Mapping[str, int]:
            done.distances.extend(distances(contributions).values())
            return rule(contributions)

        trained = committed = rounds = 0
        done.curve.append((0, 0, swarm.evaluate()))
        while trained < self.tokens or (committed < self.tokens and trained < MOST * self.tokens):
            if variant.every and rounds % variant.every == 0:
                _replace_one(swarm, rounds // variant.every, variant)
            swarm.round(weigh)
            rounds += 1
            trained = swarm.trained_tokens - warm.committed_tokens
            committed = swarm.committed_tokens - warm.committed_tokens
            done.curve.append((trained, committed, swarm.evaluate()))
        swarm.close()
        told = f"seed {self._spec.run.seed}, every {variant.every}, {variant.name}: {rounds} rounds"
        print(f"{told}, loss {done.curve[-1][2]:.4f}, {time.monotonic() - began:.0f} s", flush=True)
        return done

    def _with_other_samples(self) -> SwarmSnapshot:
        """The warm swarm, whose members hold other samples from here on: what differs then is noise."""
        position = self._warm.position
        held = {peer: sample_count(ranges) for peer, ranges in position.holdings.items()}
        return replace(self._warm, position=advance(position, tuple(held), held, self._minimum_lease))


def _replace_one(swarm: VirtualSwarm, number: int, variant: Variant) -> None:
    """The member whose turn it is goes, a newcomer comes; the oldest of the others gives its moments."""
    place = number % len(swarm.members)
    oldest = swarm.members[(place + 1) % len(swarm.members)]
    given = swarm.moments(oldest) if variant.moments else None
    swarm.replace(
        swarm.members[place],
        f"newcomer-{number}",
        moments=given,
        dry_steps=variant.dry_steps,
        ramp_steps=variant.ramp_steps,
    )


def _spec(members: int, steps: int, seed: int, corpus: Path) -> RunSpec:
    speeds = (1.0,) * members
    tokens = members * steps * STEP_TOKENS
    return parse_run_spec(
        spec_toml(
            seed=seed,
            nodes=members,
            tokens=tokens,
            corpus=corpus,
            codec="int4",
            slowdowns=speeds,
            inner_steps=INNER_STEPS,
        )
    )


def _typical_distance(found: list[Distance]) -> TypicalDistance:
    ratios = torch.tensor([distance.ratio for distance in found])
    cosines = torch.tensor([distance.cosine for distance in found])
    low, high = (float(torch.quantile(ratios, quantile)) for quantile in NORMAL)
    return TypicalDistance((low, high), float(torch.quantile(cosines, NORMAL[0])))


# --- telling ----------------------------------------------------------------------------------------------


def _tell(
    runs: Mapping[Variant, list[Run]], normals: list[TypicalDistance], moment_bytes: int, arguments: argparse.Namespace
) -> None:
    report = Report("newcomers" if arguments.members == 4 else f"newcomers_{arguments.members}")
    gaps = {variant: _gaps(runs, variant) for variant in runs}
    for variant, done in runs.items():
        committed = _gaps(runs, variant, committed=True)
        looks = [
            [item for run in done for item in run.distances if variant.every == 0 or item.age == age]
            for age in range(AGES)
        ]
        report.cell(
            every=variant.every or "never",
            newcomer=variant.name,
            loss=statistics.mean(run.loss(run.tokens) for run in done),
            gap=statistics.mean(gaps[variant]),
            by_seed=" ".join(f"{gap:+.2f}" for gap in gaps[variant]),
            at_committed=statistics.mean(committed) if len(committed) == len(done) else None,
            counted=100 * statistics.mean(run.curve[-1][1] / run.curve[-1][0] for run in done),
            norm=" ".join(f"{statistics.median(item.ratio for item in found):.2f}" for found in looks),
            cosine=" ".join(f"{statistics.median(item.cosine for item in found):.2f}" for found in looks),
        )
    noise = max(abs(gap) for gap in gaps[OTHER_SAMPLES])
    for every in sorted({variant.every for variant in VARIANTS}):
        mine = {variant.name: statistics.mean(gaps[variant]) for variant in VARIANTS if variant.every == every}
        thrown = {name: gap for name, gap in mine.items() if name.startswith(("zero", "half"))}
        best = min(thrown, key=lambda name: thrown[name])
        report.accept(
            f"every {every}: no weight is better than full weight by more than the noise",
            target=f"{mine['full weight']:.2f} % ≤ best + {noise:.2f} %",
            value=f"{thrown[best]:.2f} % ({best})",
            holds=mine["full weight"] <= thrown[best] + noise,
        )
    limits = "; ".join(f"{n.ratio[0]:.2f}–{n.ratio[1]:.2f}, cosine ≥ {n.cosine:.2f}" for n in normals)
    report.finish(
        f"nats per byte, 'nano', K={arguments.members} at equal speeds, H={INNER_STEPS}, int4, no delay, "
        f"T={arguments.steps}, warm start {WARM_SHARE:.0%}, {arguments.seeds} seeds. `loss`: at as many trained tokens "
        f"as the undisturbed run has. `gap`: percent above the undisturbed loss at equal trained tokens, mean over the "
        f"last half of the tokens; `at_committed`: at equal committed tokens, as far as they were reached. `counted`: "
        f"percent of those trained. `norm` (over the others' median) and `cosine` (with the others' mean): medians "
        f"in a newcomer's first {AGES} rounds. Normal, by seed: {limits}. Noise: other samples change the gap by up to "
        f"{noise:.2f}. Moments given: {moment_bytes} bytes, no exchange counted"
    )


def _gaps(runs: Mapping[Variant, list[Run]], variant: Variant, *, committed: bool = False) -> list[float]:
    """Per seed: percent above the undisturbed swarm, mean over the tokens at which that stood after late rounds."""
    gaps = []
    for run, undisturbed in zip(runs[variant], runs[UNDISTURBED], strict=True):
        late = [(tokens, loss) for tokens, _, loss in undisturbed.curve if LATE <= tokens / undisturbed.tokens <= 1]
        found = [100 * (run.loss(tokens, committed=committed) / loss - 1) for tokens, loss in late]
        reached = [gap for gap in found if not math.isnan(gap)]
        if reached:
            gaps.append(statistics.mean(reached))
    return gaps


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--steps", type=int, default=400, help="of each member, in all")
    parser.add_argument("--seeds", type=int, default=2)
    return parser.parse_args()


if __name__ == "__main__":
    main()
