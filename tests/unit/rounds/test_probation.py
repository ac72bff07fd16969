"""Rounds with members on probation: they decide nothing, delay nothing for long, and count no tokens."""

from __future__ import annotations

import pytest
from support.machine_plans import make_plan
from support.machine_world import World

KNOWN = ("p0", "p1", "p2", "p3")
SIZE = 24
STRANGERS = [f"p{number}" for number in range(len(KNOWN), SIZE)]


@pytest.mark.parametrize("seed", range(3))
def test_strangers_get_no_seats_and_their_tokens_do_not_count(seed: int) -> None:
    world = World(SIZE, seed, strangers=STRANGERS)
    world.run(60)
    assert world.rounds() > 3
    for number in range(1, world.rounds() + 1):
        made = world.committed[number].manifest.contributions
        assert set(world.committed[number].seats) <= {*KNOWN, "coordinator"}
        assert {item.peer_id for item in made if item.on_probation} <= set(STRANGERS)
        assert not any(item.tokens for item in made if item.on_probation)
        told = sum(item.weight for item in made if item.on_probation)
        assert 3 * told <= sum(item.weight for item in made if not item.on_probation)
    assert any(item.weight for item in made if item.on_probation)


@pytest.mark.parametrize("fault", ["frozen", "dead", "deaf in exchanges"])
@pytest.mark.parametrize("seed", range(2))
def test_rounds_go_on_though_all_strangers_fail(fault: str, seed: int) -> None:
    """Twenty of 24: no majority of all members attests to anything any more."""
    world = World(SIZE, seed, strangers=STRANGERS)
    world.run(20)
    if fault == "deaf in exchanges":
        world.network.drop = lambda _, to, message: to in STRANGERS and message.HasField("settle")
    else:
        for peer in STRANGERS:
            (world.freeze if fault == "frozen" else world.kill)(peer)
    before = world.rounds()
    world.run(200)
    assert world.rounds() > before + 3
    held = world.heads()
    assert max(number for number, _ in held) == world.rounds()


def test_a_member_that_comes_on_probation_loses_its_seat_and_gets_it_back_later() -> None:
    world = World(5, 1)
    world.run(20)
    opener = world.committed[world.rounds()].seats[0]
    world.issue(make_plan(world.peers, 2, world.plan.base, strangers=[opener]))
    assert world.run(100, until=lambda: opener not in world.committed[world.rounds()].seats)
    before = world.rounds()
    assert world.run(100, until=lambda: world.rounds() > before + 3)
    world.issue(make_plan(world.peers, 3, world.plan.base))
    assert world.run(100, until=lambda: opener in world.committed[world.rounds()].seats)
