"""The planner's flush beside the schedule that stages really follow (`pipeline/schedule.py`), played event by event."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.planner.cost import NO_IN_FLIGHT_LIMIT, in_flight_limit
from atoll.coordinator.planner.problem import Training
from atoll.node.pipeline.schedule import Backward, Forward, flush_actions, stage_credits

SECONDS = st.floats(0.001, 0.05)
WAY = st.one_of(st.floats(0.0, 0.01), st.floats(0.05, 0.3))


def played(micro_batches: int, ahead: int, stages: list[float], hops: list[float]) -> float:
    """Seconds of a flush: a third of a stage's time is forward, half of a hop's is the way there."""
    count = len(stages)
    credits = stage_credits(count, micro_batches, ahead)
    left = [[it for it in flush_actions(micro_batches, own) if isinstance(it, Forward | Backward)] for own in credits]
    inputs: list[dict[int, float]] = [{} for _ in stages]
    gradients: list[dict[int, float]] = [{} for _ in stages]
    inputs[0] = dict.fromkeys(range(micro_batches), 0.0)
    clocks = [0.0] * count
    while any(left):
        for stage in range(count):
            while left[stage]:
                action = left[stage][0]
                forward = isinstance(action, Forward)
                came = (inputs if forward else gradients)[stage].get(action.micro_batch)
                if came is None:
                    break
                left[stage].pop(0)
                clocks[stage] = max(clocks[stage], came) + stages[stage] * (1 if forward else 2) / 3
                if forward and stage < count - 1:
                    inputs[stage + 1][action.micro_batch] = clocks[stage] + hops[stage] / 2
                elif forward:
                    gradients[stage][action.micro_batch] = clocks[stage]
                elif stage:
                    gradients[stage - 1][action.micro_batch] = clocks[stage] + hops[stage - 1] / 2
    return max(clocks)


def predicted(micro_batches: int, ahead: int, stages: list[float], hops: list[float]) -> float:
    training = Training(micro_batch_tokens=1, micro_batches=micro_batches, round_tokens=1, ahead=ahead)
    period = max(max(stages), in_flight_limit(training, stages, hops, max(stages)).period_seconds)
    return sum(stages) + sum(hops) + (micro_batches - 1) * period


@settings(deadline=None)
@given(st.data(), st.integers(1, 6), st.integers(1, 40), st.sampled_from([0, 1, 5]))
def test_it_is_never_less_than_the_schedule_takes(
    data: st.DataObject, count: int, micro_batches: int, ahead: int
) -> None:
    stages = data.draw(st.lists(SECONDS, min_size=count, max_size=count))
    hops = data.draw(st.lists(WAY, min_size=count - 1, max_size=count - 1))
    took = played(micro_batches, ahead, stages, hops)
    assert predicted(micro_batches, ahead, stages, hops) >= took * (1 - 1e-9)


def test_it_is_what_the_schedule_takes_over_many_micro_batches() -> None:
    """Whichever hop is the long one, and however many stages there are."""
    for count in (2, 3, 4, 6):
        for long in range(count - 1):
            stages, hops = [0.01] * count, [0.004] * (count - 1)
            hops[long] = 0.3
            took = played(400, 5, stages, hops)
            assert predicted(400, 5, stages, hops) / took < 1.08  # it takes a while to settle


def test_a_flush_that_fits_into_the_credits_waits_for_none() -> None:
    for count in (3, 4, 6):
        stages, hops = [0.015] * count, [0.2] * (count - 1)
        took = played(8, 5, stages, hops)
        assert 0.999 < predicted(8, 5, stages, hops) / took < 1.35  # its last stages wait once
    training = Training(micro_batch_tokens=1, micro_batches=7, round_tokens=1)
    assert in_flight_limit(training, [0.015, 0.015], [0.2], 0.015) == NO_IN_FLIGHT_LIMIT


def test_the_pair_that_is_covered_least_is_named() -> None:
    training = Training(micro_batch_tokens=1, micro_batches=64, round_tokens=1)
    found = in_flight_limit(training, [0.01] * 4, [0.0, 0.4, 0.0], 0.01)
    assert (found.first, found.last, found.in_flight) == (1, 2, 7)
    assert abs(found.round_trip_seconds - 0.42) < 1e-9
