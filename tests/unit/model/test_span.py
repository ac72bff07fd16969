"""Spans cut a model without gaps, and a route without them is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import InvalidRequest
from atoll.node.model.span import Span, check_route, equal_cuts


@given(st.integers(1, 100), st.data())
def test_equal_cuts_make_a_route(layers: int, data: st.DataObject) -> None:
    spans = equal_cuts(layers, data.draw(st.integers(1, layers)))
    check_route(spans, layers)
    assert max(map(len, spans)) - min(map(len, spans)) <= 1


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(0, 1), (3, 4)], "layers 2 to 2 are missing"),
        ([(0, 2), (2, 4)], "layers 2 to 2 come twice"),
        ([(1, 4)], "layers 0 to 0 are missing"),
        ([(0, 3)], "ends after layer 3"),
        ([(0, 5)], "ends after layer 5"),
        ([], "ends after layer -1"),
    ],
)
def test_gaps_and_overlaps_are_named(spans: list[tuple[int, int]], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        check_route([Span(first, last) for first, last in spans], 5)


def test_a_span_has_a_first_layer_not_after_its_last() -> None:
    for first, last in ((-1, 2), (3, 2)):
        with pytest.raises(InvalidRequest, match="not a span"):
            Span(first, last)
    with pytest.raises(InvalidRequest, match="layers 0 to 4"):
        Span(3, 5).check_within(5)
