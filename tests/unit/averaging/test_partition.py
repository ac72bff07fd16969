"""The vector is cut so that every element has exactly one reducer, whatever the numbers."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.averaging.partition import BLOCK, partition, parts

peers = st.lists(st.text("abcdef", min_size=1, max_size=4), min_size=1, max_size=9, unique=True)


@given(st.integers(1, 10**6), peers, st.data(), st.integers(1, 64))
def test_ranges_and_parts_cover_everything_once(elements, members, data, part_blocks):
    bandwidth = {peer: data.draw(st.integers(0, 10**10)) for peer in members}
    pieces = partition(elements, members, bandwidth)
    position = 0
    for piece in pieces:
        assert piece.start == position
        assert piece.start % BLOCK == 0 or piece.start == piece.end == elements
        cut = parts(piece, part_blocks * BLOCK)
        assert [part.index for part in cut] == list(range(len(cut)))
        assert sum(part.elements for part in cut) == piece.end - piece.start
        position = piece.end
    assert position == elements


@given(st.integers(10**4, 10**6), st.integers(1, 10**9), st.integers(1, 10**9))
def test_shares_follow_bandwidth(elements, fast, slow):
    first, second = partition(elements, ["a", "b"], {"a": fast, "b": slow})
    expected = elements * fast / (fast + slow)
    assert abs((first.end - first.start) - expected) <= 2 * BLOCK
    assert second.end == elements


def test_a_member_without_bandwidth_reduces_nothing_unless_nobody_has_any():
    _, silent = partition(10_000, ["a", "b"], {"a": 5, "b": 0})
    assert silent.start == silent.end
    shared = partition(10_000, ["a", "b"], {})
    assert all(piece.end > piece.start for piece in shared)
