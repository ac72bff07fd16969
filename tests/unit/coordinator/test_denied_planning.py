"""No word of one node's keeps the others from being planned for: it costs the node itself its part at most."""

from __future__ import annotations

import pytest
from unit.coordinator.routed import LAYERS, RoutedWorld, card
from unit.coordinator.world import ELIGIBLE_STATES, RUN

from atoll.coordinator.live import pinning, plan_apply
from atoll.coordinator.planner.answer_question import answer_question
from atoll.coordinator.runs import bans, lifecycle
from atoll.coordinator.state import prefetch
from atoll.core.clock import ManualClock
from atoll.v1 import membership_pb2 as mb

ALL_LAYERS = (0, LAYERS - 1)


@pytest.fixture
def pair() -> RoutedWorld:
    """Two halves make the only route."""
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    return world


class Fetching(RoutedWorld):
    """All but `slow` fetch what they are told; `slow` stops being fit for a moment when it is told, or does nothing."""

    slow = ""
    blinks = False

    def tick_done(self) -> None:
        self.fetches = False
        super().tick_done()
        for name, identity in self.identities.items():
            span = prefetch.layers_to_fetch(self.state, identity.peer_id)
            if name != self.slow and span and self.prepared.get(name) != span:
                self.prepared[name] = span
                self.say(name, self.state.live[identity.peer_id].status.state)
        if self.slow in self.identities and self.blinks:
            peer = self.identities[self.slow].peer_id
            coming = self.state.memory[RUN].preparation
            told = coming is not None and peer in coming.spans
            self.say(self.slow, mb.NODE_STATE_JOINING if told else ELIGIBLE_STATES)


@pytest.mark.parametrize("kind", ["foo", "block"])
def test_a_node_without_a_time_for_some_kind_of_layer_is_left_out_alone(pair: RoutedWorld, kind: str) -> None:
    eve = card(2)
    del eve.layer_times[:]
    eve.layer_times.add(kind=kind, forward_seconds_per_token=1e-6, backward_seconds_per_token=2e-6)
    pair.profiles["eve"] = eve
    pair.join("eve")
    pair.cards(cid=12)
    pair.wait(10)
    assert pair.spans()["cid"] == ALL_LAYERS
    assert "eve" not in pair.spans()
    assert any("eve has neither a time for layers of kind" in told for told in pair.told("node.left-out"))


@pytest.mark.parametrize("word", [mb.NODE_STATE_UNSPECIFIED, mb.NODE_STATE_FINISHED])
@pytest.mark.parametrize("device", ["", "cuda:0"])
def test_a_member_that_says_nothing_of_use_is_planned_around_within_a_minute(
    pair: RoutedWorld, word: mb.NodeState, device: str
) -> None:
    pair.profiles["bob"].device = device
    pair.say("bob", word)
    pair.cards(cid=6, dan=12)
    pair.wait(30)
    assert "bob" in pair.spans()  # it may be at the end of its work, or just begin
    for _ in range(6):
        pair.say("bob", word)
        pair.wait(5)
    assert "bob" not in pair.spans()
    assert pair.spans()["dan"] == ALL_LAYERS
    assert ["ann", "cid"] in [sorted(route) for route in pair.routes()]


def test_a_node_absent_when_it_should_fetch_is_not_waited_for_again() -> None:
    world = Fetching()
    world.begin(ann=6, bob=6)
    world.slow, world.blinks = "eve", True
    world.profiles["eve"] = card(12, slower=0.1)
    world.join("eve")
    world.cards(cid=6, dan=6)
    world.wait(60)
    assert len(world.told("plan.abandoned")) <= 1
    assert {"cid", "dan"} <= {name for route in world.routes() for name in route}
    assert len(world.asked) < 10


def test_a_member_that_does_not_fetch_goes_on_as_it_is_and_others_come_in() -> None:
    world = Fetching()
    world.begin(ann=6, bob=6)
    before = world.spans()["ann"]
    world.slow = "ann"
    world.profiles["ann"] = card(12, slower=0.2)  # it could hold all by now
    world.say("ann")
    world.wait(3)
    assert world.state.memory[RUN].preparation is not None
    world.cards(dan=6, fay=6)
    world.wait(2 * world.policy.prepare_seconds + 10)
    assert len(world.told("plan.abandoned")) == 1
    assert world.spans()["ann"] == before
    assert sorted(map(sorted, world.routes())) == [["ann", "bob"], ["dan", "fay"]]


