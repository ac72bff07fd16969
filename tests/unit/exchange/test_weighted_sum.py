"""The average of a part is the same however the members' contributions are coded and cut into pieces."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import PartInvalid
from atoll.node.exchange.codecs import CODECS, PIECE_ELEMENTS
from atoll.node.exchange.screening import Screen, factors_from_products, inner_products
from atoll.node.exchange.weighted_sum import (
    encoded_mean,
    screening_factors,
    tensor_source,
    weighted_mean,
    weights_in_sum,
)

SCREEN = Screen(1e9)
some = settings(max_examples=15, deadline=None)
counts = st.sampled_from([1, 2, 3, 5, 17])
lengths = st.sampled_from([1, 129, 20_000, PIECE_ELEMENTS - 128, PIECE_ELEMENTS + 1, 2 * PIECE_ELEMENTS + 5000])


@some
@given(counts, lengths, st.sampled_from(sorted(CODECS)), st.data())
def test_the_bytes_are_those_of_the_mean_of_what_the_parts_decode_to(count, elements, name, data):
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 2**30)))
    codec = CODECS[name]
    own_E = torch.randn(elements, generator=rng)
    bodies = [codec.encode(torch.randn(elements, generator=rng)) for _ in range(count - 1)]
    values = [*(codec.decode(body, elements) for body in bodies), own_E]
    sources = [*(codec.open(body, elements).decode_into for body in bodies), tensor_source(own_E)]
    weights = data.draw(st.lists(st.integers(1, 1000), min_size=count, max_size=count))
    factors = [1.0, *data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=count - 1, max_size=count - 1))]
    expected = codec.encode(weighted_mean(values, weights, factors))
    assert encoded_mean(codec, sources, weights, factors, elements) == expected


@some
@given(counts, lengths, st.integers(0, 2**30))
def test_contributions_are_judged_as_if_they_were_whole(count, elements, seed):
    values_nE = torch.randn(count, elements, generator=torch.Generator().manual_seed(seed)) + 0.3
    values_nE[0] *= -1
    work = list(range(100, 100 + count))
    whole = factors_from_products(inner_products(list(values_nE)), work, elements, SCREEN)
    assert screening_factors([tensor_source(value_E) for value_E in values_nE], work, elements, SCREEN) == whole


@pytest.mark.parametrize("count", [2, 17])
def test_inner_products_are_those_of_the_vectors(count):
    values_nE = torch.randn(count, 50_000, generator=torch.Generator().manual_seed(3))
    expected_nn = values_nE.double() @ values_nE.double().T
    torch.testing.assert_close(inner_products(list(values_nE)), expected_nn, rtol=1e-12, atol=1e-9)


def test_a_sum_of_nobody_is_none():
    with pytest.raises(PartInvalid):
        encoded_mean(CODECS["fp16"], [tensor_source(torch.ones(4))], [1], [0.0], 4)


def test_a_mean_that_is_not_finite_is_none():
    huge_E = torch.full((300,), 3e38)
    with pytest.raises(PartInvalid):
        encoded_mean(CODECS["fp32"], [tensor_source(huge_E), tensor_source(huge_E)], [1, 1], [1.0, 2.0], 300)


def test_members_on_probation_weigh_a_quarter_of_the_sum_that_there_is() -> None:
    """The heaviest of the others is missing in this one."""
    weights, on_probation = [9000, 300, *[155] * 20], [False, False, *[True] * 20]
    there = weights_in_sum(weights, [0.0, 1.0, *[1.0] * 20], on_probation)
    assert there == [0, 300, *[5] * 20]
    assert weights_in_sum(weights, [0.0, 0.0, *[1.0] * 20], on_probation) == [0] * 22
    assert weights_in_sum([5, 7], [0.5, 0.0], [False, False]) == [5, 0]
