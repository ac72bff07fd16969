"""Members that rest leave after a last round, and no plan is issued under which nobody can decide."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.coordinator.routed import RoutedWorld
from unit.coordinator.test_recovery import go_on
from unit.coordinator.world import RUN, World

from atoll.coordinator.live.attendance import REST_SECONDS
from atoll.coordinator.runs import bans, recovery
from atoll.coordinator.state import deciding
from atoll.coordinator.state.draft import Step
from atoll.coordinator.state.snapshot import Policy
from atoll.coordinator.store.records import Event
from atoll.core.plan import Plan
from atoll.core.quorum import Electorate
from atoll.v1 import membership_pb2 as mb

FOUR = ("ann", "bob", "cyd", "dan")
LONGEST_REST = max(REST_SECONDS, 2 * 60.0)  # two longest rounds


class GuardedWorld(World):
    """Every plan is checked as it is issued: its members can decide the round after the newest known one."""

    def take(self, step: Step[object]) -> object:
        for plan in step.plans:
            self.check(plan, step)
        return super().take(step)

    def check(self, plan: Plan, step: Step[object]) -> None:
        electorate = deciding.next_electorate(step.state, RUN)
        assert electorate is not None
        assert deciding.decides(step.state, RUN, electorate, plan.members)


def trains(*names: str, policy: Policy | None = None, **spec: int) -> GuardedWorld:
    """These nodes train, and have committed a round."""
    world = GuardedWorld(policy=policy or Policy())
    world.train(*names, stop_tokens=10**9, **spec)
    go_on(world, *names)
    world.wait(world.policy.plan_interval_seconds)
    return world


def rest(world: World, *names: str) -> None:
    for name in names:
        world.say(name, mb.NODE_STATE_PAUSED)


def standing(world: World) -> set[str]:
    return {world.name_of(peer) for peer in world.plans[-1].standbys}


# --- the last round -----------------------------------------------------------------------------------


def test_a_member_that_rests_stays_in_the_plan_until_a_round_does_not_name_it() -> None:
    world = trains(*FOUR)
    rest(world, "dan")
    world.wait(LONGEST_REST / 2)
    assert world.members() == set(FOUR)
    go_on(world, *FOUR)  # it was under way, and counts dan among the voters
    rest(world, "dan")
    world.wait(3)
    assert world.members() == set(FOUR)
    go_on(world, "ann", "bob", "cyd")  # dan took part, and said that it leaves
    world.wait(3)
    assert world.members() == {"ann", "bob", "cyd"}
    assert world.plans[-1].reason == "dan is paused"


def test_a_member_that_rests_stays_for_a_round_of_each_fragment() -> None:
    world = GuardedWorld(policy=Policy())
    world.train(*FOUR, stop_tokens=10**9, fragments=2)
    world.wait(world.policy.plan_interval_seconds)
    rest(world, "dan")
    for round_number in (1, 2):
        assert world.members() == set(FOUR), round_number
        go_on(world, *FOUR[:3], fragments=2)
        world.wait(3)
    assert world.members() == {"ann", "bob", "cyd"}


def test_a_member_whose_last_round_does_not_come_leaves_after_a_deadline() -> None:
    world = trains(*FOUR)
    rest(world, "dan")
    world.wait(LONGEST_REST - 1)
    assert world.members() == set(FOUR)
    world.wait(3)
    assert world.members() == {"ann", "bob", "cyd"}  # three of four decide


def test_a_member_that_trains_again_in_time_changes_no_plan() -> None:
    world = trains(*FOUR)
    rest(world, "dan")
    world.wait(20)
    world.say("dan")
    world.wait(LONGEST_REST)
    assert len(world.plans) == 1


def test_a_member_that_rests_and_dies_leaves_once_it_is_lost() -> None:
    world = trains(*FOUR)
    rest(world, "dan")
    world.hang_up("dan")
    world.wait(world.policy.lost_after_seconds + 3)
    assert world.members() == {"ann", "bob", "cyd"}


# --- who decides ---------------------------------------------------------------------------------------


def test_three_of_four_that_rest_still_vote() -> None:
    """Three owners' hours end. Before, one member was left that could never decide."""
    world = trains(*FOUR)
    rest(world, "bob", "cyd", "dan")
    world.wait(LONGEST_REST + 3)
    assert (world.members(), standing(world)) == (set(FOUR), {"bob", "cyd", "dan"})
    kept = [item for item in world.plans[-1].assignments if item.peer_id in world.plans[-1].standbys]
    assert all(item.max_round_tokens == item.max_reduce_bytes_per_second == 0 for item in kept)
    assert "bob, cyd, dan only vote" in world.plans[-1].reason
    world.wait(3600)
    assert len(world.plans) == 2
    go_on(world, "ann", plan=2, signers=[world.identities[name] for name in FOUR])  # the others said that they leave
    rest(world, "bob", "cyd", "dan")
    world.wait(3)
    assert world.members() == {"ann"}


def test_a_voter_that_is_kept_trains_again_when_its_owner_wishes() -> None:
    world = trains(*FOUR)
    rest(world, "bob", "cyd", "dan")
    world.wait(LONGEST_REST + 3)
    world.say("bob")
    world.wait(world.policy.plan_interval_seconds)
    assert (world.members(), standing(world)) == ({"ann", "bob"}, set())  # half of four, and the coordinator's vote
    assert "bob trains again" in world.plans[-1].reason


