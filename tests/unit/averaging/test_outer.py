"""The outer step and its schedule: what every member must compute alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.run_spec import SyncSection
from atoll.node.averaging.outer import (
    due_tokens,
    is_stale,
    layer_states,
    outer_schedule,
    outer_step,
    weighted_mean,
)
from atoll.node.state.anchor import AnchorState


def test_the_outer_step_is_sgd_with_nesterov_momentum():
    parameter = torch.nn.Parameter(torch.randn(1000, generator=torch.Generator().manual_seed(0)))
    theirs = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    anchor, momentum = parameter.detach().clone(), torch.zeros(1000)
    for seed in range(5):
        gradient = torch.randn(1000, generator=torch.Generator().manual_seed(seed))
        parameter.grad = gradient.clone()
        theirs.step()
        anchor, momentum = outer_step(anchor, momentum, gradient, 0.7, 0.9)
        assert torch.allclose(anchor, parameter, atol=1e-5)


def test_the_outer_step_leaves_its_arguments_alone():
    anchor, momentum, average = torch.ones(4), torch.ones(4), torch.ones(4)
    outer_step(anchor, momentum, average, 0.7, 0.9)
    assert all(torch.equal(vector, torch.ones(4)) for vector in (anchor, momentum, average))


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=4))
def test_a_step_in_parts_is_the_step_of_the_whole(order, wrong):
    vectors = torch.randn(3, 800, generator=torch.Generator().manual_seed(0))
    state = AnchorState(vectors[0], (0, 250, 800))
    state.momentum_E = vectors[1]
    staging = state.staging(0.7, 0.9)
    for part in wrong:  # and repaired later
        staging.take(100 * part, torch.zeros(100))
    for part in order:
        staging.take(100 * part, vectors[2, 100 * part : 100 * part + 100])
    staged = staging.finish(5)
    whole = outer_step(*vectors, 0.7, 0.9)
    assert torch.equal(staged.anchor_E, whole[0])
    assert torch.equal(staged.momentum_E, whole[1])
    assert staged.layers == layer_states(*whole, state.offsets, 5)


@given(st.integers(0, 10**9), st.integers(1, 10**9))
def test_the_schedule_runs_from_plain_averaging_to_the_spec(committed, warmup):
    sync = SyncSection(round_tokens=1, outer_warmup_tokens=warmup)
    rate, momentum = outer_schedule(sync, committed)
    assert 0.7 <= rate <= 1.0
    assert 0.0 <= momentum <= 0.8
    assert outer_schedule(sync, 0) == (1.0, 0.0)
    assert outer_schedule(sync, warmup) == (1.0 + (0.7 - 1.0), 0.8)
    assert outer_schedule(SyncSection(round_tokens=1), committed) == (1.0 + (0.7 - 1.0), 0.8)


@given(st.integers(1, 10**6), st.integers(0, 10**9), st.integers(1, 10**4))
def test_rounds_grow_up_to_round_tokens(round_tokens, committed, first):
    sync = SyncSection(round_tokens=round_tokens)
    due = due_tokens(sync, committed, first)
    assert 1 <= due <= round_tokens
    assert due_tokens(sync, committed + 1000, first) >= due
    assert due_tokens(sync, 10**9 * 100, first) == round_tokens


@pytest.mark.parametrize(
    ("tokens", "usual", "rounds", "stale"),
    [
        (1000, 1000, 1, False),
        (1000, 1000, 3, False),
        (1000, 1000, 4, True),  # frozen at the end of a round
        (10_000, 1000, 10, False),  # cut off, and trained on
        (0, 1000, 0, False),  # not a round was missed
        (500, 0, 9, False),  # a newcomer: nobody knows its pace
    ],
)
def test_progress_is_stale_when_it_is_little_beside_what_was_missed(tokens, usual, rounds, stale):
    assert is_stale(tokens, usual, rounds) is stale


def test_the_weighted_mean_leaves_out_weight_zero():
    values = [torch.full((3,), 1.0), torch.full((3,), float("nan")), torch.full((3,), 4.0)]
    assert torch.allclose(weighted_mean(values, [2, 0, 1]), torch.full((3,), 2.0))


def test_a_flipped_bit_changes_only_its_layers_digest():
    anchor, momentum = torch.arange(30.0), torch.zeros(30)
    before = layer_states(anchor, momentum, (0, 10, 30), 3)
    momentum[12] = -0.0
    after = layer_states(anchor, momentum, (0, 10, 30), 3)
    assert before[0] == after[0]
    assert before[1].anchor_digest == after[1].anchor_digest
    assert before[1].momentum_digest != after[1].momentum_digest
