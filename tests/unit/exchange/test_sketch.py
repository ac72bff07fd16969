"""Sketches are linear, keep norms, and are the same on every machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.exchange.sketch import BUCKETS, Sketcher

SEED = b"0123456789abcdef0123456789abcdef"
some = settings(max_examples=50, deadline=None)


def vector(elements: int, seed: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


@some
@given(st.integers(1, 4000), st.integers(0, 2**20), st.binary(min_size=1, max_size=32))
def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches(elements: int, number: int, seed: bytes) -> None:
    sketcher = Sketcher(seed, elements)
    one_E, other_E = vector(elements, number), vector(elements, number + 1)
    both = sketcher.of(0.25 * one_E - 3 * other_E)
    assert torch.allclose(both, 0.25 * sketcher.of(one_E) - 3 * sketcher.of(other_E), atol=1e-3)


@some
@given(st.integers(1, 5000), st.integers(1, 8))
def test_pieces_make_the_sketch_of_the_whole(elements: int, rows: int) -> None:
    sketcher, values_E = Sketcher(SEED, elements), vector(elements, 1)
    running = sketcher.begin()
    for first in range(0, elements, 128 * rows):
        running.add(first, values_E[first : first + 128 * rows])
    assert torch.allclose(running.finish(), sketcher.of(values_E), atol=1e-4)


@some
@given(st.integers(0, 99_999), st.floats(-(2**20), 2**20, width=32))
def test_one_element_keeps_its_size_wherever_it_is(place: int, value: float) -> None:
    values_E = torch.zeros(100_000)
    values_E[place] = value
    sketch = Sketcher(SEED, 100_000).of(values_E)
    assert sketch.double().norm() == abs(value)
    assert int((sketch != 0).sum()) <= 1


@pytest.mark.parametrize("column", [None, 7])
def test_norms_and_products_are_those_of_the_vectors(column: int | None) -> None:
    """Also if everything stands in one column of the rows: their shifts spread it."""
    ratios, cosines = [], []
    for number in range(60):
        one_E = vector(40_000, number)
        if column is not None:
            one_E[torch.arange(40_000) % 128 != column] = 0
        other_E = 0.5 * one_E + one_E.norm() / 200 * vector(40_000, number + 1000)
        sketcher = Sketcher(SEED + bytes([number]), 40_000)
        one, other = sketcher.of(one_E), sketcher.of(other_E)
        ratios.append(float(one.norm() / one_E.norm()))
        cosines.append(float((one @ other - one_E @ other_E) / (one_E.norm() * other_E.norm())))
    assert 0.97 < sum(ratios) / 60 < 1.03
    assert 0.5 < min(ratios) <= max(ratios) < 1.6
    assert max(map(abs, cosines)) < 7 / BUCKETS**0.5


def test_signs_and_buckets_are_the_same_on_every_machine() -> None:
    sketch = Sketcher(SEED, 1000).of(torch.arange(1000, dtype=torch.float32))
    assert sketch[:8].tolist() == [-2239.0, 1547.0, 153.0, 1949.0, 3999.0, -1381.0, -871.0, -1727.0]
