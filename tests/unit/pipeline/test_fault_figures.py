"""What the benchmark of killed stages makes of the moments that it saw."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.pipeline_faults import SwarmMonitor

from atoll.lab.launcher import LocalSwarm


@pytest.fixture
def watched(tmp_path: Path) -> SwarmMonitor:
    stepped = {"a": [1.0, 9.0], "b": [2.0, 10.0], "c": [1.5, 4.0, 6.5, 9.5]}
    committed = [(1.0, 100), (3.0, 300), (7.0, 400)]
    return SwarmMonitor(LocalSwarm(tmp_path), ("a", "b", "c", "d"), stepped, committed)


def test_the_longest_pause_is_that_of_a_route_or_of_all_together(watched: SwarmMonitor) -> None:
    assert watched.pause(("a", "b"), 1.2, 10.5) == 7.0
    assert watched.pause(("c", "d"), 1.2, 10.5) == 3.0
    assert watched.pause(watched.names, 1.2, 10.5) == 2.5


def test_a_route_that_never_comes_back_pauses_to_the_end(watched: SwarmMonitor) -> None:
    assert watched.pause(("a", "b"), 10.0, 40.0) == 30.0


def test_a_rate_counts_the_silence_after_the_last_commit(watched: SwarmMonitor) -> None:
    assert watched.rate(0.0, 11.0) == 30.0
    assert watched.rate(5.0, 11.0) == 0.0
