"""A swarm in one process and virtual time, made of the shipped parts: inner loop, codecs, outer step, data position.

Used to say what each ingredient of the real swarm costs in loss (speeds, codec, carry), one at a time, with
everything else equal. What it leaves out is the network; `swarm_vs_ddp` also runs the real thing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.data_position import LEASE_ROUNDS, DataPosition, advance, first_position
from atoll.core.run_spec import RunSpec
from atoll.node.averaging.codecs import CODECS
from atoll.node.averaging.outer import due_tokens, outer_schedule, outer_step, weighted_mean
from atoll.node.averaging.partition import partition
from atoll.node.training.corpus import Corpus
from atoll.node.training.loop import InnerLoop


@dataclass(frozen=True)
class Ingredients:
    """What a virtual swarm has: relative step times, codec, and how long an exchange lasts (in step times)."""

    step_times: tuple[float, ...]
    codec: str
    delay: float  # 0: nobody trains during the exchange; otherwise everyone does, and carries


class VirtualSwarm:
    """K inner loops and one committed state. Virtual time 1.0 is one step of a full-speed node."""

    def __init__(self, spec: RunSpec, corpus: Corpus, ingredients: Ingredients) -> None:
        self._spec, self._it = spec, ingredients
        self.members = [f"node-{i}" for i in range(len(ingredients.step_times))]
        self.loops = {peer: InnerLoop(spec, corpus, "cpu") for peer in self.members}
        first = self.loops[self.members[0]]
        self.anchor_E = torch.empty(first.layout.elements)
        self.momentum_E = torch.zeros_like(self.anchor_E)
        first.initialise_into(self.anchor_E)
        lease = LEASE_ROUNDS * -(-spec.sync.round_tokens // spec.data.sequence_length)
        self.position: DataPosition = first_position(self.members, lease)
        self._minimum_lease = lease // LEASE_ROUNDS
        for peer, loop in self.loops.items():
            loop.load(self.anchor_E, ranges=self.position.holdings[peer])
        self.committed_tokens = 0
        self._due = dict(zip(self.members, ingredients.step_times, strict=True))

    def run(self, tokens: int) -> None:
        """Train until `tokens` are committed."""
        while self.committed_tokens < tokens:
            self._train_until_due()
            self._round()

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
        while min(self._due.values()) <= until:
            peer = min(self._due, key=lambda name: (self._due[name], name))
            self.loops[peer].step()
            self._due[peer] += self._it.step_times[self.members.index(peer)]

    def _train_until_due(self) -> None:
        first = len(self.members) * self._spec.tokens_per_step
        due = due_tokens(self._spec.sync, self.committed_tokens, first)
        while sum(loop.progress.tokens for loop in self.loops.values()) < due:
            self._advance(min(self._due.values()))

    def _round(self) -> None:
        snapshots = {peer: loop.snapshot() for peer, loop in self.loops.items()}
        gradients = {peer: torch.empty_like(self.anchor_E) for peer in self.members}
        for peer, loop in self.loops.items():
            loop.pseudo_gradient_into(gradients[peer])
        if self._it.delay:
            self._advance(min(self._due.values()) + self._it.delay)
        average_E = self._average(gradients, [snapshots[peer].tokens for peer in self.members])
        schedule = outer_schedule(self._spec.sync, self.committed_tokens)
        self.anchor_E, self.momentum_E = outer_step(self.anchor_E, self.momentum_E, average_E, *schedule)
        consumed = {peer: snapshot.samples for peer, snapshot in snapshots.items()}
        self.position = advance(self.position, self.members, consumed, self._minimum_lease)
        self.committed_tokens += sum(snapshot.tokens for snapshot in snapshots.values())
        for peer, loop in self.loops.items():
            loop.apply(self.anchor_E, ranges=self.position.holdings[peer], committed_tokens=self.committed_tokens)

    def _average(self, gradients: dict[str, Tensor], weights: list[int]) -> Tensor:
        """What the butterfly computes: contributions coded once, the average coded once."""
        codec = CODECS[self._it.codec]
        average_E = torch.empty_like(self.anchor_E)
        for piece in partition(average_E.numel(), self.members, {}):
            values = []
            for peer in self.members:
                part_E = gradients[peer][piece.start : piece.end]
                values.append(part_E if peer == piece.reducer else codec.decode(codec.encode(part_E), part_E.numel()))
            mean_E = weighted_mean(values, weights)
            average_E[piece.start : piece.end] = codec.decode(codec.encode(mean_E), mean_E.numel())
        return average_E


def train_alone(spec: RunSpec, corpus: Corpus, steps: int) -> float:
    """One inner loop for `steps` steps; held-out loss. With a K-fold batch this *is* synchronous DDP:
    the mean gradient of K equal batches is the gradient of their union."""
    loop = InnerLoop(spec, corpus, "cpu")
    weights_E = torch.empty(loop.layout.elements)
    loop.initialise_into(weights_E)
    samples = steps * spec.optimizer.micro_batch_samples * spec.optimizer.accumulate
    loop.load(weights_E, ranges=((0, samples),))
    for _ in range(steps):
        loop.step()
        loop.set_committed_tokens(loop.progress.tokens_total)
    loss = loop.evaluate(loop.weights_E)
    loop.close()
    return loss
