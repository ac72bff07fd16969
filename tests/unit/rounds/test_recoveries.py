"""Recoveries in the midst of trouble: what one made void never comes back."""

from unittest.mock import patch

import pytest
from support.machine_plans import make_plan
from support.machine_votes import Acceptor
from support.machine_world import Violation, World

from atoll.core.manifest import Head
from atoll.core.plan import Base, Plan
from atoll.core.quorum import next_seats

SEEDS = 12
FEW, MANY = ["p0", "p1"], ["p2", "p3", "p4"]


def recovered(seed: int, cut_seconds: float) -> World:
    """The operator recovers to what a minority holds, while the majority commits on and cannot be reached.

    Then all hear of it, for `cut_seconds` without hearing the other side.
    """
    world = World(5, seed)
    world.run(15)
    world.network.part(FEW, MANY)
    world.acceptor.up = False
    world.run(25)
    base = max((world.nodes[peer].machine.head for peer in FEW), key=lambda head: head.round)
    void = {number: head.hash for number, head in world.committed.items() if number > base.round}
    assert void, "the majority went on"
    world.ledger.recover(base.round)
    world.acceptor = Acceptor(True, 2)
    since = Base(base.hash, next_seats((), FEW, FEW), base.round, 2)
    world.issue(make_plan(FEW, 2, since), FEW)
    world.run(10)
    world.issue(make_plan(world.peers, 3, since))
    world.run(cut_seconds)
    world.network.heal()
    world.run(60)
    assert not any(head.hash in void.values() for head in world.committed.values())
    return world


@pytest.mark.parametrize("cut_seconds", [0.0, 1.0, 5.0, 15.0])
@pytest.mark.parametrize("first", range(0, 2 * SEEDS, SEEDS))
def test_no_void_round_comes_back_and_all_go_on_together(first, cut_seconds):
    for seed in range(first, first + SEEDS):
        world = recovered(seed, cut_seconds)
        before = world.rounds()
        assert world.run(60, until=lambda before=before, world=world: world.rounds() > before + 1), f"seed {seed}"
        assert len({node.machine.plan.accepts(node.machine.head) for node in world.live()}) == 1, f"seed {seed}"
        assert all(set(head.present) <= set(world.peers) for head in world.committed.values())


def test_a_machine_that_goes_on_from_a_void_head_is_noticed():
    def accepts(plan: Plan, head: Head) -> bool:
        return head.round > plan.base.round or head.hash == plan.base.manifest_hash

    with patch.object(Plan, "accepts", accepts):
        for seed in range(20):
            try:
                recovered(seed, 5.0)
            except Violation:
                return
    pytest.fail("no schedule noticed")
