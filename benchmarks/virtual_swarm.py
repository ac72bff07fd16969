"""A swarm in one process and virtual time, made of the shipped parts: inner loop, codecs, outer step, data position.

Used to say what each ingredient of the real swarm costs in loss (speeds, codec, carry), one at a time, with
everything else equal. What it leaves out is the network; `swarm_vs_ddp` also runs the real thing.

Members may be replaced between rounds, and a rule may say what each counts (`newcomers` measures that).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from atoll.core.data_position import DataPosition, advance, first_lease_samples, genesis_position, with_first_leases
from atoll.core.errors import PartInvalid
from atoll.core.fragments import fragment_of_round, split_into_fragments
from atoll.core.round_schedule import due_tokens
from atoll.core.run_spec import RunSpec
from atoll.node.data.corpus import Corpus
from atoll.node.exchange.codecs import CODECS, is_finite
from atoll.node.exchange.partition import Part, ReducerShare, part_elements, partition, reducer_shares
from atoll.node.exchange.screening import factors_from_products, inner_products
from atoll.node.exchange.weighted_sum import weighted_mean
from atoll.node.rounds.outer_schedule import outer_schedule
from atoll.node.rounds.policy import screen_of
from atoll.node.state.outer_step import outer_step
from atoll.node.training.inner_optimizer import Stepper
from atoll.node.training.learning_rate import learning_rate
from atoll.node.training.loop import InnerLoop


@dataclass(frozen=True)
class SwarmConfig:
    """What a virtual swarm has: relative step times, codec, and how long an exchange lasts (in step times)."""

    step_times: tuple[float, ...]
    codec: str
    delay: float  # 0: nobody trains during the exchange; otherwise everyone does, and carries
    screening: bool = False
    device: str = "cpu"  # of the members' inner loops


@dataclass(frozen=True)
class Contribution:
    """What one member brings to a round, of the fragment whose turn it is."""

    gradient_E: Tensor  # noqa: N815
    steps: int  # since the round before
    tokens: int
    age: int  # rounds that it took part in since it joined


@dataclass(frozen=True)
class RoundAverage:
    """What a round's all-reduce came to."""

    average_E: Tensor  # noqa: N815
    left_out: Mapping[str, int]  # parts whose sum screening kept somebody out of
    parts: int


Tamper = Callable[[int, Mapping[str, Tensor]], Mapping[str, Tensor]]  # (round, gradients) → what members send
Weigh = Callable[[Mapping[str, Contribution]], Mapping[str, int]]  # of a round's members: in tokens; 0 leaves one out


def by_tokens(contributions: Mapping[str, Contribution]) -> Mapping[str, int]:
    """As the shipped rounds weigh: every token that was trained."""
    return {peer: work.tokens for peer, work in contributions.items()}


@dataclass(frozen=True)
class SwarmSnapshot:
    """A swarm between two rounds that take no time, so that nobody has progress."""

    anchor_E: Tensor  # noqa: N815
    momentum_E: Tensor  # noqa: N815
    position: DataPosition
    committed_tokens: int = 0
    rounds: int = 0
    due: Mapping[str, float] = field(default_factory=dict)  # virtual time of each member's next step
    moments: Mapping[str, Any] = field(default_factory=dict)  # each member's state of AdamW


def member_names(count: int) -> list[str]:
    """What the members of a virtual swarm are called."""
    return [f"node-{i}" for i in range(count)]


def fresh(spec: RunSpec, members: int, anchor_E: Tensor) -> SwarmSnapshot:
    """A swarm that begins its run with these weights."""
    position = genesis_position(member_names(members), first_lease_samples(_round_samples(spec), members))
    return SwarmSnapshot(anchor_E, torch.zeros_like(anchor_E), position)


