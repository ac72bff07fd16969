"""Fixtures of more than one kind of test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# An example may take a stall of seconds. CI tries the same examples each time, as Hypothesis does by default: a bound
# of a test that is a little too strict is then found by who runs the tests at home, not by an unrelated change.
settings.register_profile("atoll", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("atoll")
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # there are as many workers as cores, or more


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums of torch in one order: with more threads some, such as those over experts, have no fixed one."""
    import torch  # seconds; most tests need none

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
