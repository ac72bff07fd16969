"""The helper of tests that wait for other processes and tasks."""

import time

import pytest
from support.eventually import POLL_SECONDS, eventually


async def test_it_returns_as_soon_as_the_condition_holds():
    looks = iter([False, False, True])
    await eventually(lambda: next(looks), seconds=60.0)
    assert next(looks, None) is None


async def test_it_fails_after_its_seconds_and_shows_the_condition():
    with pytest.raises(AssertionError, match=r"0\.05 s of undisturbed waiting.*1 > 2"):
        await eventually(lambda: 1 > 2, seconds=0.05)


async def test_a_stall_of_the_process_is_not_counted():
    looks = 0

    def condition() -> bool:
        nonlocal looks
        looks += 1
        time.sleep(20 * POLL_SECONDS)  # the process stands still
        return looks == 4

    await eventually(condition, seconds=8 * POLL_SECONDS)
    assert looks == 4
