"""Permutations are bijections, differ by seed and name, and are the same for ever."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.node.data.shuffle import permutation

GOLDEN = [4, 1, 2, 0, 3, 6, 5, 7]


@given(st.integers(0, 300), st.integers(0, 2**63 - 1))
def test_every_number_comes_once(count: int, seed: int) -> None:
    assert sorted(permutation(count, seed, "web", 1).tolist()) == list(range(count))


def test_the_order_never_changes() -> None:
    assert permutation(8, 0, "web", 0).tolist() == GOLDEN


def test_seed_and_names_decide() -> None:
    orders = [
        permutation(50, *what).tolist() for what in ((0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a1"))
    ]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_places_are_uniform() -> None:
    first = np.bincount([permutation(5, seed, "web")[0] for seed in range(2000)], minlength=5)
    assert abs(first - 400).max() < 100  # five standard deviations are 89
