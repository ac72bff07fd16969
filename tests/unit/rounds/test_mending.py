"""Where a round is settled otherwise than it came, states are made anew, and the opener knows how long that takes."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from support import machine_world
from support.machine_node import Node
from support.machine_plans import POLICY
from support.machine_world import World

from atoll.node.rounds import types as rt

MAKING = 3.0  # seconds that a large model's state takes
EVERY = 12  # rounds, after which somebody dies in an exchange
VICTIM = "p4"


class LargeModel(World):
    """Members whose state is ready when the opener's word comes, unless it changes what they have."""

    def __init__(self, seed: int) -> None:
        self._next = 40
        slow = timedelta(seconds=60)
        timeouts = {"round_max": timedelta(seconds=600), "exchange_timeout": slow, "decision_timeout": slow}
        super().__init__(5, seed, policy=replace(POLICY, due_tokens=lambda committed, members: 600, **timeouts))
        self.network.delay = (0.02, 0.05)
        self.exchange_seconds = lambda start: 2.0 + self.rng.uniform(0, 0.2)

    def _perform(self, node: Node, action: rt.Action) -> None:
        if isinstance(action, rt.Complete):
            own = tuple(node.parts.get(action.round_id) or ())
            as_it_came = own == tuple(action.settle.digests) and all(own)
            self._later(0.15 if as_it_came else 0.15 + MAKING, node, self._complete, action.round_id, action.settle)
            return
        if isinstance(action, rt.RunExchange) and node.peer != VICTIM and self.rounds() >= self._next:
            self._next = self.rounds() + EVERY
            self.at(0.7, self.kill, VICTIM)
            self.at(8, self.restart, VICTIM)
        super()._perform(node, action)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_reducer_that_dies_costs_its_parts_and_not_the_round(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_world, "TICK", 0.1)
    monkeypatch.setattr(machine_world, "TOKENS_PER_TICK", 2)
    world = LargeModel(seed)
    world.run(1500)
    assert len(world.killed) >= 10
    abandoned = [report.reason for report in world.reports if report.manifest is None]
    assert len(abandoned) <= 1, abandoned
