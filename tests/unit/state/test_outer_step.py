"""The outer step and its schedule: what every member must compute alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.fragments import split_into_fragments
from atoll.core.manifest import Head
from atoll.core.round_schedule import due_tokens
from atoll.core.run_spec import SyncSection
from atoll.node.exchange.weighted_sum import weighted_mean
from atoll.node.rounds.outer_schedule import is_stale, outer_schedule
from atoll.node.state.anchor import AnchorState
from atoll.node.state.outer_step import layer_states, matches_digests, outer_step
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2


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


def head_of(state: AnchorState, number: int) -> Head:
    """The manifest that says what the state is."""
    manifest = manifest_pb2.Manifest(round=pb.RoundId(number=number), layers=state.layer_states(number))
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))


@given(st.permutations(range(8)), st.lists(st.integers(0, 7), max_size=4))
def test_a_step_in_parts_is_the_step_of_the_whole(order, wrong):
    vectors = torch.randn(3, 800, generator=torch.Generator().manual_seed(0))
    state = AnchorState(vectors[0], (0, 250, 800))
    state.momentum_E = vectors[1]
    staging = state.staging(split_into_fragments(state.offsets, 1)[0], 0.7, 0.9)
    for part in wrong:  # and repaired later
        staging.take(100 * part, torch.zeros(100))
    for part in order:
        staging.take(100 * part, vectors[2, 100 * part : 100 * part + 100])
    staged = staging.finish(head_of(state, 4))
    whole = outer_step(*vectors, 0.7, 0.9)
    assert torch.equal(staged.anchor_E, whole[0])
    assert torch.equal(staged.momentum_E, whole[1])
    assert staged.layers == layer_states(*whole, state.offsets, 5)


def test_a_round_of_a_fragment_changes_its_layers_and_no_others():
    vectors = torch.randn(3, 800, generator=torch.Generator().manual_seed(0))
    state = AnchorState(vectors[0].clone(), (0, 100, 250, 600, 800))
    state.momentum_E = vectors[1].clone()
    before = head_of(state, 4)
    first, second = split_into_fragments(state.offsets, 2)
    staging = state.staging(second, 0.7, 0.9)
    staging.take(0, vectors[2, second.start : second.end])
    staged = staging.finish(before)
    assert staged.layers[: second.first_layer] == tuple(before.manifest.layers[: second.first_layer])
    assert [item.round for item in staged.layers] == [4] * len(first.layers) + [5] * len(second.layers)
    state.commit(staged)
    whole = outer_step(*vectors, 0.7, 0.9)
    for found, old, new in ((state.anchor_E, vectors[0], whole[0]), (state.momentum_E, vectors[1], whole[1])):
        assert torch.equal(found[: second.start], old[: second.start])
        assert torch.equal(found[second.start :], new[second.start :])
    assert matches_digests(staged.layers, state.anchor_E, state.momentum_E, state.offsets)
    state.momentum_E[0] += 1
    assert not matches_digests(staged.layers, state.anchor_E, state.momentum_E, state.offsets)


@given(st.integers(0, 10**9), st.integers(1, 10**9))
def test_the_schedule_runs_from_plain_averaging_to_the_spec(committed, warmup):
    outer = {"outer_learning_rate": 0.7, "outer_momentum": 0.8}
    sync = SyncSection(round_tokens=1, outer_warmup_tokens=warmup, **outer)
    rate, momentum = outer_schedule(sync, committed)
    assert 0.7 <= rate <= 1.0
    assert 0.0 <= momentum <= 0.8
    assert outer_schedule(sync, 0) == (1.0, 0.0)
    assert outer_schedule(sync, warmup) == (1.0 + (0.7 - 1.0), 0.8)
    assert outer_schedule(SyncSection(round_tokens=1, **outer), committed) == (1.0 + (0.7 - 1.0), 0.8)


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
