"""A plan that gives nodes other layers is prepared first: they fetch them under the plan that stands."""

from __future__ import annotations

from dataclasses import replace

import pytest
from unit.coordinator.routed import LAYERS, RoutedWorld
from unit.coordinator.world import RUN, SECRET

from atoll.coordinator.live import hand_over
from atoll.coordinator.runs import admission, departure, lifecycle
from atoll.coordinator.services import views
from atoll.coordinator.state import prefetch
from atoll.v1 import membership_pb2 as mb


@pytest.fixture
def pair() -> RoutedWorld:
    """Two halves make the only route; nobody fetches anything by itself."""
    world = RoutedWorld(fetches=False)
    world.begin(ann=6, bob=6)
    return world


def told(world: RoutedWorld) -> dict[str, range]:
    """Layers that each node is told to fetch, by name."""
    spans = {name: prefetch.layers_to_fetch(world.state, it.peer_id) for name, it in world.identities.items()}
    return {name: span for name, span in spans.items() if span}


def order(world: RoutedWorld, name: str) -> mb.Order:
    return views.order_for(world.state, world.state.nodes[world.identities[name].peer_id])


def test_newcomers_fetch_their_layers_before_the_plan_counts_on_them(pair: RoutedWorld) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(5)
    assert pair.plan.version == 1
    spans = told(pair)
    assert spans.keys() == {"cid", "dan"}
    assert {layer for span in spans.values() for layer in span} == set(range(LAYERS))
    assert len(pair.told("plan.preparing")) == 1
    pair.prepared["cid"] = spans["cid"]
    pair.say("cid", mb.NODE_STATE_READY)
    pair.wait(5)
    assert pair.plan.version == 1
    pair.prepared["dan"] = spans["dan"]
    pair.say("dan", mb.NODE_STATE_READY)
    pair.wait(0.4)
    assert pair.plan.version == 2
    assert {name: span for name, span in pair.spans().items() if name in spans} == {
        name: (span.start, span.stop - 1) for name, span in spans.items()
    }
    assert told(pair) == {}


def test_a_fetched_span_that_lacks_a_layer_does_not_count(pair: RoutedWorld) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    for name, span in told(pair).items():
        pair.prepared[name] = range(span.start, span.stop - 1)
        pair.say(name, mb.NODE_STATE_READY)
    pair.wait(3)
    assert pair.plan.version == 1


def test_a_node_without_room_ends_the_preparation_at_once_and_is_left_out(
    pair: RoutedWorld,
) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    pair.refusing["dan"] = told(pair)["dan"]
    pair.say("dan", mb.NODE_STATE_CATCHING_UP)
    pair.wait(0.4)
    assert [event for event in pair.told("plan.abandoned") if "dan has no memory or disk space" in event]
    pair.cards(eve=6)
    pair.wait(3)
    spans = told(pair)
    assert spans.keys() >= {"cid", "eve"}
    assert "dan" not in spans
    pair.fetch_told()
    pair.wait(1)
    assert ["cid", "eve"] in [sorted(route) for route in pair.routes()]


@pytest.mark.parametrize("other", [range(1), range(LAYERS)])
def test_a_report_of_no_room_for_other_layers_is_ignored(pair: RoutedWorld, other: range) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    assert told(pair)["dan"] != other
    pair.refusing["dan"] = other
    pair.say("dan", mb.NODE_STATE_CATCHING_UP)
    pair.say("dan", mb.NODE_STATE_READY)
    pair.wait(3)
    assert pair.told("plan.abandoned") == []
    assert told(pair).keys() == {"cid", "dan"}


def test_a_node_lost_while_fetching_ends_the_preparation_without_a_change(pair: RoutedWorld) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    pair.hang_up("dan")
    pair.wait(pair.policy.lost_after_seconds + 3)
    assert pair.plan.version == 1
    assert len(pair.told("plan.abandoned")) == 1
    assert pair.state.memory[RUN].preparation is None
    assert told(pair).keys() == {"cid"}  # to stand by


