"""Fragments: their sizes, and the rounds that average them."""

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.fragments import fragment_count, fragment_of_round, split_into_fragments

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(SIZES, st.integers(1, 12))
def test_fragments_hold_every_layer_once_and_are_as_equal_as_possible(sizes, wanted):
    offsets = (0, *accumulate(sizes))
    cut = split_into_fragments(offsets, wanted)
    assert len(cut) == fragment_count(wanted, len(sizes)) == min(wanted, len(sizes))
    assert [layer for fragment in cut for layer in fragment.layers] == list(range(len(sizes)))
    assert [fragment.index for fragment in cut] == list(range(len(cut)))
    for fragment in cut:
        assert fragment.elements == sum(sizes[layer] for layer in fragment.layers)
        assert fragment.start == offsets[fragment.first_layer]
    found = [fragment.elements for fragment in cut]
    assert (max(found), sum(size * size for size in found)) == most_equal(sizes, len(cut))


@given(SIZES, st.integers(1, 12), st.sets(st.integers(1, 8)))
def test_no_fragment_lies_on_both_sides_of_a_cut(sizes, wanted, places):
    cuts = tuple(sorted(place for place in places if place < len(sizes)))
    cut = split_into_fragments((0, *accumulate(sizes)), wanted, cuts)
    assert len(cut) == fragment_count(wanted, len(sizes), len(cuts))
    assert [layer for fragment in cut for layer in fragment.layers] == list(range(len(sizes)))
    assert set(cuts) <= {fragment.first_layer for fragment in cut}
    found = [fragment.elements for fragment in cut]
    assert (max(found), sum(size * size for size in found)) == most_equal(sizes, len(cut), cuts)


def most_equal(sizes: list[int], count: int, forced: tuple[int, ...] = ()) -> tuple[int, int]:
    """The largest fragment and the sum of squares, by trying every cut."""
    ways = (way for way in combinations(range(1, len(sizes)), count - 1) if set(forced) <= set(way))
    cuts = ([sum(sizes[a:b]) for a, b in pairwise([0, *ends, len(sizes)])] for ends in ways)
    return min((max(cut), sum(size * size for size in cut)) for cut in cuts)


def test_a_large_embedding_does_not_empty_the_other_fragments():
    """GPT-2's sizes in thousands; the tied head is a norm."""
    sizes = [38_600, *[7_100] * 12, 1]
    cut = [fragment.elements for fragment in split_into_fragments((0, *accumulate(sizes)), 8)]
    assert max(cut) == 38_600
    assert min(cut) >= 7_100
    assert max(cut[1:]) <= 2 * 7_100 + 1


@given(st.integers(1, 10**9), st.integers(1, 64))
def test_every_fragment_gets_its_round(number, count):
    assert sorted(fragment_of_round(number + ahead, count) for ahead in range(count)) == list(range(count))
    assert fragment_of_round(1, count) == fragment_of_round(0, count) == 0
