"""Standbys: nodes without a place on a route hold a stage's layers, and take its place when it is gone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.coordinator.routed import RoutedWorld, card
from unit.coordinator.test_prefetch import order, told
from unit.coordinator.test_recovery_of_routes import go_on
from unit.coordinator.world import ELIGIBLE_STATES, RUN

from atoll.coordinator.live import pinning
from atoll.coordinator.live.span_fit import span_memory_of
from atoll.coordinator.runs import bans, departure, recovery
from atoll.coordinator.services import plan_views
from atoll.v1 import membership_pb2 as mb


@pytest.fixture
def trio() -> RoutedWorld:
    """Two halves make the only route; a third node stands by."""
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    world.cards(cid=6)
    world.wait(world.policy.standby_seconds + 2)
    return world


def standing(world: RoutedWorld) -> dict[str, tuple[int, int]]:
    """Spans of the standbys, by name."""
    return {world.name_of(peer): world.spans()[world.name_of(peer)] for peer in world.plan.standbys}


def whose_place(world: RoutedWorld) -> str:
    """Name of the stage with the standby's layers."""
    (span,) = standing(world).values()
    return next(name for name in ("ann", "bob") if world.spans()[name] == span)


def driver_of(world: RoutedWorld) -> str:
    return world.routes()[0][0]


def whose_route(world: RoutedWorld, since: int) -> list[str]:
    """The route that began under that plan."""
    return next(route for number, route in enumerate(world.routes()) if world.plan.name_of(number)[0] == since)


# --- choice of standbys -------------------------------------------------------------------------------


def test_a_spare_comes_to_hold_the_layers_of_a_stage(trio: RoutedWorld) -> None:
    assert standing(trio).keys() == {"cid"}
    assert whose_place(trio) in trio.routes()[0]
    assert [len(route) for route in trio.routes()] == [2]
    assert trio.plan.drivers == (trio.identities[driver_of(trio)].peer_id,)
    assert [bool(item.data_ranges) for item in trio.plan.assignments].count(True) == 1
    assert "cid stands by with layers" in trio.plan.reason
    assert trio.state.memory[RUN].left_out == {}
    view = plan_views.plan_fields(trio.state, trio.state.nodes[trio.identities["cid"].peer_id])
    assert (view.route, (view.span.first, view.span.last)) == (0, trio.spans()["cid"])


def test_routes_that_a_plan_leaves_as_they_are_keep_their_names(trio: RoutedWorld) -> None:
    assert trio.plan.version == 2
    assert trio.plan.name_of(0) == (1, 0)
    trio.cards(dan=6)
    trio.wait(4)
    assert len(trio.routes()) == 2
    version = trio.plan.version
    assert {trio.plan.name_of(0)[0], trio.plan.name_of(1)[0]} == {1, version}
    assert {trio.plan.name_of(0), trio.plan.name_of(1)} == {(1, 0), (version, 1)}
    assert trio.plan.routes_begun == 2
    lost = whose_route(trio, since=1)[1]
    trio.take(bans.ban(trio.state, trio.now, lost, "lies"))
    trio.cards(eve=6)
    trio.wait(6)
    assert (1, 0) not in [trio.plan.name_of(number) for number in range(len(trio.routes()))]
    names = [trio.plan.name_of(number) for number in range(len(trio.routes()))]
    assert (version, 1) in names
    assert trio.plan.routes_begun == 1 + max(number for _, number in names)


def test_a_standby_fetches_its_layers_before_it_is_a_member() -> None:
    world = RoutedWorld(fetches=False)
    world.begin(ann=6, bob=6)
    world.cards(cid=6)
    world.wait(40)
    assert world.plan.version == 1
    (span,) = told(world).values()
    world.fetch_told()
    world.wait(1)
    assert standing(world) == {"cid": (span.start, span.stop - 1)}
    assert told(world) == {}


def test_a_node_too_slow_to_stand_by_may_still_repair_a_route() -> None:
    world = RoutedWorld(fetches=False)
    world.begin(ann=6, bob=6)
    world.cards(cid=6)
    world.wait(10)
    assert told(world)
    world.wait(world.policy.prepare_seconds + 100)
    assert told(world) == {}
    assert world.plan.version == 1
    lost = driver_of(world)
    world.hang_up(lost)
    world.wait(world.policy.lost_after_seconds + 5)
    assert "cid" in world.spans()
    assert lost not in world.spans()


def test_a_node_without_room_to_stand_by_is_replaced_by_another() -> None:
    world = RoutedWorld(fetches=False)
    world.begin(ann=6, bob=6)
    world.cards(cid=6)
    world.wait(10)
    world.refusing |= told(world)
    world.say("cid", mb.NODE_STATE_CATCHING_UP)
    world.wait(1)
    assert told(world) == {}
    world.cards(dan=12)
    world.wait(40)
    world.fetch_told()
    world.wait(1)
    assert "cid" not in {*world.spans(), *standing(world)}
    assert "dan" in {*world.spans(), *standing(world)}