def test_a_plan_that_cannot_decide_waits_and_one_event_says_what_is_missing() -> None:
    world = trains(*FOUR)
    for name in ("bob", "cyd", "dan"):
        world.hang_up(name)
    world.wait(world.policy.lost_after_seconds)
    world.join("eve")
    world.wait(3600)
    assert world.members() == set(FOUR)
    (told,) = [item for item in world.records if isinstance(item, Event) and item.kind == "plan.undecidable"]
    assert "bob, cyd, dan" in told.message
    assert "atollctl run recover" in told.message
    world.connect("bob", mb.NODE_STATE_TRAINING)  # with ann half of them, and the coordinator breaks ties
    world.wait(3)
    assert world.members() == {"ann", "bob", "eve"}
    assert world.state.memory[RUN].undecidable_reason == ""


def test_a_recovery_goes_on_without_those_that_are_lost() -> None:
    world = trains(*FOUR)
    for name in ("bob", "cyd", "dan"):
        world.hang_up(name)
    world.wait(60)
    World.take(world, recovery.recover(world.state, world.now, RUN))
    assert world.members() == {"ann"}


def test_a_stage_that_rests_is_replaced_at_once_and_still_votes() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    world.cards(cid=6)
    world.wait(world.policy.standby_seconds + 2)
    (standby,) = world.plan.standbys
    name = next(name for name in ("ann", "bob") if world.spans()[name] == world.spans()[world.name_of(standby)])
    other = "bob" if name == "ann" else "ann"
    span = world.spans()[name]
    world.say(name, mb.NODE_STATE_PAUSED)
    world.say(other, mb.NODE_STATE_PAUSED)
    world.wait(3)
    assert standby in world.plan.stages or world.plan.version == 2  # nobody has the other's layers
    world.say(other)
    world.wait(3)
    assert standby in world.plan.stages
    assert name not in {world.name_of(peer) for peer in world.plan.stages}
    assert world.spans().get(name, span) == span


# --- in any order ---------------------------------------------------------------------------------------

NAMES = ("ann", "bob", "cyd", "dan", "eve", "fay")
THINGS = ("join", "rest", "die", "return", "ban", "fail", "round", "wait")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(THINGS), st.sampled_from(NAMES), st.floats(0.2, 30)), max_size=25))
def test_every_plan_can_decide_or_an_event_says_why_there_is_none(things: list[tuple[str, str, float]]) -> None:
    world = trains("ann", "bob", "cyd", policy=Policy(lost_after_seconds=5.0))
    for thing, name, seconds in things:
        happen(world, thing, name)
        world.wait(seconds)
    world.wait(LONGEST_REST + 30)
    state, plan = world.state, world.plans[-1]
    electorate = deciding.next_electorate(state, RUN)
    assert electorate is not None
    able = {peer for peer in plan.members if deciding.can_vote(state, RUN, peer)}
    trainers = {peer for peer, live in state.live.items() if live.status.state == mb.NODE_STATE_TRAINING}
    trainers &= {peer for peer in trainers if deciding.can_vote(state, RUN, peer)}
    if deciding.decides(state, RUN, electorate, able):
        assert not trainers or trainers == plan.stages
    elif trainers and trainers != plan.stages:
        assert "plan.undecidable" in world.kinds()
        assert state.memory[RUN].undecidable_reason
    gaps = [later.issued_unix_ms - earlier.issued_unix_ms for earlier, later in pairwise(world.plans)]
    assert all(gap >= 900 * world.policy.debounce_seconds for gap in gaps)  # the wall clock counts whole milliseconds


def happen(world: World, thing: str, name: str) -> None:
    """One of `THINGS`, where it is possible."""
    identity = world.identities.get(name)
    banned = identity is not None and world.state.nodes[identity.peer_id].banned
    here = identity is not None and identity.peer_id in world.sessions
    if thing == "join" and identity is None:
        world.join(name)
        world.say(name)
    elif thing == "return" and identity is not None and not banned:
        if not here:
            world.connect(name, mb.NODE_STATE_TRAINING)
        world.say(name)
    elif thing == "rest" and here and not banned:
        rest(world, name)
    elif thing == "fail" and here and not banned:
        world.say(name, mb.NODE_STATE_FAILED)
    elif thing == "die" and here:
        world.hang_up(name)
    elif thing == "ban" and here and not banned:
        world.take(bans.ban(world.state, world.now, name, "lies"))
        world.hang_up(name)
    elif thing == "round":
        commit(world)


def commit(world: World) -> None:
    """A round of all planned members that are there; those that rest say that they leave."""
    state, plan = world.state, world.plans[-1]
    there = [peer for peer in plan.members if deciding.can_vote(state, RUN, peer)]
    electorate = deciding.next_electorate(state, RUN)
    assert electorate is not None
    present = [peer for peer in there if state.live[peer].status.state == mb.NODE_STATE_TRAINING]
    if present and electorate.decides(set(there)):
        signers = [world.identities[world.name_of(peer)] for peer in there]
        go_on(world, *(world.name_of(peer) for peer in present), plan=plan.version, signers=signers)


def test_the_coordinator_counts_where_it_is_one_of_the_electorate() -> None:
    world = trains("ann", "bob")
    electorate = Electorate(frozenset({deciding.COORDINATOR, "x", "y"}))
    assert deciding.decides(world.state, RUN, electorate, {"x"})
    assert not deciding.decides(world.state, RUN, electorate, set())
    world.put(replace(world.run, plan_floor=1))  # restored from a backup: it has forgotten votes
    assert not deciding.decides(world.state, RUN, electorate, {"x"})
