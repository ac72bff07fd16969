"""Rounds with members on probation: they decide nothing, delay nothing for long, and count no tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.machine_plans import make_plan
from support.machine_world import World

from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp

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


def declining(world: World) -> Callable[[str, str, dp.RoundMessage], bool]:
    """Strangers answer each Open with a newer plan that does not exist."""

    def drop(sender: str, _: str, message: dp.RoundMessage) -> bool:
        if sender in STRANGERS and message.HasField("ready"):
            round_id = pb.RoundId.FromString(message.ready.round.SerializeToString())
            message.Clear()
            message.decline.round.CopyFrom(round_id)
            message.decline.plan_version = 99
        return False

    return drop


def silent_after_exchanges(world: World) -> Callable[[str, str, dp.RoundMessage], bool]:
    """Strangers never say what they got."""
    return lambda sender, _, message: sender in STRANGERS and message.HasField("parts")


def rarely_answering(world: World) -> Callable[[str, str, dp.RoundMessage], bool]:
    """Each stranger tells its tokens always, and what it got in every fourth exchange."""

    def drop(sender: str, _: str, message: dp.RoundMessage) -> bool:
        return sender in STRANGERS and message.HasField("parts") and (world.rounds() + int(sender[1:])) % 4 != 0

    return drop


@pytest.mark.parametrize("attack", [declining, silent_after_exchanges, rarely_answering])
def test_strangers_that_misbehave_cost_a_round_two_seconds_or_little_more(
    attack: Callable[[World], Callable[[str, str, dp.RoundMessage], bool]],
) -> None:
    peace, attacked = World(SIZE, 2, strangers=STRANGERS), World(SIZE, 2, strangers=STRANGERS)
    attacked.network.drop = attack(attacked)
    for world in (peace, attacked):
        world.run(200)
    assert 200 / attacked.rounds() < 200 / peace.rounds() + 2.5


@pytest.mark.parametrize("gives", [True, False])
def test_what_strangers_claim_to_hold_stops_no_round_and_zeroes_no_part(gives: bool) -> None:
    """They send nobody an average; and give what they say they hold, or do not."""
    world = World(SIZE, 1, strangers=STRANGERS)
    world.run(20)
    reaches, reachable = world._exchanges._reaches, world._reachable
    world._exchanges._reaches = lambda a, b: reaches(a, b) and not (a in KNOWN and b in STRANGERS)
    world._reachable = lambda a, b: reachable(a, b) and (gives or b not in STRANGERS)
    before = world.rounds()
    world.run(200)
    assert world.rounds() > before + 20
    assert not any(world.committed[number].manifest.parts_zeroed for number in range(before + 2, world.rounds() + 1))


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


@pytest.mark.parametrize("seed", range(6))
def test_strangers_do_not_get_the_run_when_the_last_known_member_leaves(seed: int) -> None:
    world = World(5, seed, strangers=["p1", "p2", "p3", "p4"])
    world.run(20)
    world.leave("p0")
    world.run(60)
    last = world.rounds()
    assert set(world.committed[last].seats) == {"p0"}
    world.run(60)
    assert world.rounds() == last
    world.restart("p0")
    assert world.run(200, until=lambda: world.rounds() > last + 2)


@pytest.mark.parametrize("seconds", [0.3, 1.5])
def test_honest_strangers_take_part_though_their_steps_are_longer(seconds: float) -> None:
    world = World(7, 2, strangers=["p3", "p4", "p5", "p6"])
    world.step_seconds = dict.fromkeys(("p3", "p4", "p5", "p6"), seconds)
    world.run(120)
    made = [world.committed[number].manifest.contributions for number in range(3, world.rounds() + 1)]
    assert len(made) > 10
    for peer in ("p3", "p4", "p5", "p6"):
        assert sum(any(it.peer_id == peer and it.weight for it in told) for told in made) > len(made) / 2
