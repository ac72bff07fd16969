"""The vector is cut so that every element has exactly one reducer, whatever the numbers."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.partition import (
    BLOCK_ELEMENTS,
    MAX_PART_BYTES,
    MIN_PART_ELEMENTS,
    ReduceRange,
    part_elements,
    partition,
    parts,
)

peers = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=9, unique=True)


@given(st.integers(1, 10**6), peers, st.data(), st.integers(1, 64))
def test_ranges_and_parts_cover_everything_once(elements, members, data, part_blocks):
    bandwidth = {peer: data.draw(st.integers(0, 10**10)) for peer in members}
    pieces = partition(elements, members, bandwidth)
    position = 0
    for piece in pieces:
        assert piece.start == position
        assert piece.start % BLOCK_ELEMENTS == 0 or piece.start == piece.end == elements
        cut = parts(piece, part_blocks * BLOCK_ELEMENTS)
        assert [part.index for part in cut] == list(range(len(cut)))
        assert sum(part.elements for part in cut) == piece.end - piece.start
        position = piece.end
    assert position == elements


@given(st.integers(10**4, 10**6), st.integers(1, 10**9), st.integers(1, 10**9))
def test_shares_follow_bandwidth(elements, fast, slow):
    first, second = partition(elements, ["a", "b"], {"a": fast, "b": slow})
    expected = elements * fast / (fast + slow)
    assert abs((first.end - first.start) - expected) <= 2 * BLOCK_ELEMENTS
    assert second.end == elements


def test_a_member_without_bandwidth_reduces_nothing_unless_nobody_has_any():
    _, silent = partition(10_000, ["a", "b"], {"a": 5, "b": 0})
    assert silent.start == silent.end
    shared = partition(10_000, ["a", "b"], {})
    assert all(piece.end > piece.start for piece in shared)


@given(st.integers(1, 10**9), st.sampled_from(sorted(CODECS)), st.integers(1, 2**13))
def test_parts_fit_a_frame_and_overlap_where_that_is_worth_it(elements, codec, most_blocks):
    ranges, coded = [ReduceRange("a", 0, elements), ReduceRange("b", elements, elements)], CODECS[codec].encoded_bytes
    length = part_elements(ranges, coded, BLOCK_ELEMENTS * most_blocks)
    assert 0 < length <= BLOCK_ELEMENTS * most_blocks
    assert length % BLOCK_ELEMENTS == 0
    assert coded(length) <= MAX_PART_BYTES
    assert elements > 15 * length or length <= MIN_PART_ELEMENTS
