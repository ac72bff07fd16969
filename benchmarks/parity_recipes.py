"""What `parity` tries against the gap to synchronous DDP: recipes that differ from the published one in a few numbers.

A recipe says how long the outer step is over the run, how unequal members weigh, what the inner optimiser is, whether
layers move by different lengths, and which weights are evaluated at the end. Everything else is the shipped swarm.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from atoll.core.run_spec import RunSpec
from atoll.node.data.corpus import Corpus
from benchmarks.virtual_swarm import Contribution, RoundAverage, SwarmConfig, SwarmSnapshot, VirtualSwarm

SchedulePoint = tuple[float, float, float]  # share of the run, outer learning rate, outer momentum
WHOLE = 1e6  # round growth with which all rounds but the first, of one step, have their full length
LOOK_EVERY = 3  # rounds
LOOK_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5)  # of the outer step


@dataclass(frozen=True)
class Recipe:
    """Numbers that may differ from the published recipe."""

    outer: tuple[SchedulePoint, ...] = ((0.0, 0.7, 0.9),)  # in a line between knots
    weights: str = "tokens"  # or "roots" of them, or "equal"
    inner: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    floor: float = 0.1  # of the inner learning rate, at the end
    growth: float = WHOLE  # of rounds
    layers: str = "equal"  # or "agreement": tensors on which members agree less move less
    inner_steps: int = 20  # H
    exchange_share: float = 1.0  # of a round's time, at most: else rounds are longer
    kept_share: float = 1.0  # share of a pseudo-gradient's elements, the largest, that a member sends
    feedback: float = 0.0  # of what it did not send, this much is added to its next
    last: int = 1  # the mean of so many anchors is evaluated
    eager_outer_step: bool = False  # during an exchange, members train where the outer step with their own update leads
    carry_share: float = 1.0  # share of what they move the weights that are exchanged meanwhile that is kept
    weight_decay: float = 0.1
    look: bool = False  # what other lengths of the outer step would have come to

    def __str__(self) -> str:
        """What differs from the published recipe."""
        return " ".join(f"{name}={value}" for name, value in vars(self).items() if value != getattr(PUBLISHED, name))

    def outer_at(self, share: float) -> tuple[float, float]:
        """Outer learning rate and momentum when so much of the run is done."""
        for (start, rate, momentum), (end, next_rate, next_momentum) in pairwise(self.outer):
            if start <= share < end:
                part = (share - start) / (end - start)
                return rate + (next_rate - rate) * part, momentum + (next_momentum - momentum) * part
        return self.outer[-1][1:]

    def weigh(self, contributions: Mapping[str, Contribution]) -> dict[str, int]:
        """Weights of a round's members, as many tokens in all as were trained."""
        power = {"tokens": 1.0, "roots": 0.5, "equal": 0.0}[self.weights]
        parts = {peer: float(work.tokens) ** power if work.tokens else 0.0 for peer, work in contributions.items()}
        total = sum(work.tokens for work in contributions.values())
        weights = {peer: int(part * total / sum(parts.values())) for peer, part in parts.items()}
        weights[max(weights, key=weights.__getitem__)] += total - sum(weights.values())
        return weights


PUBLISHED = Recipe()


