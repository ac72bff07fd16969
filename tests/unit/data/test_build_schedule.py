"""Groups depend on what units contain, and not on the order in which workers end."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from atoll.node.data.build_schedule import DoneGroup, Limits, OpenGroup, SourceSchedule
from atoll.node.data.card import Shard
from atoll.node.data.source_report import SourceReport
from atoll.node.data.spill import Spill

COUNTS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), min_size=1, max_size=30)
LIMITS = Limits(group_bytes=100, group_documents=12, group_units=6)


def shard(number: int) -> Shard:
    hexadecimal = f"{number:064x}"
    return Shard(tokens=1, documents=0, sha256=hexadecimal, root=hexadecimal, documents_sha256=hexadecimal)


def spill(unit: int, counts: tuple[int, int]) -> Spill:
    return Spill(Path(f"{unit}"), *counts, SourceReport(documents=counts[1]))


def finish(group: OpenGroup) -> DoneGroup:
    for number in group.missing:
        group.done[number] = shard(group.first_shard + number)
    return group.finish()


def run(
    counts: list[tuple[int, int]], seed: int, workers: int, stop_after: int = 10**9
) -> tuple[list[DoneGroup], dict]:
    """Complete up to `stop_after` units in an order that `seed` decides; return groups and units that remain."""
    chance, schedule = random.Random(seed), SourceSchedule(len(counts), LIMITS, 2, 7)
    return drive(schedule, counts, chance, workers, stop_after)


def drive(schedule, counts, chance, workers, stop_after=10**9):
    running, left, given_out = [], {}, []
    while True:
        while len(running) < workers and (unit := schedule.next_unit()) is not None:
            running.append(unit)
            given_out.append(unit)
        if not running or not stop_after:
            assert len(set(given_out)) == len(given_out)
            return schedule.groups, left
        unit = running.pop(chance.randrange(len(running)))
        stop_after -= 1
        left[unit] = spill(unit, counts[unit])
        schedule.unit_done(unit, left[unit])
        while group := schedule.next_group():
            schedule.group_done(finish(group))
            for done in range(group.first_unit, group.first_unit + len(group.spills)):
                left.pop(done, None)


@given(COUNTS, st.integers(0, 99), st.integers(1, 8))
def test_groups_do_not_depend_on_the_order(counts: list[tuple[int, int]], seed: int, workers: int) -> None:
    groups, left = run(counts, seed, workers)
    assert groups == run(counts, 0, 1)[0]
    assert not left
    assert [group.first_unit for group in groups] == [0, *(group.end_unit for group in groups[:-1])]
    assert groups[-1].end_unit == len(counts)
    assert sum(group.tokens for group in groups) == sum(tokens for tokens, _ in counts)
    assert sum(group.report.documents for group in groups) == sum(documents for _, documents in counts)
    for group in groups:
        full = (2 * group.tokens >= 100, group.documents >= 12, group.end_unit - group.first_unit == 6)
        assert any(full) or group is groups[-1]
        last = counts[group.end_unit - 1]
        before = (2 * (group.tokens - last[0]) < 100, group.documents - last[1] < 12)
        assert all(before), "no shorter run reaches a limit"


@given(COUNTS, st.integers(0, 99), st.integers(0, 30))
def test_a_schedule_goes_on_where_another_stopped(counts: list[tuple[int, int]], seed: int, stop: int) -> None:
    groups, left = run(counts, seed, 3, stop)
    again = SourceSchedule(len(counts), LIMITS, 2, 7, groups, left)
    while group := again.next_group():
        again.group_done(finish(group))
    resumed, _ = drive(again, counts, random.Random(seed), 2)
    assert resumed == run(counts, 0, 1)[0]
    assert again.complete
