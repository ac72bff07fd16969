"""Which elements and samples are whose on a node with several devices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.node.pipeline.built_in import BuiltIn
from atoll.node.pipeline.span import Span
from atoll.node.pipeline.span_model import layout_of
from atoll.node.training.device_names import names_of
from atoll.node.training.flat import FlatLayout
from atoll.node.training.group import Group, devices_of, facts_of, nobody
from atoll.node.training.held import ALL, Pieces, SpreadWeights, WholeWeights
from atoll.node.training.shape import ModelShape

CPU = torch.device("cpu")
SHAPES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 3)), min_size=1, max_size=5)


def layout_with(shapes: list[tuple[int, int]]) -> FlatLayout:
    return FlatLayout.of_layers({f"p{number}": torch.empty(shape)} for number, shape in enumerate(shapes))


def weights_of(layout: FlatLayout, rank: int, size: int, values_E: torch.Tensor) -> SpreadWeights:
    pieces = Pieces.of(layout, rank, size)
    return SpreadWeights(pieces, [values_E[it].clone() for it in pieces.slices], CPU)


@given(shapes=SHAPES, size=st.integers(1, 5), data=st.data())
def test_pieces_of_all_devices_make_the_whole_and_each_knows_its_own(shapes, size, data):
    layout = layout_with(shapes)
    values_E = torch.arange(layout.elements, dtype=torch.float32)
    start = data.draw(st.integers(0, layout.elements))
    part = slice(start, data.draw(st.integers(start, layout.elements)))
    gathered_E, moved_E = torch.full_like(values_E, -1), torch.zeros_like(values_E)
    for rank in range(size):
        its = weights_of(layout, rank, size, values_E)
        assert torch.equal(its.take(values_E), its.read())
        assert torch.equal(its.read()[its.here(part)], its.read(part))
        its.put(its.read(part), gathered_E, part)
        with its.changed(part) as values:
            values.add_(1)
        its.put(its.read(), moved_E)
    assert torch.equal(gathered_E[part], values_E[part])
    assert torch.all(gathered_E[: part.start] == -1)
    assert torch.all(gathered_E[part.stop :] == -1)
    whole = WholeWeights(values_E)
    with whole.changed(part) as values:
        values.add_(1)
    assert torch.equal(moved_E, values_E)


@given(shapes=SHAPES, size=st.integers(1, 5))
def test_parameters_are_cut_where_torch_cuts_them(shapes, size):
    layout = layout_with(shapes)
    values_E = torch.arange(layout.elements)
    for rank in range(size):
        for (_, view), it in zip(layout.views(values_E), Pieces.of(layout, rank, size).slices, strict=True):
            chunks = torch.chunk(view, size)
            expected = chunks[rank] if rank < len(chunks) else view[:0]
            assert torch.equal(values_E[it], expected.flatten())


@given(rows=st.integers(1, 20), size=st.integers(1, 5), at_most=st.integers(1, 6))
def test_every_sample_counts_once_and_all_devices_take_as_many_turns(rows, size, at_most):
    batch_BT = torch.arange(rows).view(rows, 1)
    weights, turns = torch.zeros(rows), set()
    for rank in range(size):
        shares = list(Group(rank, size, CPU, None, nobody).share(batch_BT, at_most))  # type: ignore[arg-type]
        turns.add(len(shares))
        for share_BT, times in shares:
            assert 1 <= len(share_BT) <= at_most
            for row in share_BT.flatten().tolist():  # a mean over the rows, over `times`
                weights[row] += 1 / len(share_BT) / times
    assert len(turns) == 1
    torch.testing.assert_close(weights, torch.full((rows,), 1 / rows))


def test_what_the_built_in_model_keeps_where_blocks_begin():
    layout = layout_of(BuiltIn(ModelShape(11, 8, 2, 2, 2, 12)).cut(Span(0, 3)))
    for rank in range(3):
        its = weights_of(layout, rank, 3, torch.zeros(layout.elements))
        offsets = [its.here(slice(0, end)).stop for end in layout.layer_offsets]
        assert offsets[-1] == its.elements == its.take(torch.zeros(layout.elements), ALL).numel()
        assert offsets == sorted(offsets)


@pytest.mark.parametrize(
    "name", ["cpu,", "cpu,auto", "auto,auto", "cpu,cuda:0", "mps,mps", "cuda:0,cuda:0", "cuda,cuda:0"]
)
def test_devices_that_cannot_work_together_are_named(name):
    with pytest.raises(ConfigError, match=r"several GPUs of one kind|at a comma"):
        names_of(name)
    with pytest.raises(ConfigError):
        devices_of(name)


def test_processors_share_one_memory():
    alone, both = facts_of([CPU], memory_bytes=10**9), facts_of([CPU, CPU], memory_bytes=10**9)
    assert both.memory_bytes == alone.memory_bytes
    assert both.device == "cpu,cpu"
    assert both.name == f"2 × {alone.name}"
