"""Digests of layers of zeros: equal to those that nodes compute, in one pass."""

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.coordinator.rounds.zero_digests import zero_digests

CHUNK = 1 << 20  # parameters in the piece that is hashed at a time


@given(st.sets(st.one_of(st.integers(0, 300), st.integers(CHUNK - 2, CHUNK + 2)), max_size=6))
@settings(max_examples=25, deadline=None)
def test_each_size_has_the_digest_of_its_zeros(sizes):
    assert zero_digests(sizes) == {size: hashlib.sha256(bytes(4 * size)).digest() for size in sizes}


def test_a_computation_that_is_stopped_ends_at_the_next_piece():
    answers = iter([False, False, True])
    found = zero_digests([10, CHUNK, 1 << 33], lambda: next(answers))
    assert set(found) == {10, CHUNK}
