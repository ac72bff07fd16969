"""The operator's pins: held by every plan, durable, and refused where they cannot be held; planning by order."""

from __future__ import annotations

import pytest
from unit.coordinator.routed import LAYERS, RoutedWorld, card
from unit.coordinator.world import RUN, World

from atoll.coordinator.live import pinning, plan_apply, planner_question
from atoll.coordinator.planner.answer_question import answer_question
from atoll.coordinator.planner.question import Preferences
from atoll.coordinator.services import plan_views
from atoll.coordinator.services.views import node_view
from atoll.core.clock import ManualClock
from atoll.core.errors import InvalidTransition, NotFound, PlanInputInvalid
from atoll.core.plan import Plan, sign_plan


@pytest.fixture
def world() -> RoutedWorld:
    """Three that can hold everything."""
    made = RoutedWorld()
    made.begin(ann=12, bob=12, cid=12)
    return made


def pin(world: World, name: str, span: tuple[int, int] | None) -> None:
    world.take(pinning.pin(world.state, world.now, name, span))


def apply(world: RoutedWorld, *, dry_run: bool = False) -> tuple[Plan | None, list[tuple[str, str, str]]]:
    """Apply a plan as the service does; returns the issued plan, and the moves (node, before, after)."""
    question = plan_apply.operator_question(world.state, world.now, RUN, world.policy)
    found, issued = answer_question(question, ManualClock()), None
    if not dry_run:
        issued = world.take(plan_apply.apply(world.state, world.now, RUN, question, found))
    view = plan_views.proposal_view(world.state, RUN, question, found, issued if isinstance(issued, Plan) else None)
    assert bool(view.version) == (issued is not None)
    return issued if isinstance(issued, Plan) else None, [(it.name, it.before, it.after) for it in view.moves]


def test_a_pinned_node_holds_its_layers_and_others_make_the_route_whole(world: RoutedWorld) -> None:
    pin(world, "ann", (0, 3))
    world.wait(3)
    assert world.spans()["ann"] == (0, 3)
    assert any(len(route) == 2 and route[0] == "ann" for route in world.routes())
    view = node_view(world.state, world.state.nodes[world.identities["ann"].peer_id], 0, 0.0)
    assert (view.pin, view.span.last, view.left_out) == ("0-3", 3, "")


def test_a_node_that_is_pinned_out_leaves_the_plan_and_comes_back(world: RoutedWorld) -> None:
    pin(world, "ann", None)
    world.wait(2)
    assert world.members() == {"bob", "cid"}
    assert world.plan.reason == "ann is pinned out"
    assert all(question.given_routes for question in world.asked)
    world.take(pinning.unpin(world.state, world.now, "ann"))
    world.wait(2)
    assert world.members() == {"ann", "bob", "cid"}


def test_pins_outlive_a_restart_and_another_enrolment(world: RoutedWorld) -> None:
    pin(world, "ann", (0, 3))
    world.enrol("ann")
    world.restart()
    assert world.state.nodes[world.identities["ann"].peer_id].pin == "0-3"


@pytest.mark.parametrize(
    ("span", "words"),
    [
        ((0, LAYERS), "layers 0–12 do not exist: layers are numbered 0 to 11"),
        ((5, 3), "layers 5–3 do not exist"),
        ((-1, 3), "layers -1–3 do not exist"),
    ],
)
def test_a_pin_to_layers_that_do_not_exist_is_refused(world: RoutedWorld, span: tuple[int, int], words: str) -> None:
    with pytest.raises(PlanInputInvalid, match=words):
        pin(world, "ann", span)


def test_layers_that_do_not_fit_are_refused(world: RoutedWorld) -> None:
    world.profiles["ann"] = card(4)
    world.say("ann")
    with pytest.raises(PlanInputInvalid, match="and ann has"):
        pin(world, "ann", (0, 8))
    pin(world, "ann", (0, 3))


def test_pins_that_leave_a_layer_to_nobody_are_refused(world: RoutedWorld) -> None:
    pin(world, "ann", (0, 3))
    pin(world, "bob", (0, 7))
    with pytest.raises(PlanInputInvalid, match="none of them may hold layer 8"):
        pin(world, "cid", None)
    with pytest.raises(PlanInputInvalid, match="none of them may hold layer 8"):
        pin(world, "cid", (9, 11))
    pin(world, "cid", (8, 11))
    world.wait(3)
    assert world.routes() == [["bob", "cid"]]


def test_a_pin_twice_is_told_once_and_strangers_have_none(world: RoutedWorld) -> None:
    for _ in range(2):
        pin(world, "ann", (0, 3))
    assert world.kinds().count("node.pinned") == 1
    with pytest.raises(NotFound):
        pin(world, "nobody", None)


# --- planning by order ----------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing_and_an_order_does_not_wait() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    world.cards(cid=6, dan=6)
    plan, moves = apply(world, dry_run=True)
    assert (plan, {name for name, before, _ in moves if not before}) == (None, {"cid", "dan"})
    assert world.plan.version == 1
    plan, _ = apply(world)
    assert plan is not None
    assert plan.version == 2
    assert apply(world) == (None, [])
    world.wait(5)
    assert world.plan.version == 2


def test_an_order_adds_newcomers_at_once_where_all_hold_all_layers(world: RoutedWorld) -> None:
    world.cards(dan=12)
    assert apply(world, dry_run=True) == (None, [("dan", "", "0-11")])
    plan, _ = apply(world)
    assert plan is not None
    assert world.members() == {"ann", "bob", "cid", "dan"}
    assert apply(world) == (None, [])


def test_an_order_for_which_no_plan_is_possible_says_so_and_changes_nothing() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    world.hang_up("bob")
    world.wait(world.policy.lost_after_seconds + 0.4)
    question = plan_apply.operator_question(world.state, world.now, RUN, world.policy)
    found = answer_question(question, ManualClock())
    view = plan_views.proposal_view(world.state, RUN, question, found, None)
    assert "more memory" in view.missing
    assert not view.changes


def test_plans_are_made_for_runs_that_train() -> None:
    world = RoutedWorld()
    world.create_run(start=False)
    with pytest.raises(InvalidTransition):
        plan_apply.operator_question(world.state, world.now, RUN, world.policy)
    with pytest.raises(InvalidTransition, match="no layer table"):
        planner_question.build_question(world.state, world.now, RUN, world.policy)


def test_a_plan_is_shown_with_memory_and_nodes_left_out() -> None:
    world = RoutedWorld()
    world.begin(ann=6, bob=6, tiny=1)
    sealed, wishes = sign_plan(world.operator, world.plan), Preferences(goal="price")
    view = plan_views.plan_view(world.state, sealed, world.state.memory[RUN].figures, wishes)
    assert view.wishes.goal == "price"
    assert [(it.name, it.span.first, it.route) for it in view.nodes] == [
        (name, world.spans()[name][0], 1) for name in world.routes()[0]
    ]
    assert all(0 < it.memory_bytes <= it.memory_lent_bytes for it in view.nodes)
    assert [it.name for it in view.left_out] == ["tiny"]
    assert view.figures.predicted_tokens_per_second > 0
    assert view.figures.moved_bytes == 8 * LAYERS * 1_000_000
