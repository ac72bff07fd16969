"""A few dozen seeded schedules of trouble: the quick part of test_schedules.py, and what mutants are judged by."""

import pytest
from support.fault_schedules import run_schedule


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_few_schedules_break_nothing(first):
    assert [run_schedule(seed).rounds for seed in range(first, first + 10)]
