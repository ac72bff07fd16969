"""How layers are cut into fragments, and whose turn it is."""

from itertools import accumulate, combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.fragments import cut_layers, fragment_count, turn_of

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=9)


@given(SIZES, st.integers(1, 12))
def test_fragments_hold_every_layer_once_and_the_largest_is_as_small_as_it_can_be(sizes, wanted):
    offsets = [0, *accumulate(sizes)]
    cut = cut_layers(offsets, wanted)
    assert len(cut) == fragment_count(wanted, len(sizes)) == min(wanted, len(sizes))
    assert [layer for fragment in cut for layer in fragment.layers] == list(range(len(sizes)))
    assert [fragment.index for fragment in cut] == list(range(len(cut)))
    for fragment in cut:
        assert fragment.elements == sum(sizes[layer] for layer in fragment.layers)
        assert fragment.start == offsets[fragment.first_layer]
    assert max(fragment.elements for fragment in cut) == least_largest(sizes, len(cut))


def least_largest(sizes: list[int], count: int) -> int:
    """By trying every cut."""
    ways = combinations(range(1, len(sizes)), count - 1)
    return min(max(sum(sizes[a:b]) for a, b in pairwise([0, *ends, len(sizes)])) for ends in ways)


@given(st.integers(1, 10**9), st.integers(1, 64))
def test_every_fragment_has_its_turn(number, count):
    assert sorted(turn_of(number + ahead, count) for ahead in range(count)) == list(range(count))
    assert turn_of(1, count) == turn_of(0, count) == 0
