"""Runs whose model not every node can hold: when a plan with routes is asked for, issued, mended and kept."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from unit.coordinator.routed import LAYERS, LONG_ROUNDS, QUICK, RoutedWorld, card, covers, rows
from unit.coordinator.world import ELIGIBLE_STATES, RUN, layer_table

from atoll.coordinator.planner.plan_builder import most_round_tokens, routes_of
from atoll.coordinator.planner.question import Answer, Preferences
from atoll.coordinator.runs import departure, machine, recovery
from atoll.coordinator.services.plan_views import plan_fields
from atoll.core.errors import InvalidTransition, PeerMisbehaved
from atoll.core.quorum import COORDINATOR
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2


@pytest.fixture
def pair() -> RoutedWorld:
    """Two halves make the only route."""
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    assert [len(route) for route in world.routes()] == [2]
    return world


def first_of(world: RoutedWorld) -> str:
    return world.routes()[0][0]


# --- plans --------------------------------------------------------------------------------------------


def test_where_all_can_hold_everything_nobody_asks_the_planner() -> None:
    world = RoutedWorld()
    world.begin(ann=12, bob=12)
    world.cards(cid=12)
    world.wait(2)
    assert all(question.given_routes for question in world.asked)  # only what their plans are worth
    assert set(world.spans().values()) == {(0, LAYERS - 1)}
    assert world.plan.version == 2


def test_a_route_covers_all_layers_and_only_its_driver_has_samples(pair: RoutedWorld) -> None:
    (route,) = routes_of(pair.plan)
    assert covers(route)
    assert pair.run.state == "TRAINING"
    ranges = {item.peer_id: item.data_ranges for item in pair.plan.assignments}
    assert [bool(ranges[part.peer_id]) for part in route] == [True, False]
    caps = {item.max_round_tokens for item in pair.plan.assignments}
    assert caps == {most_round_tokens(pair.state.memory[RUN].spec, 1, cuts=1)}
    assert all(item.max_reduce_bytes_per_second > 0 for item in pair.plan.assignments)


def test_a_large_card_is_a_replica_beside_a_route_of_small_ones() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6, whale=12)
    assert sorted(map(len, world.routes())) == [1, 2]
    assert world.spans()["whale"] == (0, LAYERS - 1)


@pytest.mark.parametrize(("goal", "routes"), [("time", 2), ("price", 1)])
def test_machines_that_cost_too_much_are_left_out_where_the_operator_asks_for_price(goal: str, routes: int) -> None:
    world = RoutedWorld(policy=replace(QUICK, preferences=Preferences(goal=goal), standby_seconds=1000.0))
    for name, price in (("ann", 0.1), ("bob", 0.1), ("cid", 5.0), ("dan", 5.0)):
        world.profiles[name] = card(6)
        world.profiles[name].price_per_hour = price
    world.create_run(min_nodes=2, **LONG_ROUNDS)
    world.join("ann", "bob")
    world.wait(0.4)
    world.say(world.name_of(world.state.memory[RUN].genesis_writer), ELIGIBLE_STATES, genesis=world.genesis())
    world.join("cid", "dan")
    world.wait(5)
    assert len(world.routes()) == routes
    assert {"ann", "bob"} <= world.spans().keys()


def test_who_computes_far_slower_than_it_said_is_named_once_and_shown(pair: RoutedWorld) -> None:
    def doubt(name: str, **slower: float) -> str:
        for other, times in slower.items():
            first, last = pair.spans()[other]
            again = 1e-6 if last < LAYERS - 1 else 0.0  # the last stage computes nothing twice
            pair.computed[other] = times * (last - first + 1) * (3e-6 + again)
            pair.say(other)
        pair.wait(pair.policy.replan_seconds + 5)
        return plan_fields(pair.state, pair.state.nodes[pair.identities[name].peer_id]).doubt

    assert doubt("ann", ann=10, bob=1.2).startswith("ann trains 10.0 times slower than its profile says")
    assert doubt("ann", ann=11).startswith("ann trains 11.0 times slower")
    assert not doubt("bob")
    assert len(pair.told("node.doubted")) == 1
    assert not doubt("ann", ann=1)
    assert doubt("bob", bob=0.2).startswith("bob trains 5.0 times faster")
    assert len(pair.told("node.doubted")) == 2


def test_what_was_learnt_of_a_node_outlives_its_trainer(pair: RoutedWorld) -> None:
    """A trainer that begins anew, with other layers perhaps, has no figure for a while."""
    pair.computed = dict.fromkeys(("ann", "bob"), 2.0 * 6 * 4e-06)
    for name in pair.computed:
        pair.say(name)
    pair.wait(pair.policy.replan_seconds + 5)
    last_correction = {node.name: node.last_correction for node in pair.asked[-1].nodes}
    pair.computed = {}
    for name in last_correction:
        pair.say(name)
    pair.wait(pair.policy.replan_seconds + 5)
    found = {node.name: node.last_correction for node in pair.asked[-1].nodes}
    assert all(factor > 1.9 for factor in found.values())
    assert not any(node.status.HasField("computed") for node in pair.asked[-1].nodes)


def test_the_time_of_layers_that_nobody_gave_a_node_counts_nothing(pair: RoutedWorld) -> None:
    pair.cards(cid=6)
    told = mb.SpanTime(layers=plan_pb2.Span(first=0, last=5), seconds_per_token=1e-9)
    peer = pair.identities["cid"].peer_id
    status = mb.NodeStatus(state=ELIGIBLE_STATES, computed=told)
    pair.take(machine.heartbeat(pair.state, pair.now, peer, pair.sessions[peer], mb.HeartbeatRequest(status=status)))
    pair.wait(5)
    asked = next(node for node in pair.asked[-1].nodes if node.name == "cid")
    assert not asked.status.HasField("computed")


def test_who_has_no_part_is_told_why_once() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6, tiny=1)
    world.wait(5)
    tiny = world.identities["tiny"].peer_id
    assert tiny not in world.plan.members
    assert len([told for told in world.told("node.left-out") if told.startswith("tiny has no place")]) == 1
    assert world.state.memory[RUN].left_out.keys() == {tiny}


def test_two_newcomers_that_make_a_route_do_so_and_nobody_else_moves(pair: RoutedWorld) -> None:
    before = pair.spans()
    pair.cards(cid=6)
    pair.wait(2)
    assert pair.plan.version == 1
    pair.cards(dan=6)
    pair.wait(2)
    assert {name: span for name, span in pair.spans().items() if name in before} == before
    assert len(pair.routes()) == 2
    assert "cid joins" in pair.plan.reason


# --- questions ----------------------------------------------------------------------------------------


def test_while_the_planner_thinks_the_plan_stands_and_one_question_is_enough(pair: RoutedWorld) -> None:
    pair.answers = False
    pair.cards(cid=6, dan=6)
    pair.wait(10)
    question = pair.state.memory[RUN].question
    assert question is not None
    assert (pair.plan.version, pair.state.memory[RUN].questions_asked) == (1, 2)
    pair.bring(question, pair.find(question))
    pair.wait(0.4)
    assert pair.plan.version == 2


def test_an_answer_with_a_node_that_left_is_dropped_and_asked_for_again(pair: RoutedWorld) -> None:
    pair.answers = False
    pair.cards(cid=6, dan=6)
    pair.wait(2)
    question = pair.state.memory[RUN].question
    assert question is not None
    found = pair.find(question)
    pair.take(departure.leave(pair.state, pair.now, pair.identities["dan"].peer_id, ""))
    pair.hang_up("dan")
    pair.bring(question, found)
    assert pair.plan.version == 1
    pair.wait(2)
    again = pair.state.memory[RUN].question
    assert again is not None
    assert again.number > question.number
    assert {node.name for node in again.nodes} == {"ann", "bob", "cid"}


@pytest.mark.parametrize("shrunk", [card(5), card(1)])
def test_an_answer_for_a_card_that_shrank_meanwhile_is_dropped(pair: RoutedWorld, shrunk: mb.NodeProfile) -> None:
    pair.answers = False
    pair.cards(cid=6, dan=6)
    pair.wait(2)
    question = pair.state.memory[RUN].question
    assert question is not None
    found = pair.find(question)
    pair.profiles["cid"] = shrunk
    pair.say("cid", ELIGIBLE_STATES)
    pair.bring(question, found)
    assert pair.plan.version == 1


def test_newcomers_do_not_make_an_answer_void(pair: RoutedWorld) -> None:
    pair.answers = False
    pair.cards(cid=6, dan=6)
    pair.wait(2)
    question = pair.state.memory[RUN].question
    assert question is not None
    found = pair.find(question)
    pair.cards(eve=6)
    pair.bring(question, found)
    pair.wait(0.4)
    assert pair.plan.version == 2
    pair.wait(2)
    again = pair.state.memory[RUN].question
    assert again is not None
    assert "eve" in {node.name for node in again.nodes}


def test_an_unexpected_answer_is_ignored(pair: RoutedWorld) -> None:
    question = pair.asked[0]
    assert pair.state.memory[RUN].question is None
    pair.bring(question, replace(pair.find(question), routes=()))
    assert pair.plan.version == 1


def test_a_planner_that_fails_leaves_the_plan_and_says_so(pair: RoutedWorld) -> None:
    pair.answers = False
    pair.cards(cid=6)
    pair.wait(2)
    question = pair.state.memory[RUN].question
    assert question is not None
    pair.bring(question, Answer(missing="the planner failed"))
    assert pair.told("plan.impossible") == ["no plan is possible: the planner failed"]
    pair.wait(QUICK.replan_seconds / 2)
    assert pair.state.memory[RUN].questions_asked == question.number


# --- changes ------------------------------------------------------------------------------------------


def test_a_spare_takes_the_layers_of_a_lost_stage(pair: RoutedWorld) -> None:
    pair.cards(cid=6)
    pair.wait(2)
    before, lost = pair.spans(), pair.routes()[0][1]
    pair.hang_up(lost)
    pair.wait(pair.policy.lost_after_seconds + 3)
    after = pair.spans()
    assert after["cid"] == before[lost]
    assert {name: span for name, span in after.items() if name != "cid"} == {
        name: span for name, span in before.items() if name != lost
    }
    assert f"{lost} was lost" in pair.plan.reason


def test_a_route_continues_without_a_stage_where_the_others_have_memory() -> None:
    world = RoutedWorld()
    world.begin(ann=4, bob=4, cid=8)
    leaver = next(name for name in world.spans() if name != "cid")
    world.take(departure.leave(world.state, world.now, world.identities[leaver].peer_id, ""))
    world.hang_up(leaver)
    world.wait(3)
    (route,) = routes_of(world.plan)
    assert covers(route)
    assert leaver not in world.spans()


def test_a_blink_of_a_stage_changes_nothing(pair: RoutedWorld) -> None:
    name = first_of(pair)
    pair.hang_up(name)
    pair.wait(pair.policy.lost_after_seconds - 2)
    pair.connect(name, mb.NODE_STATE_TRAINING)
    pair.wait(5)
    assert pair.plan.version == 1
    assert len(pair.asked) == 1


def started_again(pair: RoutedWorld) -> str:
    """A stage that was away for eight seconds and loads, beside a spare that has nothing yet."""
    pair.fetches = False
    pair.cards(cid=6)
    pair.wait(2)
    name = first_of(pair)
    pair.hang_up(name)
    pair.wait(8)
    pair.connect(name, mb.NODE_STATE_JOINING)
    return name


def test_a_stage_that_was_started_again_is_waited_for_while_it_loads(pair: RoutedWorld) -> None:
    name = started_again(pair)
    pair.wait(30)
    assert pair.plan.version == 1
    pair.say(name, mb.NODE_STATE_CATCHING_UP)
    pair.wait(10)
    assert pair.plan.version == 1


def test_a_stage_that_loads_for_long_is_replaced(pair: RoutedWorld) -> None:
    name = started_again(pair)
    pair.wait(60)
    assert name not in pair.spans()
    assert "cid" in pair.spans()


def test_a_draining_stage_goes_once_another_has_its_layers(pair: RoutedWorld) -> None:
    pair.fetches = False
    pair.cards(cid=6)
    pair.wait(2)
    going = first_of(pair)
    span = pair.spans()[going]
    pair.take(departure.drain(pair.state, pair.now, going))
    pair.wait(3)
    assert going in pair.spans()
    pair.fetches = True
    pair.wait(1)
    assert going not in pair.spans()
    assert pair.spans()["cid"] == span


def test_without_a_feasible_plan_the_run_says_what_is_missing_and_the_plan_stays(pair: RoutedWorld) -> None:
    lost = first_of(pair)
    pair.hang_up(lost)
    pair.wait(pair.policy.lost_after_seconds + 30)
    assert pair.plan.version == 1
    (told,) = pair.told("plan.impossible")
    assert "more memory" in told
    assert "6 of 12 layers" in told
    pair.cards(cid=6)
    pair.wait(3)
    assert pair.plan.version == 2
    assert pair.state.memory[RUN].no_plan_reason == ""


def test_without_small_nodes_the_others_hold_all_layers() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6, whale=12, orca=12)
    for name in ("ann", "bob"):
        world.take(departure.leave(world.state, world.now, world.identities[name].peer_id, ""))
        world.hang_up(name)
    world.wait(3)
    assert world.spans() == dict.fromkeys(("whale", "orca"), (0, LAYERS - 1))


def test_a_card_that_grows_is_looked_at_again(pair: RoutedWorld) -> None:
    for name in ("ann", "bob"):
        pair.profiles[name] = card(12)
        pair.say(name)
    pair.wait(2)
    assert set(pair.spans().values()) == {(0, LAYERS - 1)}
    assert "all nodes can hold all layers" in pair.plan.reason


def test_a_restart_changes_no_plan(pair: RoutedWorld) -> None:
    pair.restart()
    pair.wait(3)
    for name in ("ann", "bob"):
        pair.connect(name, mb.NODE_STATE_TRAINING)
        pair.wait(3)
    pair.wait(5)
    assert len(pair.plans) == 1


def test_what_was_left_out_is_known_after_a_restart() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6, tiny=1)
    before = world.state.memory[RUN].left_out
    assert before
    world.restart()
    assert world.state.memory[RUN].left_out == before


def test_drifting_links_are_checked_again_and_a_small_gain_moves_no_node(pair: RoutedWorld) -> None:
    pair.wait(2 * pair.policy.replan_seconds + 5)
    assert len(pair.asked) == 3
    assert pair.plan.version == 1


def test_reduce_shares_follow_links_and_the_routes_stay() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6, cid=6, dan=6, eve=6, fay=6)
    assert len(world.routes()) == 3
    before = world.routes()
    world.uplinks = dict.fromkeys(world.spans(), 12.5e6) | {"fay": 2e6}
    for name in world.spans():
        world.say(name)
    world.wait(world.policy.reshare_after_seconds + 15)
    assert world.routes() == before
    rates = {world.name_of(item.peer_id): item.max_reduce_bytes_per_second for item in world.plan.assignments}
    assert rates["fay"] < min(rate for name, rate in rates.items() if name != "fay")
    version = world.plan.version
    world.wait(2 * world.policy.reshare_after_seconds)
    assert world.plan.version == version


def test_a_node_that_reported_no_memory_is_left_out_until_it_does(pair: RoutedWorld) -> None:
    pair.profiles["cid"] = mb.NodeProfile()
    pair.join("cid")
    pair.profiles["dan"] = card(6)
    pair.join("dan")
    pair.wait(2)
    assert "has not reported its memory or speed" in pair.state.memory[RUN].left_out[pair.identities["cid"].peer_id]
    pair.profiles["cid"] = card(6)
    pair.say("cid", ELIGIBLE_STATES)
    pair.wait(2)
    assert len(pair.routes()) == 2


def test_a_node_that_keeps_changing_its_memory_report_does_not_keep_the_planner_busy(
    pair: RoutedWorld,
) -> None:
    pair.cards(cid=4)
    for number in range(100):
        pair.profiles["cid"] = card(4 + number % 2)
        pair.say("cid", ELIGIBLE_STATES)
        pair.wait(1.4)
    assert len(pair.asked) < 15
    pair.wait(120)
    pair.profiles["cid"] = card(6)
    pair.say("cid", ELIGIBLE_STATES)
    pair.wait(2)
    assert {node.name: node.profile for node in pair.asked[-1].nodes}["cid"] == card(6)


# --- genesis ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", ["tie", "infinite", "nan", "negative"])
def test_an_invalid_layer_table_is_refused_and_genesis_does_not_wait_for_it(spoil: str) -> None:
    world = RoutedWorld()
    world.create_run(min_nodes=2, **LONG_ROUNDS)
    world.cards(ann=12, bob=12, cid=12)
    spoilt = rows()
    if spoil == "tie":
        spoilt[3].tied_to.append("nowhere")
    else:
        spoilt[3].flops_per_token_forward = {"infinite": math.inf, "nan": math.nan, "negative": -1.0}[spoil]
    for name in ("ann", "bob"):
        world.say(name, ELIGIBLE_STATES, layers=layer_table(rows()))
    with pytest.raises(PeerMisbehaved, match=r"layer table|flops_per_token_forward of layer block\.3"):
        world.say("cid", ELIGIBLE_STATES, layers=layer_table(spoilt))
    world.wait(1)
    assert world.run.state == "GENESIS"


def test_genesis_waits_for_memory_that_is_enough_and_says_how_much_is_missing() -> None:
    world = RoutedWorld()
    world.create_run(min_nodes=2)
    for name in ("ann", "bob", "cid"):
        world.profiles[name] = card(4)
        world.enrol(name)
        world.connect(name, mb.NODE_STATE_JOINING)
        world.say(name, ELIGIBLE_STATES if name != "cid" else mb.NODE_STATE_JOINING, layers=world.table)
    world.wait(2)
    assert world.run.state == "WAITING"
    (told,) = world.told("plan.impossible")
    assert "2 ready nodes hold 8 of 12 layers together" in told
    world.say("cid", ELIGIBLE_STATES)
    world.wait(1)
    assert world.run.state == "GENESIS"
    assert world.state.memory[RUN].no_plan_reason == ""


def test_a_repeated_genesis_report_waits_for_the_first_plan() -> None:
    world = RoutedWorld(answers=False)
    world.begin(ann=6, bob=6)
    assert (world.run.state, world.plans) == ("GENESIS", [])
    world.say(world.name_of(world.state.memory[RUN].genesis_writer), ELIGIBLE_STATES, genesis=world.genesis())
    assert world.told("genesis.rejected") == []
    world.answers = True
    world.wait(1)
    assert (world.run.state, world.plan.version) == ("TRAINING", 1)


def test_the_first_plan_outlives_a_restart_before_it() -> None:
    world = RoutedWorld(answers=False)
    world.begin(ann=6, bob=6)
    world.restart()
    world.answers = True
    for name in ("ann", "bob"):
        world.connect(name)
    world.wait(2)
    assert (world.run.state, world.plan.version) == ("TRAINING", 1)


# --- recovery -----------------------------------------------------------------------------------------


def test_a_recovery_keeps_the_routes_and_sets_a_base(pair: RoutedWorld) -> None:
    pair.heads = dict.fromkeys(("ann", "bob"), (0, pair.plan.base.manifest_hash))
    for name in ("ann", "bob"):
        pair.say(name)
    with pytest.raises(InvalidTransition):
        recovery.recover(pair.state, pair.now, RUN)
    before = pair.spans()
    pair.take(recovery.recover(pair.state, pair.now, RUN, force=True))
    assert pair.spans() == before
    assert pair.plan.base.since_version == pair.plan.version == 2
    assert pair.plan.base.seats == (*pair.plan.members, COORDINATOR)