def test_a_fetching_node_is_not_displaced_by_a_later_one() -> None:
    world = RoutedWorld(fetches=False)
    world.begin(ann=6, bob=6)
    for name in ("ann", "bob"):
        world.take(pinning.pin(world.state, world.now, name, world.spans()[name]))
    world.cards(cid=8)
    world.wait(5)
    (span,) = told(world).values()
    world.cards(dan=6)  # a smaller card, which would be preferred
    for name in ("cid", "dan"):
        world.take(pinning.pin(world.state, world.now, name, (span.start, span.stop - 1)))
    world.wait(5)
    assert told(world) == {"cid": span}


def test_a_node_that_leaves_and_returns_stands_by_later_each_time(trio: RoutedWorld) -> None:
    began = trio.plan.version
    for _ in range(40):
        for _ in range(20):  # until it stands by
            trio.wait(1)
            if standing(trio):
                break
        trio.say("cid", mb.NODE_STATE_PAUSED)
        trio.wait(3)
        trio.say("cid", ELIGIBLE_STATES)
    assert trio.plan.version - began < 16


def test_a_standby_may_claim_nothing_and_reduces_nothing(trio: RoutedWorld) -> None:
    for item in trio.plan.assignments:
        stands = item.peer_id in trio.plan.standbys
        assert (item.max_round_tokens == 0) is stands
        assert (item.max_reduce_bytes_per_second == 0) is stands


def test_layers_with_fewer_holders_come_first() -> None:
    """Routes of two and of three stages: the middle one's layers are the only ones that nobody else holds together."""
    world = RoutedWorld()
    world.begin(ann=6, bob=6, cleo=4, dora=4, eve=4)
    assert sorted(map(len, world.routes())) == [2, 3]
    middle = next(route for route in world.routes() if len(route) == 3)[1]
    world.cards(spare=4)
    world.wait(world.policy.standby_seconds + 2)
    assert standing(world) == {"spare": world.spans()[middle]}


def test_each_span_has_at_most_one_standby(trio: RoutedWorld) -> None:
    """The second comer would suit the same layers, but can be part of no route."""
    place = trio.spans()["cid"]
    for name in ("ann", "bob", "cid"):
        trio.take(pinning.pin(trio.state, trio.now, name, trio.spans()[name]))
    trio.cards(dan=6)
    trio.take(pinning.pin(trio.state, trio.now, "dan", place))
    trio.wait(60)
    assert standing(trio) == {"cid": place}


def test_a_node_without_memory_for_any_stage_does_not_stand_by() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    world.cards(tiny=2)
    world.wait(60)
    assert standing(world) == {}
    assert told(world) == {}


@pytest.mark.parametrize(("uplink", "stands"), [(1.5, True), (0.5, False)])  # of what their averages need
def test_a_node_whose_link_would_delay_rounds_does_not_stand_by(uplink: float, stands: bool) -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    memory, model = world.state.memory[RUN], span_memory_of(world.state, RUN)
    assert memory.figures is not None
    assert model is not None
    seconds = model.training.round_tokens / memory.figures.predicted_tokens_per_second
    world.uplinks["cid"] = uplink * 6e6 * model.training.outer_bytes_per_parameter / seconds
    world.cards(cid=6)
    world.wait(60)
    assert bool(standing(world)) is stands


def test_a_node_pinned_to_other_layers_does_not_stand_by() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    for name in ("ann", "bob"):
        world.take(pinning.pin(world.state, world.now, name, world.spans()[name]))
    world.cards(cid=6)
    world.take(pinning.pin(world.state, world.now, "cid", (3, 8)))
    world.wait(60)
    assert standing(world) == {}
    assert world.routes()[0] in (["ann", "bob"], ["bob", "ann"])


@pytest.mark.parametrize("change", ["pinned", "smaller"])
def test_a_standby_that_may_not_hold_its_layers_any_more_ends(trio: RoutedWorld, change: str) -> None:
    lost = whose_place(trio)
    for name in ("ann", "bob"):
        trio.take(pinning.pin(trio.state, trio.now, name, trio.spans()[name]))
    if change == "pinned":
        trio.take(pinning.pin(trio.state, trio.now, "cid", (3, 8)))
    else:
        trio.profiles["cid"] = card(3)
        trio.say("cid", ELIGIBLE_STATES)
    trio.hang_up(lost)
    trio.wait(trio.policy.lost_after_seconds + 4)
    assert trio.spans().get("cid") is None


# --- a stage is gone ----------------------------------------------------------------------------------


def test_a_stage_that_neighbours_miss_is_replaced_at_once(trio: RoutedWorld) -> None:
    lost = whose_place(trio)
    other = next(name for name in ("ann", "bob") if name != lost)
    span, version = trio.spans()[lost], trio.plan.version
    trio.hang_up(lost)
    trio.wait(5)
    assert trio.plan.version == version  # its line to the coordinator broke, and that may be all
    trio.missing[other] = "cid"  # not the one that is silent
    trio.say(other)
    trio.wait(2)
    assert trio.plan.version == version
    trio.missing[other] = lost
    trio.say(other)
    trio.wait(0.4)
    assert trio.plan.version == version + 1
    assert trio.plan.former == (trio.identities[lost].peer_id,)  # if it lives, it is asked for what it has
    assert trio.spans()["cid"] == span
    assert "cid" in trio.routes()[0]
    assert lost not in trio.spans()
    assert trio.plan.reason == f"cid takes the place of {lost}"