def _round_samples(spec: RunSpec) -> int:
    return -(-spec.sync.round_tokens // spec.data.sequence_length)


class VirtualSwarm:
    """K inner loops and one committed state. Virtual time 1.0 is one step of a full-speed node.

    With `saved` it goes on where another swarm of the same members stood. It has many attributes because it is the
    state of all members and of the run, and many methods because benchmarks drive each part of a round on its own.
    """

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        config: SwarmConfig,
        saved: SwarmSnapshot | None = None,
        tamper: Tamper = lambda number, gradients: gradients,
        members: Sequence[str] = (),
        make: Callable[[str], InnerLoop] | None = None,
    ) -> None:
        """`make`: a member's inner loop, where it is not the usual one."""
        self._spec, self._config, self._tamper = spec, config, tamper
        self.bandwidth: Mapping[str, int] = {}  # in proportion to which members reduce; none: equally
        self.averaged: list[RoundAverage] = []  # every round's, without its average
        self.members = list(members) or member_names(len(config.step_times))
        self._make = make or (lambda peer: InnerLoop(spec, corpus, config.device))
        self.loops = {peer: self._make(peer) for peer in self.members}
        self._fragments = split_into_fragments(self.loops[self.members[0]].layout.layer_offsets, spec.sync.fragments)
        self._minimum_lease = _round_samples(spec)
        self._step_times = dict(zip(self.members, config.step_times, strict=True))
        saved = saved or self._genesis()
        self.anchor_E, self.momentum_E = saved.anchor_E.clone(), saved.momentum_E.clone()
        self.position = saved.position
        self.committed_tokens = self.trained_tokens = saved.committed_tokens
        self.rounds = saved.rounds
        self._due = dict(saved.due) or dict(self._step_times)
        self._ramps = dict.fromkeys(self.members, 0)  # steps
        self._joined = dict.fromkeys(self.members, 0)  # the round that each began with
        self._now = self._rest_until = 0.0  # virtual time
        for peer in self.members:
            self._begin(peer, saved.moments.get(peer))

    def _genesis(self) -> SwarmSnapshot:
        first = self.loops[self.members[0]]
        anchor_E = torch.empty(first.layout.elements)
        first.initialise_into(anchor_E)
        return fresh(self._spec, len(self.members), anchor_E)

    def save(self) -> SwarmSnapshot:
        """What `VirtualSwarm` goes on from. Only without delay: otherwise members carry progress over the round."""
        if self._config.delay:
            raise ValueError("a swarm whose members carry progress cannot be saved")
        moments = {peer: self.moments(peer) for peer in self.members}
        return SwarmSnapshot(
            self.anchor_E, self.momentum_E, self.position, self.committed_tokens, self.rounds, self._due, moments
        )

    def moments(self, peer: str) -> Any:
        """A copy of a member's state of AdamW; None before its first step."""
        stepper = self.loops[peer].stepper
        return copy.deepcopy(stepper.optimizer.state_dict()) if stepper is not None else None

    def replace(
        self, leaver: str, newcomer: str, *, moments: Any = None, dry_steps: int = 0, ramp_steps: int = 0
    ) -> None:
        """Between two rounds: `newcomer` begins at the anchor with the samples that a shipped join gives it.

        Without `moments` its AdamW is fresh. It may make `dry_steps` before, of which only AdamW's state stays: the
        first round of a shipped join, for which it has no samples, is over here. For `ramp_steps` its learning rate
        rises in a line to everybody's.
        """
        self.loops.pop(leaver).close()
        self.loops[newcomer] = self._make(newcomer)
        self.members[self.members.index(leaver)] = newcomer
        for table in (self._step_times, self._due):
            table[newcomer] = table.pop(leaver)
        self._joined[newcomer] = self.rounds
        began = [(0, number, peer) for number, peer in enumerate(self.members)]
        self.position = with_first_leases(self.position, began, self._minimum_lease)
        self._begin(newcomer, moments)
        if dry_steps:
            for _ in range(dry_steps):
                self.loops[newcomer].step()
            self._begin(newcomer, self.moments(newcomer))
        self._ramps[newcomer] = ramp_steps

    def _begin(self, peer: str, moments: Any) -> None:
        loop = self.loops[peer]
        if moments is not None:
            loop.stepper = Stepper(loop.model, self._spec.optimizer, loop.precision)
            loop.stepper.optimizer.load_state_dict(copy.deepcopy(moments))
        loop.load(self.anchor_E, ranges=self.position.holdings[peer], committed_tokens=self.committed_tokens)

    def run(self, tokens: int) -> None:
        """Train until `tokens` are committed."""
        while self.committed_tokens < tokens:
            self.round()

    def round(self, weigh: Weigh = by_tokens) -> None:
        """Train until a round is due, and commit it."""
        self._train_until_due()
        self._round(weigh)

    def evaluate(self) -> float:
        """Held-out loss of the anchor, nats per token."""
        return self.loops[self.members[0]].evaluate(self.anchor_E)

    def steps(self) -> dict[str, int]:
        """Inner steps per member."""
        return {peer: loop.progress.steps_total for peer, loop in self.loops.items()}

    def close(self) -> None:
        """End the loaders."""
        for loop in self.loops.values():
            loop.close()

    def _advance(self, until: float) -> None:
        self._now = until
        while min(self._due.values()) <= until:
            peer = min(self._due, key=lambda name: (self._due[name], name))
            self._step(peer)
            self._due[peer] += self._step_times[peer]

    def _step(self, peer: str) -> None:
        loop, ramp = self.loops[peer], self._ramps[peer]
        done = loop.progress.steps_total
        if done <= ramp:
            loop.stepper = loop.stepper or Stepper(loop.model, self._spec.optimizer, loop.precision)
            full = learning_rate(self._spec, self.committed_tokens)
            loop.stepper.set_learning_rate(full * min(1.0, (done + 1) / (ramp + 1)))
        loop.step()

    def _train_until_due(self) -> None:
        first = len(self.members) * self._spec.tokens_per_step
        due = due_tokens(self._spec.sync, self.committed_tokens, first, len(self._fragments))
        while sum(loop.progress.tokens for loop in self.loops.values()) < due:
            self._advance(min(self._due.values()))
        while min(self._due.values()) < self._rest_until:  # as shipped members do, who know how long exchanges last
            self._advance(min(self._due.values()))

    def _train_meanwhile(self) -> None:
        """What members do between their snapshots and the new anchor."""
        if self._config.delay:
            began = self._now
            self._rest_until = began + self._config.delay / (self._spec.sync.exchange_share * len(self._fragments))
            self._advance(began + self._config.delay)

    def _round(self, weigh: Weigh) -> None:
        part, count = self._part, len(self._fragments)
        contributions, consumed = {}, {}
        for peer, loop in self.loops.items():
            snapshot, gradient_E = loop.snapshot(part), torch.empty_like(self.anchor_E)
            loop.pseudo_gradient_into(gradient_E)
            age = self.rounds - self._joined[peer]
            contributions[peer] = Contribution(gradient_E[part], snapshot.steps, snapshot.fragment_tokens, age)
            consumed[peer] = snapshot.samples
        self._set_out(contributions)
        self._train_meanwhile()
        self._turn_back()
        weights = weigh(contributions)
        sent = self._tamper(self.rounds, {peer: work.gradient_E for peer, work in contributions.items()})
        averaged = self._average(sent, weights)
        self.averaged.append(replace(averaged, average_E=torch.empty(0)))
        self._step_outer(averaged.average_E, contributions)
        left_out = {peer for peer, work in contributions.items() if work.tokens and not weights[peer]}
        uncounted = {peer for peer, parts in averaged.left_out.items() if 2 * parts > averaged.parts}
        counted = {peer: 0 if peer in left_out else count for peer, count in consumed.items()}
        self.position = advance(self.position, self.members, counted, self._minimum_lease)
        self.committed_tokens += sum(weight // count for peer, weight in weights.items() if peer not in uncounted)
        self.trained_tokens += sum(work.tokens // count for work in contributions.values())
        self.rounds += 1
        for peer, loop in self.loops.items():
            ranges = self.position.holdings[peer]
            if peer in left_out:  # its work is thrown away, its samples are trained again; AdamW's state stays
                loop.load(self.anchor_E, ranges=ranges, committed_tokens=self.committed_tokens)
            else:
                loop.apply(self.anchor_E, ranges=ranges, committed_tokens=self.committed_tokens, moved=part)

    def _set_out(self, contributions: Mapping[str, Contribution]) -> None:
        """What members do with their weights once their snapshots are made: train on."""

    def _turn_back(self) -> None:
        """What they do with what they trained since, before they take the new anchor: carry it."""

    @property
    def _part(self) -> slice:
        """What the next round averages."""
        fragment = self._fragments[fragment_of_round(self.rounds + 1, len(self._fragments))]
        return slice(fragment.start, fragment.end)

    def _step_outer(self, average_E: Tensor, contributions: Mapping[str, Contribution]) -> None:
        schedule = outer_schedule(self._spec.sync, self.committed_tokens)
        self.anchor_E, self.momentum_E = self._stepped(average_E, *schedule)

    def _stepped(self, average_E: Tensor, rate: float, momentum: float) -> tuple[Tensor, Tensor]:
        """Anchor and momentum after the step of the part that `average_E` is of."""
        part, anchor_E, momentum_E = self._part, self.anchor_E.clone(), self.momentum_E.clone()
        out = anchor_E[part], momentum_E[part]
        outer_step(self.anchor_E[part], self.momentum_E[part], average_E, rate, momentum, out)
        return anchor_E, momentum_E

    def _average(self, gradients: Mapping[str, Tensor], weights: Mapping[str, int]) -> RoundAverage:
        """What the butterfly computes: contributions coded once, the average coded once."""
        codec = CODECS[self._config.codec]
        average_E = torch.empty_like(next(iter(gradients.values())))
        ranges = partition(average_E.numel(), self.members, self.bandwidth)
        cut = reducer_shares(ranges, part_elements(ranges, codec.encoded_bytes, self._spec.sync.part_elements))
        left_out: Counter[str] = Counter()
        for share in cut:
            for part in share.parts:
                values = {}
                for peer in self.members:
                    part_E = gradients[peer][part.start : part.end]
                    with suppress(PartInvalid):  # who sends what is not finite is not in the sum
                        own = peer == share.reducer and is_finite(part_E)
                        values[peer] = part_E if own else codec.decode(codec.encode(part_E), part.elements)
                counted = {peer: values[peer] for peer in values if weights[peer]}
                factors = self._judge(counted, weights)
                left_out.update(peer for peer in self.members if weights[peer] and not factors.get(peer))
                if not counted:  # a zero update, as in a real exchange
                    average_E[part.start : part.end] = 0.0
                    continue
                given = [weights[peer] for peer in counted]
                mean_E = weighted_mean(list(counted.values()), given, [factors[peer] for peer in counted])
                average_E[part.start : part.end] = codec.decode(codec.encode(mean_E), part.elements)
                self._summed(share, part, gradients, [factors.get(peer, 0.0) for peer in self.members], average_E)
        return RoundAverage(average_E, left_out, sum(len(share.parts) for share in cut))

    def _summed(
        self,
        share: ReducerShare,
        part: Part,
        gradients: Mapping[str, Tensor],
        factors: Sequence[float],
        average_E: Tensor,
    ) -> None:
        """A part of `average_E` is made; `factors` are of all members."""

    def _judge(self, values: Mapping[str, Tensor], weights: Mapping[str, int]) -> Mapping[str, float]:
        if not self._config.screening:
            return dict.fromkeys(values, 1.0)
        given = list(values.values())
        work = [weights[peer] for peer in values]
        factors = factors_from_products(inner_products(given), work, given[0].numel(), screen_of(self._spec))
        return dict(zip(values, factors, strict=True))
