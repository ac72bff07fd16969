"""1F1B as data: bounded, ordered, and free of deadlock however messages travel."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.scripted_stages import ScriptedRoute

from atoll.core.errors import InvalidTransition
from atoll.node.pipeline.schedule import Backward, Forward, SendReport, Step, flush_actions, stage_credits

ROUTES = st.integers(1, 6)
COUNTS = st.integers(1, 12)
SEEDS = st.integers(0, 2**32)  # of the order in which links deliver and stages work


@given(ROUTES, COUNTS, st.integers(0, 3))
def test_every_micro_batch_goes_forward_then_backward_once_and_in_order(stages: int, count: int, ahead: int) -> None:
    for credit in stage_credits(stages, count, ahead):
        order = flush_actions(count, credit)
        assert [each.micro_batch for each in order if isinstance(each, Forward)] == list(range(count))
        assert [each.micro_batch for each in order if isinstance(each, Backward)] == list(range(count))
        assert all(order.index(Forward(number)) < order.index(Backward(number)) for number in range(count))
        assert order[-2:] == (SendReport(), Step())


@given(ROUTES, COUNTS, st.integers(0, 3))
def test_no_stage_holds_more_than_its_credits_and_later_ones_never_more(stages: int, count: int, ahead: int) -> None:
    credits = stage_credits(stages, count, ahead)
    assert list(credits) == sorted(credits, reverse=True)
    assert credits[-1] == 1
    for credit in credits:
        held = 0
        for action in flush_actions(count, credit):
            held += isinstance(action, Forward) - isinstance(action, Backward)
            assert held <= credit


@given(SEEDS, ROUTES, COUNTS, st.integers(0, 3), st.booleans())
def test_no_interleaving_of_deliveries_deadlocks_or_changes_an_order(
    seed: int, stages: int, count: int, ahead: int, tied: bool
) -> None:
    route = ScriptedRoute(stages, tied, ahead, Random(seed).choice)
    for _ in range(2):
        flushed = route.flush(count)
        assert flushed.verdict.factor is not None
        assert flushed.norms == tuple(float(stage) for stage in range(stages))
    for stage in route.stages:
        assert stage.backwards == [*range(count), *range(count)]
        assert stage.steps == 2
        assert stage.most_held <= stage_credits(stages, count, ahead)[stage.number]
        assert stage.added_gradient == 2 * sum(range(1, count + 1))


@given(SEEDS, st.integers(1, 5), COUNTS, st.booleans(), st.integers(0, 200))
def test_links_that_break_at_any_moment_count_nothing_or_all_and_the_next_run_counts_once(
    seed: int, stages: int, count: int, tied: bool, moment: int
) -> None:
    route = ScriptedRoute(stages, tied, 0, Random(seed).choice)
    route.ledger.add(range(count))
    ids = route.ledger.begin(count)
    if not route.flush_until_break(count, moment):
        assert all(stage.steps == 0 and stage.added_gradient == 0 for stage in route.stages)
        assert route.ledger.counted == set()
        assert route.ledger.waiting == ids
        assert route.ledger.begin(count) == ids
        route.flush(count)
    route.settle()
    assert route.ledger.counted == set(ids)
    for stage in route.stages:
        assert stage.steps == 1
        assert stage.added_gradient == sum(range(1, count + 1))


BREAKS = st.lists(
    st.tuples(st.integers(0, 150), st.integers(0, 4)), max_size=8
)  # after how many turns; who is replaced: the last of the numbers is nobody, most often


@given(SEEDS, st.integers(1, 5), COUNTS, st.booleans(), BREAKS)
def test_links_that_break_at_any_moments_leave_each_flush_counted_by_all_stages_or_by_none(
    seed: int, stages: int, count: int, tied: bool, breaks: list[tuple[int, int]]
) -> None:
    """Also while stages still hear what became of the flush before, and when another takes a stage's place."""
    route = ScriptedRoute(stages, tied, 0, Random(seed).choice)
    decided = 0
    missed = [0] * stages  # flushes decided before the stage that is there now came
    for moment, replaced in breaks:
        decided += route.flush_until_break(count, moment, replaced or None)
        if 0 < replaced < stages:
            missed[replaced] = decided
    route.flush(count)
    for stage in route.stages:
        assert stage.steps == decided + 1 - missed[stage.number]
        assert stage.added_gradient == stage.steps * sum(range(1, count + 1))


@given(SEEDS, st.integers(2, 5), COUNTS, st.booleans(), st.lists(st.integers(0, 150), max_size=6))
def test_a_driver_that_is_replaced_leaves_the_other_stages_agreed(
    seed: int, stages: int, count: int, tied: bool, moments: list[int]
) -> None:
    """Those that stepped a flush which only the driver that is gone had decided tell those that did not hear of it."""
    route = ScriptedRoute(stages, tied, 0, Random(seed).choice)
    for moment in moments:
        route.flush_until_break(count, moment, 0)
        route.settle()
        assert len({stage.steps for stage in route.stages[1:]}) == 1
    route.flush(count)
    assert route.stages[0].steps == 1


@given(SEEDS, ROUTES, COUNTS, st.integers(0, 3), st.booleans(), st.integers(0, 1))
def test_an_evaluation_between_flushes_trains_nothing_and_says_whether_all_stand_at_its_anchor(
    seed: int, stages: int, count: int, ahead: int, tied: bool, anchor: int
) -> None:
    route = ScriptedRoute(stages, tied, ahead, Random(seed).choice)
    route.flush(count)
    found = route.evaluate(anchor)
    assert (found.loss, found.at_same_anchor) == (1.0, anchor == 0)
    route.flush(count)
    for stage in route.stages:
        assert stage.steps == 2
        assert stage.added_gradient == 2 * sum(range(1, count + 1))


def test_a_gradient_that_is_not_finite_skips_the_step_on_every_stage() -> None:
    route = ScriptedRoute(3, tied=True)
    route.stages[1].own_norm = torch.inf
    flushed = route.flush(4)
    assert flushed.verdict.factor is None
    assert [stage.skipped for stage in route.stages] == [1, 1, 1]
    assert [stage.steps for stage in route.stages] == [0, 0, 0]


@given(SEEDS, st.integers(1, 4), COUNTS, st.integers(0, 3))
def test_a_stage_that_fails_in_its_step_must_be_replaced(seed: int, stages: int, count: int, which: int) -> None:
    """Its weights may be of two flushes: it says so whatever it is asked, and never counts the flush as nothing."""
    route = ScriptedRoute(stages, pick=Random(seed).choice)
    broken = route.machines[which % stages]

    def fails(factor: float | None) -> None:
        raise MemoryError("no room for moments")

    route.stages[which % stages].step = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        route.flush(count)
    for ask in (broken.advance, broken.disconnect):
        with pytest.raises(InvalidTransition, match="failed during a step"):
            ask()
