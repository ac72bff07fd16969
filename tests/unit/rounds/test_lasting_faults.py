"""Faults that last: a majority of the seats is left, and rounds go on without the rest."""

from dataclasses import replace
from datetime import timedelta

import pytest
from support.machine_plans import POLICY
from support.machine_world import World

QUIET_SECONDS = 200.0  # many times what a round takes


@pytest.mark.parametrize(
    ("size", "dead", "seed"),
    [(size, dead, seed) for size, dead in [(3, 1), (5, 2), (8, 3), (13, 3)] for seed in range(3)] + [(64, 3, 0)],
)
def test_rounds_go_on_though_the_next_openers_are_dead_and_the_coordinator_is_down(size, dead, seed):
    """A minority of the seats dies at once: those whose turn comes first."""
    world = World(size, seed)
    assert world.run(QUIET_SECONDS, until=lambda: world.rounds() > 2)
    world.acceptor.up = False
    machine = world.nodes[world.peers[0]].machine
    for peer in machine.openers[:dead]:
        world.kill(peer)
    before = world.rounds()
    assert world.run(QUIET_SECONDS, until=lambda: world.rounds() > before + 3)


@pytest.mark.parametrize("seed", range(3))
def test_four_of_eight_die_one_after_another_and_the_seats_move_without_the_coordinator(seed):
    world = World(8, seed)
    world.run(20)
    world.acceptor.up = False
    for _ in range(4):
        victim = world.nodes[world.live()[0].peer].machine.openers[0]
        world.kill(victim)
        before = world.rounds()
        assert world.run(QUIET_SECONDS, until=lambda before=before: world.rounds() > before + 1)
        assert victim not in world.committed[world.rounds()].seats
    for peer in world.peers:
        world.restart(peer)
    assert world.run(QUIET_SECONDS, until=lambda: set(world.committed[world.rounds()].present) == set(world.peers))


def test_the_same_member_opens_rounds_for_as_long_as_it_lives():
    world = World(8, seed=1)
    openers = []
    world.network.drop = lambda sender, to, message: message.HasField("start") and openers.append(sender)
    world.run(40)
    assert len(world.committed) > 10
    assert len(set(openers)) == 1


def test_a_straggler_in_every_round_costs_its_own_part_and_not_the_round():
    """Of 32 members one or two are late in each exchange: nobody waits for them as long as an exchange may take."""
    world = World(32, seed=1, policy=replace(POLICY, exchange_timeout=timedelta(seconds=600)))
    world.exchange_seconds = lambda start: 500.0 if world.rng.random() < 0.04 else world.rng.uniform(2.0, 2.5)
    given = []
    world.network.drop = lambda sender, to, message: (
        message.HasField("start") and given.append(message.start.deadline_ms)
    )
    assert world.run(6000, until=lambda: world.rounds() >= 12)
    assert given[-1] < 30_000
    began, before = world.now, world.rounds()
    assert world.run(6000, until=lambda: world.rounds() >= before + 8)
    assert (world.now - began) / 8 < 30
