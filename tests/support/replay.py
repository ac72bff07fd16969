"""What real processes did, made again by a virtual swarm from the manifests and plans that they left: bit for bit.

A manifest says how much every member trained since its last snapshot, in which order the sums were made, and what came
out. It does not say how much of that a member trained before the last anchor reached it (the carry). That is found by
trying, round by round: only the right counts lead to the digests of the next manifest.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from benchmarks.virtual_swarm import SwarmConfig, SwarmSnapshot, VirtualSwarm
from torch import Tensor

from atoll.core.data_position import SampleRange, drop_samples
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.run_spec import RunSpec
from atoll.node.data.corpus import Corpus
from atoll.node.exchange.codecs import BY_NUMBER
from atoll.node.rounds.decide import position_at
from atoll.node.rounds.outer_schedule import outer_schedule
from atoll.node.state.outer_step import matches_digests
from atoll.node.training.loop import InnerLoop
from atoll.node.training.progress import Progress
from atoll.v1 import manifest_pb2

Carry = Mapping[str, int]  # steps that each member made between a snapshot and the anchor that it led to


class ReplayMismatch(Exception):
    """No carry leads from one manifest to the next."""


@dataclass(frozen=True)
class History:
    """What processes left: their run spec, the manifests from round 1 on, and every plan by its version."""

    spec: RunSpec
    heads: Sequence[Head]
    plans: Mapping[int, Plan]

    def plan(self, head: Head) -> Plan:
        """That a round was made under."""
        return self.plans[head.manifest.round.plan_version]


class Replay(VirtualSwarm):
    """A virtual swarm whose members train as much as manifests say."""

    def __init__(self, history: History, corpus: Corpus) -> None:
        first = history.heads[0]
        members = history.plan(first).members
        genesis = Head(manifest_pb2.CommittedManifest(payload=b""))
        loop = InnerLoop(history.spec, corpus, "cpu")
        anchor_E = torch.empty(loop.layout.elements)
        loop.initialise_into(anchor_E)
        loop.close()
        position = replace(position_at(genesis, history.plan(first), 0), epoch_samples=first.data.epoch_samples)
        saved = SwarmSnapshot(anchor_E, torch.zeros_like(anchor_E), position)
        codec = BY_NUMBER[first.manifest.codec].name
        ingredients = SwarmConfig((1.0,) * len(members), codec, 0.0, history.spec.sync.screening)
        super().__init__(history.spec, corpus, ingredients, saved, members=members)
        self._history = history
        self._trained: Mapping[str, int] = {}  # steps between snapshots
        self._carry: Carry = {}

    def replay_round(self, head: Head, carry: Carry) -> bool:
        """Make this round; whether it came to what the manifest says."""
        self._expect(head)
        self._carry = carry
        self.round()
        return self._is(head, self.anchor_E, self.momentum_E) and self.position == head.data

    def _expect(self, head: Head) -> None:
        made = head.manifest.contributions
        plan = self._history.plan(head)
        assignments = plan.assignments
        self.position = replace(self.position, routes_begun=plan.routes_begun)
        self.members = [item.peer_id for item in made]  # the order of the sums
        self.bandwidth = {item.peer_id: item.max_reduce_bytes_per_second for item in assignments}
        samples = self._spec.optimizer.micro_batch_samples * self._spec.optimizer.accumulate
        self._trained = {item.peer_id: item.samples // samples for item in made}

    def _is(self, head: Head, anchor_E: Tensor, momentum_E: Tensor) -> bool:
        offsets = self.loops[self.members[0]].layout.layer_offsets
        return matches_digests(head.manifest.layers, anchor_E, momentum_E, offsets)

    def _train_until_due(self) -> None:
        for peer, steps in self._trained.items():
            for _ in range(steps - self.loops[peer].progress.steps):
                self.loops[peer].step()

    def _train_meanwhile(self) -> None:
        for peer, steps in self._carry.items():
            for _ in range(steps):
                self.loops[peer].step()


def find_carries(history: History, corpus: Corpus) -> list[Carry]:
    """The carry after every round but the last, with which all digests come out. Raises `ReplayMismatch`."""
    search = _Search(history, corpus)
    try:
        return [search.follow(head) for head in history.heads][1:]
    finally:
        search.close()


def check(history: History, corpus: Corpus, carries: Sequence[Carry]) -> None:
    """Make all rounds again with these carries. Raises `ReplayMismatch` unless all digests come out."""
    swarm = Replay(history, corpus)
    try:
        for head, carry in zip(history.heads, [*carries, {}], strict=True):
            if not swarm.replay_round(head, carry):
                raise ReplayMismatch(f"round {head.round} came to other digests")
    finally:
        swarm.close()


@dataclass(frozen=True)
class _Member:
    """One member at its snapshot."""

    peer: str
    carry: int  # steps before the last anchor reached it
    weights_E: Tensor  # noqa: N815
    gradient_E: Tensor  # noqa: N815
    progress: Progress
    moments: Any


@dataclass(frozen=True)
class _Before:
    """The anchor that members had at their snapshots, and the part that these were of."""

    anchor_E: Tensor  # noqa: N815
    holdings: Mapping[str, tuple[SampleRange, ...]]
    committed_tokens: int
    part: slice


class _Search(Replay):
    """Goes from manifest to manifest with every carry that a member can have had."""

    def __init__(self, history: History, corpus: Corpus) -> None:
        super().__init__(history, corpus)
        self._before = _Before(self.anchor_E, self.position.holdings, 0, self._part)
        self._at_snapshot: dict[str, _Member] = {}

    def follow(self, head: Head) -> Carry:
        """The carry that leads to this round."""
        self._expect(head)
        ways = {peer: self._candidates(peer, steps) for peer, steps in self._trained.items()}
        for chosen in sorted(itertools.product(*ways.values()), key=self._unlikely):
            members = {it.peer: it for it in chosen}
            weights = {item.peer_id: item.weight for item in head.manifest.contributions}
            average_E = self._average({peer: it.gradient_E for peer, it in members.items()}, weights).average_E
            schedule = outer_schedule(self._spec.sync, self.committed_tokens)
            anchor_E, momentum_E = self._stepped(average_E, *schedule)
            if self._is(head, anchor_E, momentum_E):
                self._before = _Before(self.anchor_E, self.position.holdings, self.committed_tokens, self._part)
                self.rounds += 1
                self.anchor_E, self.momentum_E = anchor_E, momentum_E
                self.position, self.committed_tokens = head.data, head.committed_tokens
                self._at_snapshot = members
                return {peer: it.carry for peer, it in members.items()}
        raise ReplayMismatch(f"no carry leads to the digests of round {head.round}")

    def _candidates(self, peer: str, steps: int) -> list[_Member]:
        if not self._at_snapshot:
            return [self._candidate(peer, steps, 0)]
        return [self._candidate(peer, steps, carry) for carry in range(steps + 1)]

    def _candidate(self, peer: str, steps: int, carry: int) -> _Member:
        """What the member has at its next snapshot if the last anchor reached it after so many steps."""
        loop = self.loops[peer]
        if self._at_snapshot:
            self._restore(peer)
            for _ in range(carry):
                loop.step()
            ranges, tokens = self.position.holdings[peer], self.committed_tokens
            loop.apply(self.anchor_E, ranges=ranges, committed_tokens=tokens, moved=self._before.part)
        for _ in range(steps - carry):
            loop.step()
        loop.snapshot(self._part)
        gradient_E = torch.empty_like(self.anchor_E)
        loop.pseudo_gradient_into(gradient_E)
        return _Member(
            peer,
            carry,
            loop.weights_E.clone(),
            gradient_E[self._part],
            copy.deepcopy(loop.progress),
            self.moments(peer),
        )

    def _restore(self, peer: str) -> None:
        loop, it, before = self.loops[peer], self._at_snapshot[peer], self._before
        left, committed_tokens = drop_samples(before.holdings[peer], it.progress.samples), before.committed_tokens
        loop.load(before.anchor_E, ranges=left, committed_tokens=committed_tokens)
        loop.weights_E.copy_(it.weights_E)
        loop.progress = copy.deepcopy(it.progress)
        loop.stepper.optimizer.load_state_dict(copy.deepcopy(it.moments))
        loop.set_committed_tokens(committed_tokens)  # the learning rate too stands in AdamW's state
        loop.snapshot(before.part)

    def _unlikely(self, members: Sequence[_Member]) -> int:
        """How far from the carries of the round before."""
        before = self._at_snapshot
        return sum(abs(it.carry - before[it.peer].carry) if it.peer in before else 0 for it in members)
