"""Time between two plans: bursts make one plan, and nothing waits that would stop the run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from unit.coordinator.routed import QUICK, RoutedWorld
from unit.coordinator.test_recovery import go_on
from unit.coordinator.world import RUN, World

from atoll.coordinator.live import plan_apply
from atoll.coordinator.planner.question import Answer
from atoll.coordinator.runs import bans
from atoll.coordinator.state.snapshot import Policy
from atoll.v1 import membership_pb2 as mb

INTERVAL = Policy().plan_interval_seconds
BURST = tuple(f"n{number}" for number in range(64))


def spaced() -> World:
    """Two nodes train, under the policy that is shipped; the first plan is old."""
    world = World(policy=Policy())
    world.train("ann", "bob")
    world.wait(INTERVAL)
    return world


def issued_at(world: World) -> list[float]:
    return [plan.issued_unix_ms / 1000 for plan in world.plans]


def test_a_change_after_a_quiet_time_waits_only_for_the_debounce() -> None:
    world = spaced()
    world.join("cid")
    world.wait(world.policy.debounce_seconds + 0.4)
    assert world.members() == {"ann", "bob", "cid"}


def test_64_members_that_join_within_two_seconds_make_two_plans() -> None:
    world = spaced()
    for name in BURST:
        world.join(name)
        world.wait(2 / len(BURST))
    world.wait(INTERVAL - 3)
    assert len(world.plans) == 2
    world.wait(4)
    assert len(world.plans) == 3
    assert world.members() == {"ann", "bob", *BURST}


def test_a_member_that_comes_or_goes_every_half_second_makes_a_plan_each_interval() -> None:
    """The script that showed how plans starve rounds: here 240 changes in two minutes."""
    world = World(policy=Policy())
    world.train("ann", "bob", "cid", "dan", "eve")
    for number in range(120):
        world.join(f"n{number}")
        world.wait(0.5)
        if number >= 4:
            world.say(f"n{number - 4}", mb.NODE_STATE_FAILED)
        world.wait(0.5)
    times = issued_at(world)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert min(gaps) >= INTERVAL - 0.1  # the wall clock counts whole milliseconds
    assert max(gaps) < INTERVAL + 1
    assert len(times) >= 120 / (INTERVAL + 1)


def test_a_plan_does_not_wait_when_nobody_trains() -> None:
    world = spaced()
    world.join("cid")
    world.wait(2)
    everyone = [world.identities[name] for name in ("ann", "bob", "cid")]
    go_on(world, "cid", plan=2, signers=everyone)  # cid decides the next round alone
    for name in ("ann", "bob"):
        world.say(name, mb.NODE_STATE_FAILED)
    world.join("dan")
    world.say("cid", mb.NODE_STATE_FAILED)
    before = world.now.monotonic
    world.say("cid", mb.NODE_STATE_TRAINING)
    world.wait(INTERVAL - 3)
    assert len(world.plans) == 2  # cid trains: the others can wait
    world.say("cid", mb.NODE_STATE_PAUSED)
    world.wait(world.policy.debounce_seconds + 0.4)
    assert world.now.monotonic - before < INTERVAL
    assert "dan" in world.members()


def test_a_plan_does_not_wait_when_those_that_are_left_cannot_decide() -> None:
    world = spaced()
    world.join("cid")
    world.wait(2)
    go_on(world, "ann", "bob", "cid", plan=2)
    world.wait(INTERVAL)
    for name in ("bob", "cid"):
        world.say(name, mb.NODE_STATE_FAILED)
    world.join("dan")
    world.wait(3)
    assert world.kinds().count("plan.undecidable") == 1
    assert len(world.plans) == 2
    world.say("cid", mb.NODE_STATE_TRAINING)
    world.wait(1)
    assert world.members() == {"ann", "cid", "dan"}  # cid is needed
    world.say("cid", mb.NODE_STATE_FAILED)
    world.say("bob", mb.NODE_STATE_TRAINING)
    world.wait(world.policy.debounce_seconds + 0.4)
    assert world.members() == {"ann", "bob", "dan"}
    first, second = issued_at(world)[-2:]
    assert second - first < INTERVAL


def test_a_stage_without_another_route_is_replaced_at_once() -> None:
    world = RoutedWorld(policy=replace(QUICK, plan_interval_seconds=INTERVAL))
    world.begin(ann=6, bob=6)
    world.cards(cid=6)
    world.wait(2 * INTERVAL)
    (standby,) = world.plan.standbys
    version, lost = (
        world.plan.version,
        next(name for name in ("ann", "bob") if world.spans()[name] == world.spans()[world.name_of(standby)]),
    )
    world.state = replace(
        world.state,
        memory={RUN: replace(world.state.memory[RUN], plan_issued_at=world.now.monotonic)},  # the plan is new
    )
    world.take(bans.ban(world.state, world.now, lost, "lies"))
    world.wait(0.4)
    assert world.plan.version == version + 1
    assert standby in world.plan.stages


def test_an_order_of_the_operator_does_not_wait() -> None:
    world = spaced()
    world.join("cid")
    world.wait(2)
    world.join("dan")
    question = plan_apply.operator_question(world.state, world.now, RUN, world.policy)
    world.take(plan_apply.apply(world.state, world.now, RUN, question, Answer()))
    assert "dan" in world.members()
