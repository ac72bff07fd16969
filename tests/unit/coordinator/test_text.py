"""Text of others: whatever comes in, what is kept can be printed anywhere."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from atoll.coordinator.sanitize import clean, enum_word
from atoll.v1 import membership_pb2 as mb


@given(st.text(), st.integers(1, 50))
def test_clean_text_is_one_printable_line_within_its_limit(text: str, limit: int) -> None:
    kept = clean(text, limit)
    assert len(kept) <= limit
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in kept)
    assert clean(kept, limit) == kept
    assert len(kept.splitlines()) <= 1


@given(st.text(st.characters(categories=["L", "N", "P", "S"]), max_size=50))
def test_plain_words_stay_as_they_are(text: str) -> None:
    assert clean(text, 50) == text


def test_states_have_words_and_unknown_ones_stay_numbers() -> None:
    assert enum_word(mb.NodeState.DESCRIPTOR, mb.NODE_STATE_CATCHING_UP) == "catching_up"
    assert enum_word(mb.NodeState.DESCRIPTOR, 99) == "99"
