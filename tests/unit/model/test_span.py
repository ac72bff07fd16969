"""Spans: invalid ranges are refused."""

from __future__ import annotations

import pytest

from atoll.core.errors import InvalidRequest
from atoll.node.model.span import Span


def test_a_span_has_a_first_layer_not_after_its_last() -> None:
    for first, last in ((-1, 2), (3, 2)):
        with pytest.raises(InvalidRequest, match="not a span"):
            Span(first, last)
    with pytest.raises(InvalidRequest, match="layers 0 to 4"):
        Span(3, 5).check_within(5)
