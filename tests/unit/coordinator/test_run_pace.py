"""When a run is finished, at the pace of its recent rounds."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from unit.coordinator.world import RUN, World, hash_of, round_report

from atoll.coordinator.cli.output import message_dict
from atoll.coordinator.rounds.run_pace import LEAST_GAPS, SILENT_SECONDS, CommitTime, Eta, eta_of, predict
from atoll.coordinator.runs import lifecycle
from atoll.coordinator.services import views
from atoll.coordinator.state.snapshot import Policy
from atoll.coordinator.web.status import Logs, status

STOP = 10**9


def rounds(*gaps: tuple[float, int], start: int = 1_000_000) -> list[CommitTime]:
    """Commits with these seconds and tokens between them."""
    found = [CommitTime(start, 0)]
    for seconds, tokens in gaps:
        before = found[-1]
        found.append(CommitTime(before.unix_ms + round(1000 * seconds), before.committed_tokens + tokens))
    return found


def at_end(commits: list[CommitTime], **more: int) -> Eta | None:
    return predict(commits, STOP, commits[-1].unix_ms, **more)


def pace_of(commits: list[CommitTime], **more: int) -> float:
    found = at_end(commits, **more)
    assert found is not None
    return found.tokens_per_second


@given(st.floats(1, 1e6), st.lists(st.integers(1, 10_000), min_size=LEAST_GAPS, max_size=40))
def test_rounds_of_any_length_at_one_pace_give_this_pace(pace: float, tokens: list[int]) -> None:
    commits = rounds(*((1000 * count / pace, 1000 * count) for count in tokens))
    assume(all(b.unix_ms - a.unix_ms > 1000 for a, b in pairwise(commits)))
    found = at_end(commits)
    assert found is not None
    assert found.tokens_per_second == pytest.approx(pace, rel=1e-3)
    left = (STOP - commits[-1].committed_tokens) / pace
    assert (found.unix_ms - commits[-1].unix_ms) / 1000 == pytest.approx(left, rel=1e-3)


@given(st.integers(0, 9), st.floats(600, 1e6))
def test_a_long_gap_changes_nothing_wherever_it_is(place: int, gap: float) -> None:
    gaps = [(10.0, 1000)] * 10
    gaps[place] = (gap, 1000)
    assert pace_of(rounds(*gaps)) == pytest.approx(100)


@given(st.lists(st.tuples(st.floats(1, 3), st.just(1000)), min_size=LEAST_GAPS, max_size=20))
def test_the_pace_is_within_that_of_the_rounds(gaps: list[tuple[float, int]]) -> None:
    assert 1000 / 3.001 <= pace_of(rounds(*gaps)) <= 1001


def test_a_known_pause_does_not_count_though_it_is_short() -> None:
    commits = rounds((10, 1000), (10, 1000), (30, 1000), (10, 1000))
    assert pace_of(commits) == pytest.approx(4000 / 60)
    assert pace_of(commits, resumed_ms=commits[3].unix_ms - 5000) == pytest.approx(100)


def test_the_time_is_unknown_after_few_rounds_without_rounds_and_at_a_pace_of_centuries() -> None:
    few, slow, usual = rounds((10, 1000), (10, 1000)), rounds(*[(1e6, 1)] * 5), rounds(*[(10, 1000)] * 5)
    assert at_end(few) is None
    assert predict([], STOP, 0) is None
    assert at_end(slow) is None
    last = usual[-1].unix_ms
    assert predict(usual, STOP, last + int(1000 * SILENT_SECONDS)) is not None
    assert predict(usual, STOP, last + int(1000 * SILENT_SECONDS) + 1) is None
    assert predict(usual, 5000, last) is None  # nothing is left


def test_a_clock_that_steps_back_gives_no_negative_pace() -> None:
    commits = rounds(*[(10, 1000)] * 3)
    back = [replace(commits[-1], unix_ms=commits[-1].unix_ms - 3_600_000, committed_tokens=4000)]
    assert pace_of([*commits, *back]) == pytest.approx(100)


def trained_world() -> World:
    """Five rounds of 1000 tokens, ten seconds each."""
    world = World(policy=Policy(lost_after_seconds=1e6))
    members = world.train("ann", "bob")
    previous = world.state.memory[RUN].committed[0].manifest_hash
    for number in range(1, 6):
        world.wait(10)
        report = round_report(number, previous, members, committed_before=1000 * (number - 1))
        world.say(world.opener_of(report), rounds=[report])
        previous = hash_of(report)
    assert world.run.head_round == 5
    return world


def test_run_views_the_page_and_a_restart_agree_and_a_pause_ends_it() -> None:
    world = trained_world()
    view = views.run_view(world.state, world.run, world.now.unix_ms)
    assert view.recent_tokens_per_second == pytest.approx(100, rel=0.05)
    assert (view.eta_unix_ms - world.now.unix_ms) / 1000 == pytest.approx(50, rel=0.05)

    def on_page() -> object:
        page = json.loads(json.dumps(status(world.state, world.now, Logs(), "1")))
        return page["runs"][0]["eta_unix_ms"]

    assert on_page() == view.eta_unix_ms
    world.restart()
    assert on_page() == view.eta_unix_ms
    world.take(lifecycle.pause(world.state, world.now, RUN))
    paused = message_dict(views.run_view(world.state, world.run, world.now.unix_ms))
    assert (paused["eta_unix_ms"], paused["recent_tokens_per_second"], on_page()) == (None, None, None)
    world.wait(500)
    world.take(lifecycle.start(world.state, world.now, RUN, world.policy))
    again = views.run_view(world.state, world.run, world.now.unix_ms)
    assert (again.eta_unix_ms - world.now.unix_ms) / 1000 == pytest.approx(50, rel=0.05)


def test_rounds_that_waited_for_the_coordinator_count_when_they_were_made() -> None:
    """It was away for twenty rounds of ten seconds, and hears of all of them within four."""
    world = World(policy=Policy(lost_after_seconds=1e6))
    members = world.train("ann", "bob")
    previous = world.state.memory[RUN].committed[0].manifest_hash
    began = world.now.unix_ms
    for number in range(1, 21):
        world.wait(200 if number == 1 else 0.2)
        made_ms = began + 10_000 * number
        before = 100 * (number - 1)
        report = round_report(
            number, previous, members, tokens_each=50, committed_before=before, committed_unix_ms=made_ms
        )
        world.say(world.opener_of(report), rounds=[report])
        previous = hash_of(report)
    assert world.run.head_round == 20
    found = eta_of(world.state, world.run, world.now.unix_ms)
    assert found is not None
    assert found.tokens_per_second == pytest.approx(10, rel=0.05)