class RecipeSwarm(VirtualSwarm):
    """A virtual swarm that follows a recipe."""

    def __init__(
        self, spec: RunSpec, corpus: Corpus, config: SwarmConfig, saved: SwarmSnapshot | None, recipe: Recipe
    ) -> None:
        super().__init__(spec, corpus, config, saved)
        self._recipe = recipe
        self._speeds = config.step_times
        self._anchors: list[Tensor] = []
        self._before_E: Tensor | None = None
        self._unsent: dict[str, Tensor] = {}
        self.looks: dict[str, list[float]] = defaultdict(list)

    @property
    def time(self) -> float:
        """Steps of a member of speed 1 so far."""
        return min(self._due.values())

    def final_loss(self) -> float:
        """Of the mean of the last anchors."""
        anchors = self._anchors[-self._recipe.last :]
        mean_E = torch.stack(anchors).mean(dim=0)
        return self.loops[self.members[0]].evaluate(mean_E)

    def _average(self, gradients: Mapping[str, Tensor], weights: Mapping[str, int]) -> RoundAverage:
        """Of what members send. Sparse values travel exactly, and so does their average: a bound for real codes."""
        if self._recipe.kept_share < 1:
            gradients = {peer: self._largest(peer, gradient_E) for peer, gradient_E in gradients.items()}
        return super()._average(gradients, weights)

    def _largest(self, peer: str, gradient_E: Tensor) -> Tensor:
        """What is sent of an update and of the rest of earlier ones (Stich et al. 2018, arXiv:1809.07599)."""
        wanted_E = gradient_E + self._recipe.feedback * self._unsent.get(peer, torch.zeros_like(gradient_E))
        chosen = torch.topk(wanted_E.abs(), int(self._recipe.kept_share * wanted_E.numel()), sorted=False).indices
        sent_E = torch.zeros_like(wanted_E)
        sent_E[chosen] = wanted_E[chosen]
        self._unsent[peer] = wanted_E - sent_E
        return sent_E

    def _step_outer(self, average_E: Tensor, contributions: Mapping[str, Contribution]) -> None:
        share = self.committed_tokens / self._spec.run.stop_tokens
        rate, momentum = self._recipe.outer_at(share)
        if self._recipe.layers == "agreement":
            average_E = self._by_agreement(average_E, contributions)
        before_E = self.anchor_E
        self.anchor_E, self.momentum_E = self._stepped(average_E, rate, momentum)
        self._anchors = [*self._anchors[-self._recipe.last :], self.anchor_E]
        if self._recipe.look and self.rounds % LOOK_EVERY == 0:
            self._look(before_E, average_E, contributions)
        self._before_E = average_E

    def _set_out(self, contributions: Mapping[str, Contribution]) -> None:
        """As eager updates do that take a member's own update for everybody's (Kale et al. 2025, arXiv:2502.12996)."""
        if not self._recipe.eager_outer_step:
            return
        part = self._part
        schedule = self._recipe.outer_at(self.committed_tokens / self._spec.run.stop_tokens)
        for peer, loop in self.loops.items():
            ahead_E, _ = self._stepped(contributions[peer].gradient_E, *schedule)
            loop._require_snapshot().copy_(ahead_E[part])
            with loop.weights.modify(part) as weights:
                weights.copy_(ahead_E[part])

    def _turn_back(self) -> None:
        if self._recipe.carry_share == 1:
            return
        for loop in self.loops.values():
            with loop.weights.modify(self._part) as weights:
                weights.sub_(loop._require_snapshot()).mul_(self._recipe.carry_share).add_(loop._require_snapshot())

    def _by_agreement(self, average_E: Tensor, contributions: Mapping[str, Contribution]) -> Tensor:
        """Each tensor of the average times the share of it that is not noise, relative to the whole vector's."""
        gradients = [work.gradient_E for work in contributions.values()]
        whole = _signal(average_E, gradients)
        scaled_E = torch.empty_like(average_E)
        for slot in self.loops[self.members[0]].layout.slots:
            part = slice(slot.offset, slot.offset + slot.elements)
            share = _signal(average_E[part], [gradient_E[part] for gradient_E in gradients])
            scaled_E[part] = average_E[part] * min(1.5, share / max(whole, 1e-3))
        return scaled_E

    def _look(self, before_E: Tensor, average_E: Tensor, contributions: Mapping[str, Contribution]) -> None:
        """Held-out loss along the outer step and along the plain average, and how much members and rounds agree."""
        loop, looks = self.loops[self.members[0]], self.looks
        looks["tokens"].append(self.committed_tokens)
        looks["before"].append(loop.evaluate(before_E))
        for factor in LOOK_FACTORS:
            looks[f"step × {factor}"].append(loop.evaluate(before_E + (self.anchor_E - before_E) * factor))
            looks[f"average × {factor}"].append(loop.evaluate(before_E - average_E * factor))
        gradients = [work.gradient_E for work in contributions.values()]
        looks["signal"].append(_signal(average_E, gradients))
        looks["norm"].append(float(average_E.norm()))
        exact_E = torch.stack(gradients).mean(dim=0)
        looks["length kept"].append(float(torch.dot(average_E, exact_E) / exact_E.square().sum()))
        if self._before_E is not None:
            cosine = torch.dot(average_E, self._before_E) / (average_E.norm() * self._before_E.norm())
            looks["cosine with last"].append(float(cosine))


def _signal(average_E: Tensor, gradients: list[Tensor]) -> float:
    """The share of ‖average‖² that is not members' independent noise: (K·c − 1)/((K − 1)·c), c = ‖ḡ‖²/mean ‖gᵢ‖²."""
    members = len(gradients)
    mean = sum(float(gradient_E.square().sum()) for gradient_E in gradients) / members
    agreement = float(average_E.square().sum()) / max(mean, 1e-30)
    return max(0.0, (members * agreement - 1) / ((members - 1) * max(agreement, 1e-30)))
