"""What time rounds get, as it follows from what has to travel."""

import pytest
from support.small_state import SPEC

from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.partition import ReduceRange, part_elements
from atoll.node.rounds.policy import policy_of, screen_of

HOME_UPLINK = 10e6 / 8  # bytes per second


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("elements", [100_000, 100_000_000, 3_000_000_000])
def test_a_home_uplink_is_never_too_thin_for_the_first_rounds(codec, elements):
    spec = SPEC.model_copy(update={"sync": SPEC.sync.model_copy(update={"codec": codec})})
    policy = policy_of(spec, (0, 10, 20, elements))
    vector = CODECS[codec].encoded_bytes(elements)
    assert policy.exchange_timeout.total_seconds() >= 2 * vector / HOME_UPLINK
    assert policy.decision_timeout.total_seconds() >= vector / HOME_UPLINK
    coded = CODECS[codec].encoded_bytes
    length = part_elements([ReduceRange("one", 0, elements)], coded, policy.part_elements)
    assert policy.stall.total_seconds() > coded(length) / HOME_UPLINK


def test_a_small_model_waits_no_longer_than_a_minute_for_the_dead():
    assert policy_of(SPEC, (0, 10, 20, 100_000)).exchange_timeout.total_seconds() < 61


def test_rounds_of_fragments_are_overdue_after_their_share_of_the_time():
    whole, halves = (
        policy_of(
            SPEC.model_copy(update={"sync": SPEC.sync.model_copy(update={"fragments": count})}), (0, 10, 20, 1000)
        )
        for count in (1, 2)
    )
    assert [len(policy.fragments) for policy in (whole, halves)] == [1, 2]
    assert 2 * halves.round_max == whole.round_max == SPEC.sync.round_max_seconds


@pytest.mark.parametrize(
    ("micro_batches", "cuts", "judged"), [(1, (), True), (1, (1,), True), (16, (), True), (16, (1,), False)]
)
def test_sizes_are_compared_where_everybody_takes_as_many_steps_for_as_many_tokens(micro_batches, cuts, judged):
    pipeline = SPEC.pipeline.model_copy(update={"micro_batches": micro_batches})
    policy = policy_of(SPEC.model_copy(update={"pipeline": pipeline}), (0, 10, 20, 1000), cuts)
    assert bool(policy.screen.least) == judged


def test_without_screening_nobody_is_judged():
    spec = SPEC.model_copy(update={"sync": SPEC.sync.model_copy(update={"screening": False})})
    assert policy_of(spec, (0, 10, 20, 1000)).screen is None


def test_a_route_of_smaller_steps_than_a_replica_s_may_move_as_far_in_each() -> None:
    optimizer = SPEC.optimizer.model_copy(update={"accumulate": 4})
    pipeline = SPEC.pipeline.model_copy(update={"micro_batches": 1})
    spec = SPEC.model_copy(update={"optimizer": optimizer, "pipeline": pipeline})
    assert spec.tokens_per_flush < spec.tokens_per_step
    replicas, routes = screen_of(spec), screen_of(spec, cuts=(3,))
    assert replicas.max_change_per_token == pytest.approx(spec.optimizer.learning_rate / spec.tokens_per_step)
    assert routes.max_change_per_token == pytest.approx(spec.optimizer.learning_rate / spec.tokens_per_flush)
