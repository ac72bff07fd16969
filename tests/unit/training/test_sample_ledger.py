"""An epoch with deaths, drains, restarts, stalls and plan changes: how often committed rounds hold each sample."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.sample_ledger import PEACE, Setting, Swarm, run

CHURN = Setting(8, samples_each=16, epoch_rounds=40)


@pytest.mark.parametrize("seed", range(6))
def test_every_sample_is_committed_but_those_in_flight_when_a_node_died(seed: int) -> None:
    outcome = run(replace(CHURN, seed=seed))
    assert outcome.at_end is not None
    assert outcome.at_end.never == outcome.at_end.lost


@pytest.mark.parametrize("members", [8, 64])
def test_an_epoch_of_many_members_is_trained_once(members: int) -> None:
    outcome = run(Setting(members, seed=1))
    assert outcome.at_epoch is not None
    assert outcome.at_epoch.coverage >= 0.998
    assert outcome.at_epoch.more <= 0.001


@pytest.mark.parametrize("seed", range(3))
def test_without_restarts_only_a_member_that_ran_dry_trains_a_sample_again(seed: int) -> None:
    outcome = run(replace(CHURN, members=16, restarts=0.0, seed=seed))
    assert set(outcome.doubled) <= {"repeated"}


def test_in_peace_every_sample_is_trained_exactly_once() -> None:
    outcome = run(Setting(4, **PEACE))
    assert outcome.at_epoch == outcome.at_end
    assert outcome.at_epoch is not None
    assert outcome.at_epoch.once == 1.0


def test_members_of_steady_pace_train_long_runs_of_successive_samples() -> None:
    assert run(Setting(4, **PEACE)).piece_rounds >= 2.0


def test_positions_do_not_grow_with_time() -> None:
    swarm = Swarm(replace(CHURN, epoch_rounds=20, replaced=0.1))
    for _ in range(300):  # many epochs
        swarm.round()
    early, late = max(swarm.outcome.ranges[:100]), max(swarm.outcome.ranges[200:])
    assert late <= 1.5 * early
    assert max(swarm.outcome.position_bytes) < 200 * CHURN.members


def test_the_ledger_sees_what_is_trained_twice() -> None:
    """A swarm in which nodes restart all the time: some do so while others have their snapshot."""
    outcome = run(replace(CHURN, restarts=0.5, seed=2))
    assert outcome.at_end is not None
    assert outcome.at_end.more > 0.001
