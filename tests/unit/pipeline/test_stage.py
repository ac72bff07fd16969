"""Stages with a real model: any cuts, any order of messages, aborts, and what a peer may not send."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.decoders import initialise
from support.in_process_route import Pick, oldest
from support.routes import RouteStages, layer_weights
from torch import Tensor

from atoll.core.built_in_shape import ModelShape
from atoll.core.errors import InvalidTransition, PeerMisbehaved
from atoll.core.run_spec import OptimizerSection
from atoll.node.model.built_in import BuiltInArchitecture
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.llama import Decoder
from atoll.node.model.span import Span
from atoll.node.pipeline.messages import (
    Activation,
    Begin,
    Gradient,
    Join,
    Message,
    Ready,
    Report,
    TiedGradient,
    TiedWeights,
    Verdict,
)
from atoll.node.pipeline.stage_checks import MicroBatchShape

SHAPE = ModelShape(48, 16, 3, 2, 1, 24, tie_embeddings=True)
SECTION = OptimizerSection(name="adamw", weight_decay=0.1, learning_rate=0.01, clip_norm=0.3)
ROOM = MicroBatchShape(samples=2, tokens=6)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def initial() -> Tensor:
    decoder = Decoder(SHAPE)
    initialise(decoder, 3)
    layout = FlatLayout.of(decoder)
    weights_E = torch.empty(layout.elements)
    layout.bind(decoder, weights_E, torch.zeros_like(weights_E))
    initialise(decoder, 3)
    return weights_E


def route(stages: int | list[Span], ahead: int = 0, pick: Pick = oldest) -> RouteStages:
    route_stages = RouteStages(BuiltInArchitecture(SHAPE), stages, SECTION, ROOM, ahead, pick)
    route_stages.load(initial())
    return route_stages


def flush_of(seed: int, micro_batches: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 48, (ROOM.samples, ROOM.tokens + 1), generator=generator) for _ in range(micro_batches)]


def spans_of(cuts: set[int]) -> list[Span]:
    edges = [0, *sorted(cuts), 5]
    return [Span(first, after - 1) for first, after in pairwise(edges)]


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(1, 4)), st.integers(0, 2), st.integers(0, 2**32), st.integers(0, 60))
def test_any_cuts_any_order_and_a_break_at_any_moment_give_the_same_bits(
    cuts: set[int], ahead: int, seed: int, moment: int
) -> None:
    whole, cut = route(1), route(spans_of(cuts), ahead, Random(seed).choice)
    assert cut.route.flush(flush_of(0)).loss == whole.route.flush(flush_of(0)).loss
    if decided_before_break(cut, flush_of(1), moment):
        whole.route.flush(flush_of(1))
    cut.route.settle()
    assert torch.equal(cut.weights(), whole.weights())
    assert cut.route.flush(flush_of(2)).loss == whole.route.flush(flush_of(2)).loss
    assert torch.equal(cut.weights(), whole.weights())


def decided_before_break(route_stages: RouteStages, tokens: list[Tensor], turns: int) -> bool:
    """Begin a flush, and break all links after so many turns."""
    route_stages.route.begin(tokens)
    for _ in range(turns):
        route_stages.route.turn()
    decided = route_stages.machines[0].last_result is not None
    route_stages.route.reconnect()
    return decided


def test_a_flush_begins_at_the_first_stage_of_a_route_that_is_ready() -> None:
    route_stages = route(2)
    with pytest.raises(InvalidTransition):
        route_stages.machines[0].begin_flush([])
    route_stages.route.begin(flush_of(0))
    for machine in route_stages.machines:
        with pytest.raises(InvalidTransition):
            machine.begin_flush([])


def test_what_was_settled_and_not_decided_is_dropped_when_other_weights_are_loaded() -> None:
    route_stages = route(2)
    route_stages.route.begin(flush_of(0))
    last = route_stages.machines[1]
    while not (last.last_flush == 0 and last.awaiting_verdict):
        route_stages.route.turn()
    last.disconnect()
    last.drop_undecided()
    assert not bool(route_stages.models[1].gradients_E.any())


X_BTD, TARGETS_BT = torch.zeros(2, 6, 16), torch.zeros(2, 6, dtype=torch.int64)
MATRIX_VD = torch.zeros(48, 16)

BAD: dict[str, tuple[int, int, Message]] = {  # to which stage of three, from which, and what
    "another shape": (1, 0, Activation(1, 1, X_BTD[..., :15], TARGETS_BT)),
    "too many samples": (1, 0, Activation(1, 1, torch.zeros(3, 6, 16), torch.zeros(3, 6, dtype=torch.int64))),
    "no samples": (1, 0, Activation(1, 1, X_BTD[:0], TARGETS_BT[:0])),
    "another dtype": (1, 0, Activation(1, 1, X_BTD.half(), TARGETS_BT)),
    "targets of another shape": (1, 0, Activation(1, 1, X_BTD, TARGETS_BT[:, :5])),
    "targets of another dtype": (1, 0, Activation(1, 1, X_BTD, TARGETS_BT.int())),
    "targets outside the vocabulary": (1, 0, Activation(1, 1, X_BTD, TARGETS_BT + 48)),
    "a stage that skips one": (2, 0, Activation(1, 1, X_BTD, TARGETS_BT)),
    "a stage downstream": (1, 2, Activation(1, 1, X_BTD, TARGETS_BT)),
    "a second join": (1, 0, Join()),
    "a join from downstream": (1, 2, Join()),
    "a second ready": (1, 2, Ready()),
    "a ready from upstream": (1, 0, Ready()),
    "a replay": (1, 0, Activation(1, 0, X_BTD, TARGETS_BT)),
    "more than its credits": (1, 0, Activation(1, 3, X_BTD, TARGETS_BT)),
    "a micro-batch that is not of the flush": (1, 0, Activation(1, 4, X_BTD, TARGETS_BT)),
    "a negative micro-batch": (1, 0, Activation(1, -1, X_BTD, TARGETS_BT)),
    "a flush before it begins": (1, 0, Activation(2, 0, X_BTD, TARGETS_BT)),
    "a flush far ahead": (1, 0, Begin(4, 4)),
    "a second beginning": (1, 0, Begin(1, 4)),
    "no micro-batches": (1, 0, Begin(2, 0)),
    "too many micro-batches": (1, 0, Begin(2, 2**16 + 1)),
    "a gradient of what was not sent": (1, 2, Gradient(1, 1, X_BTD)),
    "a gradient of another shape": (0, 1, Gradient(1, 0, X_BTD[:, :5])),
    "a gradient of other samples": (0, 1, Gradient(1, 0, X_BTD[:1])),
    "a gradient for the last stage": (2, 1, Gradient(1, 0, X_BTD)),
    "a report too early": (0, 1, Report(1, (1.0,) * 4, 1.0)),
    "a verdict before the report": (1, 0, Verdict(1, 1.0)),
    "a verdict from downstream": (1, 2, Verdict(1, 1.0)),
    "a verdict for the driver": (0, 1, Verdict(1, 1.0)),
    "a tied gradient too early": (0, 2, TiedGradient(1, MATRIX_VD)),
    "a tied gradient for another": (1, 2, TiedGradient(1, MATRIX_VD)),
    "tied weights of another shape": (2, 0, TiedWeights(2, MATRIX_VD.T)),
    "tied weights for another": (1, 0, TiedWeights(1, MATRIX_VD)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_a_peer_may_not_send_is_refused_and_the_flush_goes_on(name: str) -> None:
    receiver, sender, message = BAD[name]
    disturbed, plain = route(3), route(3)
    flush = disturbed.route.begin(flush_of(0))
    while disturbed.machines[1].in_flight == 0:
        disturbed.route.turn()
    with pytest.raises(PeerMisbehaved):
        disturbed.machines[receiver].deliver(sender, message)
    while any(machine.last_flush < flush for machine in disturbed.machines):
        assert disturbed.route.turn(), "it stands still"
    plain.route.flush(flush_of(0))
    assert torch.equal(disturbed.weights(), plain.weights())


def test_a_report_of_another_number_of_layers_is_refused() -> None:
    route_stages = route(2)
    flush = route_stages.route.begin(flush_of(0, 1))
    while route_stages.machines[0].in_flight == 0:
        route_stages.route.turn()
    with pytest.raises(PeerMisbehaved, match="has 5 norms"):
        route_stages.machines[0].deliver(1, Report(flush, (1.0,) * 5, 1.0))


def test_nobody_works_before_the_route_is_ready() -> None:
    route_stages = route(3)
    with pytest.raises(PeerMisbehaved, match="before all stages were ready"):
        route_stages.machines[1].deliver(0, Begin(1, 4))


def test_what_comes_late_from_a_flush_that_is_over_is_dropped() -> None:
    route_stages = route(2)
    route_stages.route.flush(flush_of(0))
    before_E = route_stages.weights()
    route_stages.machines[1].deliver(0, Activation(1, 0, torch.full_like(X_BTD, torch.nan), TARGETS_BT))
    assert route_stages.machines[1].advance() is None
    assert torch.equal(route_stages.weights(), before_E)


def test_values_that_are_not_finite_cost_a_step_and_not_the_weights() -> None:
    route_stages = route(3)
    before_E, broken = route_stages.weights(), layer_weights(route_stages.models[1], 2)[:1]
    whole = broken.clone()
    broken.fill_(torch.nan)
    assert route_stages.route.flush(flush_of(0)).verdict.factor is None
    broken.copy_(whole)
    assert torch.equal(route_stages.weights(), before_E)
    assert [stage.skipped_steps for stage in route_stages.stages] == [1, 1, 1]
