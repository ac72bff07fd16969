"""Checkpoints of spans make the whole model, or say what is missing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.reef import MODEL, SPEC

from atoll.core.errors import CheckpointCorrupt, NotFound
from atoll.core.manifest import Head
from atoll.core.run_spec import parse_run_spec
from atoll.node.averaging.outer import layer_states
from atoll.node.state.checkpoint import Checkpoint
from atoll.node.state.joined import join
from atoll.node.state.tensor_file import Layers
from atoll.v1 import manifest_pb2

OFFSETS = (0, 3, 4, 9, 9, 12)
ANCHOR, MOMENTUM = torch.arange(12.0), -torch.arange(12.0)
SPEC_OF_RUN = parse_run_spec(SPEC.format(model=MODEL, nodes=1, tokens=1, corpus="x", round_tokens=1, codec="int4"))


def head(number: int = 3) -> Head:
    manifest = manifest_pb2.Manifest(layers=layer_states(ANCHOR, MOMENTUM, OFFSETS, number))
    manifest.round.number = number
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))


def held(first: int, last: int, number: int = 3) -> Checkpoint:
    start, end = OFFSETS[first], OFFSETS[last + 1]
    names = tuple(f"layer {layer}" for layer in range(first, last + 1))
    layers = Layers(names, tuple(offset - start for offset in OFFSETS[first : last + 2]), first)
    return Checkpoint(SPEC_OF_RUN, head(number), layers, ANCHOR[start:end], MOMENTUM[start:end])


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted), min_size=1, max_size=6))
def test_what_covers_all_layers_is_the_whole_model_and_nothing_else_is(spans):
    covered = {layer for first, last in spans for layer in range(first, last + 1)}
    checkpoints = [held(first, last) for first, last in spans]
    if covered == set(range(5)):
        whole = join(checkpoints)
        assert torch.equal(whole.anchor_E, ANCHOR)
        assert torch.equal(whole.momentum_E, MOMENTUM)
        assert whole.layers == held(0, 4).layers
    else:
        with pytest.raises(NotFound, match=f"layer {min(set(range(5)) - covered)} "):
            join(checkpoints)


def test_states_of_two_rounds_are_never_joined():
    with pytest.raises(CheckpointCorrupt, match="not of one round"):
        join([held(0, 2), held(3, 4, number=4)])


def test_a_whole_model_needs_nobody_else():
    whole = held(0, 4)
    assert join([whole]) is whole
