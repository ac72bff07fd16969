"""Neighbour copies: stages with free memory hold a neighbour's layers, and take both spans when it is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.coordinator.routed import LAYERS, RoutedWorld, card
from unit.coordinator.test_prefetch import order, told
from unit.coordinator.world import ELIGIBLE_STATES, RUN

from atoll.coordinator.live import neighbour_copies, pinning
from atoll.coordinator.live.attendance import Attendance
from atoll.coordinator.live.neighbour_copies import NeighbourPair
from atoll.coordinator.live.plan_issue import round_seconds
from atoll.coordinator.runs import bans, departure, lifecycle
from atoll.coordinator.services import plan_views
from atoll.coordinator.state.draft import Draft
from atoll.coordinator.state.run_memory import PendingFetch
from atoll.core.plan import sign_plan
from atoll.v1 import membership_pb2 as mb

TRAINING = mb.NODE_STATE_TRAINING
THREE = ("ann", "bob", "cid")
MICRO_BATCHES = 16  # of a flush: with few of them, more stages are of little use


def train(world: RoutedWorld) -> None:
    """Stages say that they train, as they do when they stand on their route."""
    for peer in world.plan.stages:
        if peer in world.sessions:
            world.say(world.name_of(peer), TRAINING)


def thirds(*, fetches: bool = True, room: int = 8, round_tokens: int = 10**8) -> RoutedWorld:
    """One route of three equal stages; each has room for the layers of two."""
    world = RoutedWorld(fetches=fetches)
    for name in THREE:
        world.profiles[name] = card(room, slower=1000)
    world.create_run(min_nodes=3, micro_batches=MICRO_BATCHES, round_tokens=round_tokens, stop_tokens=10**12)
    world.join(*THREE)
    for place, name in enumerate(THREE):
        world.take(pinning.pin(world.state, world.now, name, (4 * place, 4 * place + 3)))
    world.wait(0.4)
    world.say(world.name_of(world.state.memory[RUN].genesis_writer), ELIGIBLE_STATES, genesis=world.genesis())
    world.wait(1)
    assert world.routes() == [list(THREE)]
    for name in THREE:
        world.take(pinning.unpin(world.state, world.now, name))
    train(world)
    return world


@pytest.fixture
def swarm() -> RoutedWorld:
    world = thirds()
    settle(world)
    return world


def settle(world: RoutedWorld) -> None:
    world.wait(world.policy.standby_seconds + 4)
    train(world)
    world.wait(1)


def copies(world: RoutedWorld) -> dict[str, str]:
    """Stage whose layers each holder has, by names."""
    return {
        world.name_of(pair.holder): world.name_of(pair.stage)
        for pair in neighbour_copies.complete_copies(world.state, world.plan)
    }


def lose(world: RoutedWorld, name: str, seconds: float = 2.0, says: str = "") -> None:
    """Its line breaks, and another stage misses it."""
    route = next(route for route in world.routes() if name in route)
    world.hang_up(name)
    world.wait(0.4)
    there = [it for it in reversed(route) if it != name and world.identities[it].peer_id in world.sessions]
    other = says or there[0]
    world.missing[other] = name
    world.say(other, TRAINING)
    world.wait(seconds)


# --- choice of copies ---------------------------------------------------------------------------------


def test_stages_with_room_come_to_have_their_neighbours_layers(swarm: RoutedWorld) -> None:
    assert swarm.plan.version == 1  # no plan says so
    assert copies(swarm) == {"bob": "ann", "ann": "bob"}
    assert told(swarm) == {"ann": range(8), "bob": range(8)}
    assert sorted(swarm.told("copy.wanted")) == [
        "ann fetches a second copy of layers 4–7 of bob",
        "bob fetches a second copy of layers 0–3 of ann",
    ]
    sealed = swarm.state.live[swarm.identities["ann"].peer_id]
    assert sealed.status.prepared.last == 7


def test_a_plan_shows_them(swarm: RoutedWorld) -> None:
    sealed = sign_plan(swarm.operator, swarm.plan)
    view = plan_views.plan_view(swarm.state, sealed, None, swarm.policy.preferences)
    shown = {node.name: (span.first, span.last) for node in view.nodes for span in node.copies}
    assert shown == {"ann": (4, 7), "bob": (0, 3)}


def test_a_copy_counts_once_it_is_complete() -> None:
    world = thirds(fetches=False)
    settle(world)
    assert told(world).keys() == {"ann", "bob"}
    assert copies(world) == {}
    lose(world, "ann", seconds=5)
    assert "ann" in world.spans()  # else its layers were lost, which it may bring back
    world.fetch_told()
    world.wait(0.4)
    assert world.spans()["bob"] == (0, 7)


@given(st.lists(st.integers(2, 9), max_size=4), st.data())
def test_copies_are_distributed(lengths: list[int], data: st.DataObject) -> None:
    """Each stage has one at most, and is copied once at most; no pair that could have one is left without."""
    routes = [[f"{number}-{place}" for place in range(length)] for number, length in enumerate(lengths)]
    every = [pair for route in routes for pair in pairs_along(route)]
    able = [pair for pair in every if data.draw(st.booleans())]
    found = neighbour_copies.choose_copies(able)
    assert all(pair.holder == holder for holder, pair in found.items())
    copied = [pair.stage for pair in found.values()]
    assert len(set(copied)) == len(copied)
    assert all(pair.holder in found or pair.stage in copied for pair in able)


@given(st.integers(1, 12))
def test_no_stage_of_an_even_route_is_left_without(half: int) -> None:
    route = [str(place) for place in range(2 * half)]
    assert {pair.stage for pair in neighbour_copies.choose_copies(pairs_along(route)).values()} == set(route)


def pairs_along(route: list[str]) -> list[NeighbourPair]:
    """Pairs of neighbours on a route whose stages hold one layer each."""
    spans = {peer: range(place, place + 1) for place, peer in enumerate(route)}
    places = [(place, near) for place in range(len(route)) for near in (place - 1, place + 1) if 0 <= near < len(route)]
    return [NeighbourPair(route[near], route[place], spans[route[near]], spans[route[place]]) for place, near in places]


def test_without_memory_for_both_spans_there_is_no_copy() -> None:
    world = thirds(room=7)
    settle(world)
    assert told(world) == {}


def test_there_is_no_copy_where_the_run_spec_says_so() -> None:
    world = thirds()
    memory = world.state.memory[RUN]
    spec = memory.spec.model_copy(update={"pipeline": memory.spec.pipeline.model_copy(update={"second_copies": False})})
    world.state = replace(world.state, memory={RUN: replace(memory, spec=spec)})
    settle(world)
    assert told(world) == {}


def test_a_node_pinned_to_its_layers_has_no_copy() -> None:
    world = thirds()
    for name in ("ann", "bob"):
        world.take(pinning.pin(world.state, world.now, name, world.spans()[name]))
    settle(world)
    assert told(world) == {"cid": range(4, 12)}  # bob's are the only ones that another may take


@pytest.mark.parametrize(("uplink", "has"), [(1.1, True), (0.9, False)])  # of what a copy needs
@pytest.mark.parametrize("whose", ["ann", "bob"])
def test_a_pair_whose_link_would_carry_little_else_has_no_copy(whose: str, uplink: float, has: bool) -> None:
    world = thirds(round_tokens=5000)
    seconds = round_seconds(world.state.memory[RUN])
    assert 10 < seconds < 1000
    for name in THREE:
        world.uplinks[name] = 1e8
    world.uplinks[whose] = uplink * 8 * 4e6 / (0.25 * seconds)
    train(world)
    settle(world)
    assert (copies(world).get("ann") == "bob") is has


def test_a_node_that_reports_no_room_is_not_asked_again_soon() -> None:
    world = thirds(fetches=False)
    settle(world)
    assert told(world).keys() == {"ann", "bob"}
    world.refusing |= {"ann": told(world)["ann"]}
    world.say("ann", TRAINING)
    world.wait(30)
    assert "ann" not in told(world)
    assert told(world)["cid"] == range(4, 12)  # for bob's layers


def test_a_node_that_fetches_for_too_long_is_not_asked_again_soon() -> None:
    world = thirds(fetches=False)
    settle(world)
    world.wait(world.policy.prepare_seconds + 200)
    train(world)
    world.wait(20)
    assert told(world) == {}


def test_a_stage_with_a_standby_has_no_copy(swarm: RoutedWorld) -> None:
    swarm.profiles["dan"] = card(5, slower=10**6)  # so that it gets nobody's place
    swarm.join("dan")
    settle(swarm)
    settle(swarm)
    (standby,) = swarm.plan.standbys
    assert swarm.name_of(standby) == "dan"
    same = next(name for name in THREE if swarm.spans()[name] == swarm.spans()["dan"])
    assert copies(swarm)
    assert same not in copies(swarm).values()


def test_copies_end_with_a_pause_of_the_run(swarm: RoutedWorld) -> None:
    swarm.take(lifecycle.pause(swarm.state, swarm.now, RUN))
    assert told(swarm) == {}


# --- a stage is gone ----------------------------------------------------------------------------------


def test_the_holder_of_a_copy_takes_both_spans(swarm: RoutedWorld) -> None:
    swarm.answers = False  # nobody has to be asked
    lose(swarm, "ann", seconds=1.2)
    assert swarm.routes() == [["bob", "cid"]]
    assert swarm.spans() == {"bob": (0, 7), "cid": (8, 11)}
    assert swarm.plan.reason == "bob takes over the layers of ann beside its own"
    assert swarm.plan.drivers == (swarm.identities["bob"].peer_id,)
    assert swarm.plan.former == (swarm.identities["ann"].peer_id,)
    assert told(swarm) == {}  # and what they had fetched is not dropped for other layers


def test_a_banned_stage_is_replaced_at_once(swarm: RoutedWorld) -> None:
    swarm.answers = False
    swarm.take(bans.ban(swarm.state, swarm.now, "bob", "lies"))
    swarm.wait(0.4)
    assert swarm.spans() == {"ann": (0, 7), "cid": (8, 11)}


def test_a_lost_stream_alone_causes_no_take_over(swarm: RoutedWorld) -> None:
    swarm.hang_up("ann")
    swarm.wait(5)
    assert swarm.plan.version == 1


def test_a_stage_that_was_started_again_is_waited_for(swarm: RoutedWorld) -> None:
    swarm.hang_up("ann")
    swarm.connect("ann", mb.NODE_STATE_JOINING)
    swarm.wait(10)
    assert swarm.plan.version == 1


def test_a_stage_without_a_copy_is_lost_after_the_usual_time(swarm: RoutedWorld) -> None:
    lose(swarm, "cid", seconds=5)
    assert swarm.plan.version == 1
    swarm.wait(swarm.policy.lost_after_seconds)
    assert "cid" not in swarm.spans()


def test_two_stages_with_each_others_copy_do_not_both_take_over(swarm: RoutedWorld) -> None:
    swarm.answers = False
    swarm.take(bans.ban(swarm.state, swarm.now, "ann", "lies"))
    swarm.take(bans.ban(swarm.state, swarm.now, "bob", "lies"))
    swarm.wait(5)
    for plan in swarm.plans:
        for route in plan.routes:
            assert {layer for peer in route for layer in plan.span(peer)} == set(range(LAYERS))


@pytest.mark.parametrize(("round_now", "shown"), [(1, True), (2, True), (3, False)])
def test_a_copy_that_is_behind_waits_for_its_stage(swarm: RoutedWorld, round_now: int, shown: bool) -> None:
    """It has what nobody else has; once it counts as lost, what is nearly the newest is the best that there is."""
    swarm.answers = False
    run = swarm.state.runs[RUN]
    swarm.state = replace(swarm.state, runs={RUN: replace(run, head_round=round_now)})
    assert ("bob" in copies(swarm)) is shown
    lose(swarm, "ann", seconds=5)
    assert "ann" in swarm.spans()
    swarm.wait(swarm.policy.lost_after_seconds)
    assert ("ann" not in swarm.spans()) is shown


def test_a_holder_that_reconnects_keeps_its_copy(swarm: RoutedWorld) -> None:
    swarm.wait(300)  # longer than it may take to fetch
    swarm.hang_up("bob")
    swarm.wait(5)  # more than one look at who has what
    swarm.connect("bob", TRAINING)
    swarm.say("bob", TRAINING)
    swarm.wait(3)
    assert copies(swarm)["bob"] == "ann"
    assert swarm.state.memory[RUN].fetch_timeouts == {}


def test_a_stage_that_drains_still_hands_its_layers_over_when_another_is_gone() -> None:
    world = thirds(fetches=False)
    settle(world)
    world.fetch_told()
    assert copies(world)["bob"] == "ann"
    world.take(departure.drain(world.state, world.now, "cid"))
    world.wait(4)
    assert world.state.memory[RUN].preparation is not None
    world.answers = False
    lose(world, "ann", seconds=1.5, says="bob")
    assert "ann" not in world.spans()
    assert order(world, "cid") != mb.ORDER_DRAIN  # nobody has its layers yet
    world.wait(5)
    assert order(world, "cid") != mb.ORDER_DRAIN


def test_a_lost_stage_ends_the_preparation_that_its_copy_is_set_aside_for() -> None:
    """The copy that it set aside is needed again, and complete."""
    world = thirds(fetches=False)
    settle(world)
    world.fetch_told()
    world.wait(1)
    assert copies(world)["bob"] == "ann"
    world.take(departure.drain(world.state, world.now, "cid"))
    world.wait(4)
    memory = world.state.memory[RUN]
    assert memory.preparation is not None
    assert world.identities["bob"].peer_id in memory.preparation.spans
    world.fetch_told()
    assert "bob" not in copies(world)
    world.answers = False
    lose(world, "ann", seconds=1.5, says="bob")
    assert world.state.memory[RUN].preparation is None
    assert told(world)["bob"] == range(8)
    world.fetch_told()
    world.wait(0.4)
    assert world.spans()["bob"] == (0, 7)


def test_a_copy_outlives_its_stage(swarm: RoutedWorld) -> None:
    """It may be the last, where no plan is possible at once."""
    bob, cid = (swarm.identities[name].peer_id for name in ("bob", "cid"))
    swarm.wait(5)
    draft = Draft(swarm.state, swarm.now)
    draft.remember(RUN, copies_checked_at=None)
    neighbour_copies.update_copies(
        draft, RUN, swarm.policy, Attendance(eligible=tuple(sorted((bob, cid))), awaited=(), finishing=())
    )
    assert draft.state.memory[RUN].copy_fetches[bob].span == range(8)


def test_long_preparations_make_no_copy_late() -> None:
    world = thirds(fetches=False)
    settle(world)
    world.fetch_told()
    world.wait(1)
    world.take(departure.drain(world.state, world.now, "cid"))
    world.wait(4)
    world.answers = False
    for _ in range(10):
        memory = world.state.memory[RUN]
        assert memory.preparation is not None
        held = replace(memory.preparation, since=world.now.monotonic)  # as if another began
        world.state = replace(world.state, memory={RUN: replace(memory, preparation=held)})
        world.wait(20)
    memory = world.state.memory[RUN]
    world.state = replace(world.state, memory={RUN: replace(memory, preparation=None)})
    world.wait(3)
    assert world.state.memory[RUN].fetch_timeouts == {}


def test_another_stage_that_is_gone_is_not_waited_for(swarm: RoutedWorld) -> None:
    swarm.answers = False
    lose(swarm, "ann", seconds=1.2)
    swarm.take(bans.ban(swarm.state, swarm.now, "cid", "lies"))
    swarm.wait(swarm.policy.debounce_seconds + 1)
    assert swarm.state.memory[RUN].question is not None


def test_a_fetching_standby_takes_no_copy_away(swarm: RoutedWorld) -> None:
    swarm.fetches = False
    swarm.profiles["dan"] = card(5, slower=10**6)
    swarm.join("dan")
    swarm.wait(swarm.policy.standby_seconds + 5)
    assert "dan" in told(swarm)
    assert copies(swarm) == {"ann": "bob", "bob": "ann"}


def test_a_copy_whose_link_turns_out_slow_is_given_up() -> None:
    world = thirds(round_tokens=5000)
    settle(world)
    assert copies(world)["ann"] == "bob"
    world.answers = False  # who cares for routes now
    seconds = round_seconds(world.state.memory[RUN])
    world.uplinks["bob"] = 8 * 4e6 / (0.5 * seconds)
    train(world)
    world.wait(5)
    assert "ann" not in copies(world)


def test_an_unconfirmed_take_over_happens_once_a_minute_at_most(swarm: RoutedWorld) -> None:
    """It may have fetched nothing, and say both: that it has the layers, and that it cannot reach their stage."""
    swarm.answers = False
    lose(swarm, "ann", seconds=1.5, says="bob")
    assert "ann" not in swarm.spans()
    memory = swarm.state.memory[RUN]
    bob = swarm.identities["bob"].peer_id
    swarm.state = replace(
        swarm.state, memory={RUN: replace(memory, plan=swarm.plans[0], copy_fetches={bob: PendingFetch(range(8), 0.0)})}
    )
    swarm.connect("ann", TRAINING)
    swarm.wait(1)
    version = swarm.state.memory[RUN].plan.version  # type: ignore[union-attr]
    lose_again(swarm)
    assert swarm.state.memory[RUN].plan.version == version  # type: ignore[union-attr]


def lose_again(world: RoutedWorld) -> None:
    world.hang_up("ann")
    world.wait(0.4)
    world.say("bob", TRAINING)
    world.wait(5)


@pytest.mark.parametrize("change", ["pinned", "smaller"])
def test_a_holder_that_may_not_hold_both_spans_any_more_takes_nothing(swarm: RoutedWorld, change: str) -> None:
    swarm.answers = False
    if change == "pinned":
        swarm.take(pinning.pin(swarm.state, swarm.now, "bob", (4, 7)))
    else:
        swarm.profiles["bob"] = card(4)
        swarm.say("bob", TRAINING)
    lose(swarm, "ann", seconds=5)
    assert swarm.plan.version == 1


def test_two_stages_without_room_for_all_layers_have_no_copies(swarm: RoutedWorld) -> None:
    lose(swarm, "ann", seconds=1.2)
    settle(swarm)
    assert len(swarm.routes()[0]) == 2
    assert told(swarm) == {}


def test_the_route_works_again_before_a_better_one_is_looked_for(swarm: RoutedWorld) -> None:
    lose(swarm, "ann", seconds=1.2)
    asked = len(swarm.asked)
    swarm.wait(16)
    assert len(swarm.asked) == asked
    swarm.wait(8)
    assert len(swarm.asked) > asked
