"""Faults that last: a majority of those who decide is left, and rounds go on without the rest."""

import pytest
from support.machine_world import World

QUIET_SECONDS = 200.0  # many times what a round takes


@pytest.mark.parametrize(("size", "dead"), [(5, 2), (8, 3), (13, 6)])
@pytest.mark.parametrize("seed", range(5))
def test_rounds_go_on_though_the_next_openers_are_dead_and_the_coordinator_is_down(size, dead, seed):
    """Whichever minority dies: also when it holds all members that would hear of tokens next."""
    world = World(size, seed)
    world.run(20)
    world.acceptor.up = False
    machine = world.nodes[world.peers[0]].machine
    order = machine.round_id.order(world.plan.members)
    for ahead in range(dead):
        world.kill(order[(machine.attempt + ahead) % size])
    before = world.rounds()
    world.run(QUIET_SECONDS)
    assert world.rounds() > before + 3
