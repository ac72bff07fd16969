"""When a run reaches `stop_tokens`, at the pace of its recent rounds. Pure.

`atollctl`, the status page and nodes (through heartbeats) all use this prediction. Rounds differ in length, and early
ones grow, so the pace is tokens over seconds of the last rounds together. A gap that is far longer than usual for its
tokens does not count, because the run did not train. Rounds that the coordinator learned later have no known time;
their tokens count towards the next round with a known time.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from atoll.coordinator.state.run_memory import RunMemory
from atoll.coordinator.state.snapshot import State
from atoll.coordinator.store.records import Run

RECENT_ROUNDS = 32
LEAST_GAPS = 3  # between rounds; with fewer gaps the pace is unknown
LONG_GAP = 4.0  # times the usual seconds per token; a longer gap does not count as training
SILENT_SECONDS = 60.0  # without a round, at least, and four times the longest gap: then there is no prediction
MAX_SECONDS = 100 * 365 * 86400.0


@dataclass(frozen=True)
class CommitTime:
    """The time of a committed round, and the run's tokens up to it."""

    unix_ms: int
    committed_tokens: int


@dataclass(frozen=True)
class Eta:
    """When the run reaches `stop_tokens`, and the pace."""

    unix_ms: int
    tokens_per_second: float


def eta_of(state: State, run: Run, unix_ms: int) -> Eta | None:
    """Predict when a run finishes. None if it does not train, has too few rounds, or has had no round for long."""
    memory = state.memory[run.run_id]
    if run.state != "TRAINING":
        return None
    commits = recent_commits(memory, run.head_round)
    return predict(commits, memory.spec.run.stop_tokens, unix_ms, memory.resumed_ms)


def recent_commits(memory: RunMemory, head_round: int) -> list[CommitTime]:
    """The newest rounds whose time is known, oldest first."""
    numbers = range(max(1, head_round - RECENT_ROUNDS), head_round + 1)
    found = [commit for number in numbers if (commit := memory.committed.get(number)) is not None]
    return [
        CommitTime(commit.committed_ms, commit.committed_tokens)
        for commit in found
        if commit.reported and commit.committed_ms and commit.committed_tokens is not None
    ]


def _gaps(commits: Sequence[CommitTime], resumed_ms: int) -> list[tuple[float, int]]:
    """Seconds and tokens between successive rounds, without gaps that contain a pause."""
    return [
        ((later.unix_ms - earlier.unix_ms) / 1000, later.committed_tokens - earlier.committed_tokens)
        for earlier, later in pairwise(commits)
        if later.unix_ms > earlier.unix_ms
        and later.committed_tokens > earlier.committed_tokens
        and not earlier.unix_ms < resumed_ms <= later.unix_ms
    ]


def predict(commits: Sequence[CommitTime], stop_tokens: int, unix_ms: int, resumed_ms: int = 0) -> Eta | None:
    """Predict from rounds, oldest first, when `stop_tokens` are trained. `resumed_ms`: the end of the last pause."""
    gaps = _gaps(commits, resumed_ms)
    if len(gaps) < LEAST_GAPS:
        return None
    usual = statistics.median(seconds / tokens for seconds, tokens in gaps)
    counted = [(seconds, tokens) for seconds, tokens in gaps if seconds / tokens <= LONG_GAP * usual]
    pace = sum(tokens for _, tokens in counted) / sum(seconds for seconds, _ in counted)
    left_seconds = (stop_tokens - commits[-1].committed_tokens) / pace
    began = max(commits[-1].unix_ms, resumed_ms)
    longest_silence = max(SILENT_SECONDS, LONG_GAP * max(seconds for seconds, _ in counted))
    if not 0 < left_seconds <= MAX_SECONDS or (unix_ms - began) / 1000 > longest_silence:
        return None
    return Eta(max(unix_ms, began + round(1000 * left_seconds)), pace)
