"""Fixtures of more than one kind of test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of torch in one order: with more threads some, such as those over experts, have no fixed one."""
    import torch  # seconds; most tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