def test_a_member_that_did_not_fetch_moves_where_no_plan_is_possible_without() -> None:
    world = Fetching()
    world.begin(ann=5, bob=4, cid=3)
    world.slow = "ann"
    world.profiles["ann"] = card(8, slower=0.1)
    world.say("ann")
    world.wait(2 * world.policy.prepare_seconds + 15)
    assert len(world.told("plan.abandoned")) == 1
    world.slow = ""
    world.take(bans.ban(world.state, world.now, "cid", "gone"))
    world.wait(25)
    assert sorted(name for route in world.routes() for name in route) == ["ann", "bob"]


def test_a_slow_newcomer_that_was_not_there_once_is_not_forced_into_a_route() -> None:
    world = Fetching()
    world.begin(ann=6, bob=6)
    world.slow = "eve"
    world.profiles["eve"] = card(12, slower=20.0)
    world.join("eve")
    world.wait(2)
    world.say("eve", mb.NODE_STATE_JOINING)
    world.wait(0.4)
    assert len(world.told("plan.abandoned")) == 1
    world.say("eve", ELIGIBLE_STATES)
    world.slow = ""
    world.wait(300)
    assert [sorted(route) for route in world.routes()] == [["ann", "bob"]]
    assert world.name_of(world.plan.standbys[0]) == "eve"


def test_other_words_that_say_nothing_do_not_begin_the_time_anew(pair: RoutedWorld) -> None:
    pair.profiles["bob"].device = ""
    pair.cards(cid=6, dan=12)
    for turn in range(12):
        pair.say("bob", (mb.NODE_STATE_UNSPECIFIED, mb.NODE_STATE_FINISHED)[turn % 2])
        if turn == 6:
            pair.hang_up("bob")
            pair.connect("bob", mb.NODE_STATE_UNSPECIFIED)
        pair.wait(5)
    assert "bob" not in pair.spans()
    assert pair.spans()["dan"] == ALL_LAYERS


def test_who_lends_less_than_its_pin_takes_has_no_part_and_the_others_are_planned(pair: RoutedWorld) -> None:
    pair.cards(cid=12)
    pair.wait(5)
    pair.take(pinning.pin(pair.state, pair.now, "cid", (0, 8)))
    pair.wait(5)
    pair.profiles["cid"] = card(2)
    pair.say("cid")
    pair.cards(dan=12)
    pair.wait(10)
    assert pair.spans()["dan"] == ALL_LAYERS
    assert "cid" not in pair.spans()
    assert not pair.state.memory[RUN].no_plan_reason
    assert "pinned to layers 0–8, which take" in pair.state.memory[RUN].left_out[pair.identities["cid"].peer_id]


def test_who_comes_while_the_operator_s_plan_is_searched_for_is_looked_at_at_once() -> None:
    world = RoutedWorld(answers=False)
    world.begin(ann=6, bob=6)

    def asked():
        question = world.state.memory[RUN].question
        assert question is not None
        return question

    world.bring(asked(), world.find(asked()))
    world.wait(2)
    ordered = plan_apply.operator_question(world.state, world.now, RUN, world.policy)
    world.cards(cid=12)
    world.wait(2)
    own = asked()
    world.take(plan_apply.apply(world.state, world.now, RUN, ordered, answer_question(ordered, ManualClock())))
    assert asked() is own
    world.bring(own, world.find(own))
    world.fetch_told()
    world.wait(1)
    assert world.spans()["cid"] == ALL_LAYERS


@pytest.mark.parametrize("meanwhile", ["paused", "pinned"])
def test_what_the_operator_asked_for_is_not_issued_when_it_makes_no_sense_any_more(meanwhile: str) -> None:
    world = RoutedWorld()
    world.begin(ann=12, bob=12)
    world.cards(cid=12)
    ordered = plan_apply.operator_question(world.state, world.now, RUN, world.policy)
    assert ordered.given_routes
    if meanwhile == "paused":
        world.take(lifecycle.pause(world.state, world.now, RUN))
    else:
        world.take(pinning.pin(world.state, world.now, "cid", (0, 5)))
    plans = len(world.plans)
    found = answer_question(ordered, ManualClock())
    assert world.take(plan_apply.apply(world.state, world.now, RUN, ordered, found)) is None
    assert len(world.plans) == plans


def test_how_far_a_clock_is_behind_is_kept_and_no_word_of_it_is_not_agreement(pair: RoutedWorld) -> None:
    def kept(**told: float) -> mb.NodeStatus:
        pair.tell("ann", mb.NodeStatus(state=ELIGIBLE_STATES, **told))
        return pair.state.live[pair.identities["ann"].peer_id].status

    assert not kept().HasField("clock_offset_seconds")
    for seconds in (3600.0, -3600.0, 0.0):
        assert kept(clock_offset_seconds=seconds).clock_offset_seconds == seconds
    assert not kept(clock_offset_seconds=float("nan")).HasField("clock_offset_seconds")
    assert kept(step_seconds=-1.0).step_seconds == 0.0
