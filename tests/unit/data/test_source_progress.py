"""Tokens of each source that a run has trained."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.data_position import DataPosition, SampleRange, drop_samples
from atoll.node.data.source_deal import SourceDeal, WeighedSources
from atoll.node.data.source_progress import MixtureProgress

SOURCES = (("web", 300), ("code", 50), ("books", 20))
STAGES = (WeighedSources(0, (3.0, 1.0, 0.0)), WeighedSources(400, (0.0, 1.0, 1.0)))
CUTS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60), st.sampled_from(["ann", "bob", "back", "used"])))


@settings(max_examples=60)
@given(CUTS)
def test_what_is_trained_is_counted_and_what_somebody_holds_is_not(cuts: list[tuple[int, int, str]]) -> None:
    cursor, used = 0, list[SampleRange]()
    holdings: dict[str, tuple[SampleRange, ...]] = {"ann": (), "bob": (), "back": ()}
    for length, done, owner in cuts:
        piece = (cursor, cursor + length)
        cursor += length
        if owner == "used":
            used.append(piece)
            continue
        used += [(piece[0], piece[0] + min(done, length))]
        holdings[owner] += drop_samples([piece], done)
    position = DataPosition(cursor, holdings.pop("back"), holdings)
    found = {row.name: row for row in MixtureProgress(SOURCES, STAGES, 8).at(position)}
    deal = SourceDeal(STAGES)
    trained = Counter(SOURCES[deal.deal(sample)[0]][0] for start, end in used for sample in range(start, end))
    assert {name: row.tokens for name, row in found.items() if row.tokens} == {
        name: 8 * samples for name, samples in trained.items()
    }
    if trained:
        assert sum(row.share for row in found.values()) == pytest.approx(1)
        assert sum(row.share_wanted for row in found.values()) == pytest.approx(1)
        assert all(row.epochs == trained[name] / dict(SOURCES)[name] for name, row in found.items())


def test_shares_come_close_to_the_weights() -> None:
    found = MixtureProgress(SOURCES, STAGES[:1], 8).at(DataPosition(10_000))
    assert [row.name for row in found] == ["web", "code"]  # books has no weight
    assert [row.share_wanted for row in found] == [0.75, 0.25]
    assert [row.share for row in found] == pytest.approx([0.75, 0.25], abs=0.001)


def test_a_position_beyond_reason_tells_nothing() -> None:
    assert MixtureProgress(SOURCES, STAGES, 8).at(DataPosition(2**64 - 1)) == ()
    assert MixtureProgress(SOURCES, STAGES, 8).at(DataPosition(5, holdings={"ann": ((0, 2**64 - 1),)})) == ()
