"""The prose of README, guides and explanations has short sentences; `docs/sentences.py` counts."""

from __future__ import annotations

import importlib.util

import pytest

from .shipped import ROOT

_spec = importlib.util.spec_from_file_location("sentences", ROOT / "docs/sentences.py")
assert _spec
assert _spec.loader
counted = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(counted)


@pytest.mark.parametrize("name", ["README and guides", "docs/explain"])
def test_mean_is_within_its_limit(name: str) -> None:
    limit, pages = counted.PAGES[name]
    assert counted.mean_words(pages) <= limit


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("Two words. Three words here.", [2, 3]),
        ("A list:\n\n- one item\n- another `inline code` item", [2, 2, 3]),
        ("# Heading\n\nOne [linked word](page.md#place).\n\n| a | table |\n|---|---|\n", [3]),
        ("Before:\n\n```sh\natoll join\n```\n\nAfter – it.", [1, 2]),
        ("Half of 0.5 is 0.25; a semicolon ends nothing.", [9]),
    ],
)
def test_what_counts_as_a_sentence(text: str, lengths: list[int]) -> None:
    assert [counted.words(sentence) for sentence in counted.sentences(text)] == lengths
