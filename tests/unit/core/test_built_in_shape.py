"""Shapes of the built-in decoder. `training/test_learning_rate_and_shape.py` compares them with the built model."""

from __future__ import annotations

import pytest

from atoll.core.built_in_shape import resolve_shape
from atoll.core.errors import UnsupportedModel
from atoll.core.model_spec import ModelSection


def test_nano_is_about_a_million_and_7b_about_seven_billion() -> None:
    assert 0.8e6 < resolve_shape(ModelSection(), 256).parameters < 1.2e6
    assert 6.5e9 < resolve_shape(ModelSection(preset="7b", vocabulary=32_000), 256).parameters < 7e9


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ({"heads": 3}, "not a multiple of heads"),
        ({"kv_heads": 3}, "not a multiple of kv_heads"),
        ({"dimension": 36, "heads": 4, "kv_heads": 4}, "needs an even number"),
        ({"vocabulary": 100}, "smaller than the tokenizer's 256"),
    ],
)
def test_inconsistent_dimensions_are_refused(numbers: dict[str, int], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        resolve_shape(ModelSection.model_validate(numbers), 256)