def test_a_node_that_does_not_fetch_in_time_is_left_out(pair: RoutedWorld) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    slow, quick = "cid", "dan"
    pair.prepared[quick] = told(pair)[quick]
    pair.say(quick, mb.NODE_STATE_READY)
    pair.wait(400)
    (why,) = pair.told("plan.abandoned")
    assert why.endswith(f"{slow} did not fetch the layers in time")
    assert len(pair.routes()) == 1
    left_out = pair.state.memory[RUN].left_out
    assert left_out[pair.identities[slow].peer_id] == "did not fetch its layers in time"
    pair.cards(eve=6)
    pair.wait(3)
    assert {"eve"} <= told(pair).keys() <= {"dan", "eve"}


def test_a_lost_stage_ends_the_wait_for_a_prepared_plan(pair: RoutedWorld) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    lost = pair.routes()[0][1]
    pair.hang_up(lost)
    pair.wait(pair.policy.lost_after_seconds + 3)
    assert pair.plan.version == 2
    assert lost not in pair.spans()
    assert pair.state.memory[RUN].preparation is None


def test_the_successor_of_a_draining_stage_fetches_while_that_stage_trains(pair: RoutedWorld) -> None:
    pair.cards(cid=6)
    pair.wait(2)
    going = pair.routes()[0][0]
    first, last = pair.spans()[going]
    pair.take(departure.drain(pair.state, pair.now, going))
    pair.wait(3)
    assert told(pair) == {"cid": range(first, last + 1)}
    assert order(pair, going) == mb.ORDER_UNSPECIFIED
    assert going in pair.spans()
    pair.fetch_told()
    pair.wait(0.6)
    assert pair.spans()["cid"] == (first, last)
    assert going not in pair.spans()
    assert pair.plan.former == (pair.identities[going].peer_id,)  # who may have what was averaged meanwhile
    assert order(pair, going) == mb.ORDER_DRAIN


def test_a_stage_without_a_successor_may_leave(pair: RoutedWorld) -> None:
    going = pair.routes()[0][0]
    pair.take(departure.drain(pair.state, pair.now, going))
    assert order(pair, going) == mb.ORDER_UNSPECIFIED
    pair.wait(5)
    assert order(pair, going) == mb.ORDER_DRAIN
    assert pair.told("plan.impossible")


def test_a_stage_goes_when_its_layers_are_not_fetched_for_long(pair: RoutedWorld) -> None:
    pair.cards(cid=6)
    pair.wait(2)
    going = pair.routes()[0][0]
    pair.take(departure.drain(pair.state, pair.now, going))
    pair.hang_up(going)
    pair.connect(going, mb.NODE_STATE_TRAINING)
    pair.wait(30)
    assert order(pair, going) == mb.ORDER_UNSPECIFIED
    pair.wait(hand_over.MAX_HAND_OVER_SECONDS)
    assert order(pair, going) == mb.ORDER_DRAIN


def test_a_coordinator_that_starts_again_asks_anew_and_what_was_fetched_counts(pair: RoutedWorld) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    pair.fetch_told()
    assert pair.plan.version == 1
    pair.restart()
    for name in pair.identities:
        pair.connect(name, mb.NODE_STATE_TRAINING)
    pair.wait(10)
    assert pair.plan.version == 2
    assert set(pair.spans()) == {"ann", "bob", "cid", "dan"}


def test_layers_of_long_ago_are_not_those_of_now(pair: RoutedWorld) -> None:
    pair.put(replace(pair.run, head_round=50))
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    pair.fetch_told()
    for name in ("cid", "dan"):
        live = pair.state.live[pair.identities[name].peer_id]
        live.status.prepared_round = 40
    pair.wait(2)
    assert pair.plan.version == 1
    for name in ("cid", "dan"):
        pair.say(name, mb.NODE_STATE_READY)
    pair.wait(0.4)
    assert pair.plan.version == 2


