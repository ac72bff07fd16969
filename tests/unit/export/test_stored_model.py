"""Checkpoints of spans join to the whole model, or the missing layers are named."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.process_swarm import MODEL, SPEC
from support.small_state import ANN, BOB, stored

from atoll.core import protocol
from atoll.core.errors import CheckpointCorrupt, NotFound
from atoll.core.manifest import Head, sign_vote
from atoll.core.quorum import Ballot
from atoll.core.round_id import RoundId
from atoll.core.run_spec import parse_run_spec
from atoll.core.units import layers_text
from atoll.node.export.stored_model import StoredModel, join_checkpoints
from atoll.node.state.checkpoint import CheckpointState
from atoll.node.state.outer_step import layer_states
from atoll.node.state.tensor_file import LayerLayout
from atoll.v1 import manifest_pb2

OFFSETS = (0, 3, 4, 9, 9, 12)
ANCHOR, MOMENTUM = torch.arange(12.0), -torch.arange(12.0)
SPEC_OF_RUN = parse_run_spec(SPEC.format(model=MODEL, nodes=1, tokens=1, corpus="x", round_tokens=1, codec="int4"))


def head(number: int = 3) -> Head:
    layers = layer_states(ANCHOR, MOMENTUM, OFFSETS, number)
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(), round=RoundId("reef", 1, 0, number, 0).to_proto(), layers=layers
    )
    payload = manifest.SerializeToString(deterministic=True)
    votes = [sign_vote(member, payload, Ballot(1, 0)) for member in (ANN, BOB)]
    return Head(manifest_pb2.CommittedManifest(payload=payload, signatures=votes, ballot_plan_version=1))


def held(first: int, last: int, number: int = 3) -> CheckpointState:
    start, end = OFFSETS[first], OFFSETS[last + 1]
    names = tuple(f"layer {layer}" for layer in range(first, last + 1))
    layers = LayerLayout(names, tuple(offset - start for offset in OFFSETS[first : last + 2]), first)
    return CheckpointState(head(number), layers, ANCHOR[start:end], MOMENTUM[start:end])


@contextmanager
def on_disk(*states: CheckpointState) -> Iterator[list[StoredModel]]:
    with ExitStack() as opened:
        yield [opened.enter_context(stored(SPEC_OF_RUN, state)) for state in states]


def anchor_of(model: StoredModel) -> torch.Tensor:
    return torch.cat([model.read(start, end) for start, end in pairwise(model.layers.offsets)])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).map(sorted), min_size=1, max_size=6))
def test_only_checkpoints_that_cover_all_layers_join_to_the_whole_model(spans):
    covered = {layer for first, last in spans for layer in range(first, last + 1)}
    with on_disk(*(held(first, last) for first, last in spans)) as models:
        if covered == set(range(5)):
            whole = join_checkpoints(models)
            assert torch.equal(anchor_of(whole), ANCHOR)
            assert whole.layers == held(0, 4).layers
        else:
            missing = set(range(5)) - covered
            with pytest.raises(NotFound, match=f"holds {layers_text(missing)} of round 3"):
                join_checkpoints(models)


def test_checkpoints_of_two_rounds_are_never_joined():
    with (
        on_disk(held(0, 2), held(3, 4, number=4)) as models,
        pytest.raises(CheckpointCorrupt, match="not of one round"),
    ):
        join_checkpoints(models)


def test_a_checkpoint_of_the_whole_model_needs_no_other():
    with on_disk(held(0, 4)) as (whole,):
        assert join_checkpoints([whole]) == whole


def test_a_part_of_a_layer_is_read_and_nothing_beyond_it():
    with on_disk(held(1, 4)) as (some,):
        assert torch.equal(some.read(2, 5), ANCHOR[5:8])
        assert some.read(6, 6).numel() == 0
        with pytest.raises(ValueError, match="not in one layer"):
            some.read(0, 2)


def test_a_file_that_is_truncated_after_the_check_is_not_read():
    with on_disk(held(0, 4)) as (whole,):
        os.truncate(whole.layer_locations[0].file.name, whole.layer_locations[4].offset)
        assert torch.equal(whole.read(4, 9), ANCHOR[4:9])
        with pytest.raises(CheckpointCorrupt, match="cut short"):
            whole.read(9, 12)


def test_a_checkpoint_that_is_removed_while_open_can_still_be_read():
    with on_disk(held(0, 4)) as (whole,):
        Path(whole.layer_locations[0].file.name).unlink()
        assert torch.equal(anchor_of(whole), ANCHOR)