def test_a_lost_stream_alone_does_not_replace_a_stage(trio: RoutedWorld) -> None:
    lost, version = whose_place(trio), trio.plan.version
    trio.hang_up(lost)
    trio.wait(trio.policy.lost_after_seconds - 1)
    assert trio.plan.version == version
    trio.wait(2)
    assert "cid" in trio.routes()[0]


def test_a_stage_that_was_started_again_is_replaced_and_stands_by(trio: RoutedWorld) -> None:
    lost = whose_place(trio)
    span = trio.spans()[lost]
    trio.hang_up(lost)
    trio.wait(5)
    trio.connect(lost, mb.NODE_STATE_JOINING)
    trio.wait(0.4)
    assert "cid" in trio.routes()[0]
    assert lost not in trio.spans()
    trio.say(lost, ELIGIBLE_STATES)
    trio.wait(trio.policy.standby_seconds + 40)
    assert standing(trio) == {lost: span}


@pytest.mark.parametrize("lacks", ["rounds", "layers", "state"])
def test_a_standby_that_is_behind_gets_no_place(trio: RoutedWorld, lacks: str) -> None:
    lost = whose_place(trio)
    run = trio.state.runs[RUN]
    trio.state = replace(trio.state, runs={RUN: replace(run, head_round=12)})
    trio.heads["cid"] = (5 if lacks == "rounds" else 12, b"h" * 32)
    trio.lost["cid"] = [0] if lacks == "layers" else []
    trio.say("cid", mb.NODE_STATE_CATCHING_UP if lacks == "state" else ELIGIBLE_STATES)
    trio.hang_up(lost)
    trio.connect(lost, mb.NODE_STATE_JOINING)
    trio.wait(3)
    assert lost in trio.spans()
    trio.heads["cid"], trio.lost["cid"] = (11, b"h" * 32), []
    trio.say("cid", ELIGIBLE_STATES)
    trio.wait(0.4)
    assert "cid" in trio.routes()[0]


def test_after_a_coordinator_restart_a_stage_that_has_not_called_yet_keeps_its_place(trio: RoutedWorld) -> None:
    lost = whose_place(trio)
    other = next(name for name in ("ann", "bob") if name != lost)
    version = trio.plan.version
    trio.restart()
    trio.missing[other] = lost
    for name in (other, "cid"):
        trio.connect(name, mb.NODE_STATE_TRAINING)
    trio.wait(10)
    assert trio.plan.version == version


def test_a_recovery_keeps_standbys(trio: RoutedWorld) -> None:
    for _ in range(3):
        go_on(trio)
    trio.heads["cid"] = trio.heads["ann"]
    trio.say("cid", ELIGIBLE_STATES)
    before = standing(trio)
    trio.take(recovery.recover(trio.state, trio.now, RUN, force=True))
    assert standing(trio) == before
    assert trio.plan.name_of(0)[0] == trio.plan.version  # routes begin anew: what they trained may be void


def test_a_banned_stage_is_replaced_at_once(trio: RoutedWorld) -> None:
    lost = whose_place(trio)
    trio.take(bans.ban(trio.state, trio.now, lost, "lies"))
    trio.wait(0.4)
    assert "cid" in trio.routes()[0]


# --- who stood by -------------------------------------------------------------------------------------


def test_a_standby_that_is_gone_is_no_member_any_more(trio: RoutedWorld) -> None:
    routes = trio.routes()
    trio.hang_up("cid")
    trio.wait(trio.policy.lost_after_seconds + 3)
    assert standing(trio) == {}
    assert trio.routes() == routes
    assert trio.plan.reason == "cid stands by no more"


def test_a_drained_standby_leaves_at_once(trio: RoutedWorld) -> None:
    trio.take(departure.drain(trio.state, trio.now, "cid"))
    trio.wait(0.4)
    assert order(trio, "cid") == mb.ORDER_DRAIN
    trio.wait(4)
    assert standing(trio) == {}


def test_a_draining_stage_gives_its_place_to_its_standby(trio: RoutedWorld) -> None:
    going = whose_place(trio)
    span = trio.spans()[going]
    trio.fetches = False
    trio.take(departure.drain(trio.state, trio.now, going))
    trio.wait(3)
    assert trio.spans()["cid"] == span
    assert going not in trio.spans()


def test_two_halves_find_each_other_though_one_stood_by(trio: RoutedWorld) -> None:
    trio.cards(dan=6)
    trio.wait(4)
    assert sorted(map(len, trio.routes())) == [2, 2]
    assert standing(trio) == {}