def test_a_preparation_ends_when_all_remaining_nodes_hold_all_layers() -> None:
    world = RoutedWorld(fetches=False)
    world.begin(ann=12, bob=12)
    world.cards(cid=6, dan=6)
    world.wait(5)
    assert told(world)
    for name in ("cid", "dan"):
        world.hang_up(name)
    world.wait(world.policy.lost_after_seconds + 10)
    assert told(world) == {}
    assert world.state.memory[RUN].preparation is None


def test_while_a_run_is_paused_nothing_is_prepared(pair: RoutedWorld) -> None:
    pair.cards(cid=6, dan=6)
    pair.wait(3)
    assert told(pair)
    pair.take(lifecycle.pause(pair.state, pair.now, RUN))
    assert told(pair) == {}
    pair.wait(500)
    pair.take(lifecycle.start(pair.state, pair.now, RUN, pair.policy))
    pair.fetches = True
    pair.wait(10)
    assert set(pair.spans()) == {"ann", "bob", "cid", "dan"}
    assert not pair.told("plan.abandoned")


def test_a_coordinator_that_starts_again_lets_a_draining_stage_hand_over(pair: RoutedWorld) -> None:
    pair.cards(cid=6)
    pair.wait(2)
    going = pair.routes()[0][0]
    pair.take(departure.drain(pair.state, pair.now, going))
    pair.wait(3)
    pair.restart()
    for name in pair.identities:
        pair.connect(name, mb.NODE_STATE_TRAINING)
    pair.wait(5)
    assert order(pair, going) == mb.ORDER_UNSPECIFIED
    pair.fetch_told()
    pair.wait(1)
    assert "cid" in pair.spans()
    assert order(pair, going) == mb.ORDER_DRAIN


def rename(world: RoutedWorld, name: str, other: str) -> None:
    """The node enrols again with the token that it has."""
    peer = world.identities[name].peer_id
    token = world.state.nodes[peer].token_id
    again = admission.Applicant(token, SECRET, peer, world.identities[name].public_key, other)
    world.take(admission.enrol(world.state, world.now, again))


@pytest.mark.parametrize("prepared", [False, True])
def test_a_node_renamed_meanwhile_gets_its_layers_under_the_new_name(pair: RoutedWorld, prepared: bool) -> None:
    pair.answers = prepared
    pair.cards(cid=12)
    pair.wait(3)
    question = pair.state.memory[RUN].question
    assert (question is None) == prepared
    rename(pair, "cid", "zed")
    pair.fetches = pair.answers = True
    if question is not None:
        pair.bring(question, pair.find(question))
    pair.wait(5)
    peer = pair.identities["cid"].peer_id
    assert pair.state.nodes[peer].name == "zed"
    assert pair.plan.span(peer) == range(LAYERS)


def test_a_freed_name_gives_its_next_owner_no_layers(pair: RoutedWorld) -> None:
    pair.answers = False
    pair.cards(cid=12)
    pair.wait(3)
    question = pair.state.memory[RUN].question
    assert question is not None
    rename(pair, "cid", "zed")
    pair.enrol("eve")
    rename(pair, "eve", "cid")
    pair.fetches = True
    pair.bring(question, pair.find(question))
    pair.wait(3)
    assert pair.identities["cid"].peer_id in pair.plan.members
    assert pair.identities["eve"].peer_id not in pair.plan.members


@pytest.mark.parametrize("prepared", [False, True])
def test_a_member_that_keeps_renaming_itself_keeps_no_other_node_out(pair: RoutedWorld, prepared: bool) -> None:
    pair.answers = prepared
    pair.cards(cid=12)
    for number in range(20):
        pair.wait(1)
        rename(pair, "bob", f"bob-{number}")
        question = pair.state.memory[RUN].question
        if question is not None:
            rename(pair, "bob", f"rob-{number}")
            pair.bring(question, pair.find(question))
        pair.fetches = number > 3
    assert pair.plan.span(pair.identities["cid"].peer_id) == range(LAYERS)
    assert pair.told("plan.abandoned") == []
