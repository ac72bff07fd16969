"""Thousands of seeded schedules of trouble against the shipped round machine, and mutations that they must catch."""

from contextlib import ExitStack
from dataclasses import replace
from unittest.mock import patch

import pytest
from support.fault_schedules import run_all, run_schedule
from support.machine_world import Violation, World

from atoll.core.quorum import Ballot, Electorate
from atoll.node.rounds import opener, promises
from atoll.node.rounds import types as rt
from atoll.node.rounds.attendance import Attendance
from atoll.node.rounds.promises import Promises

SCHEDULES, BLOCK = 10_000, 500  # a block is a test, so that workers share them


@pytest.mark.parametrize("first", range(0, SCHEDULES, BLOCK))
def test_thousands_of_schedules_break_nothing(first, record_property):
    totals = run_all(first, BLOCK)
    record_property("totals", dict(totals))
    assert totals["schedules"] == BLOCK
    assert totals["rounds"] > 2 * BLOCK  # they do make progress
    assert totals["rollbacks"] > BLOCK / 50
    assert totals["went on by itself"] > 0.7 * BLOCK


@pytest.mark.soak
@pytest.mark.timeout(6 * 3600)
def test_a_million_schedules_break_nothing(capsys):
    totals = run_all(1_000_000, 1_000_000)
    with capsys.disabled():
        print("\n", dict(totals))
    assert totals["schedules"] == 1_000_000


# --- mutations: each breaks one rule of the protocol, and some schedule must notice ------------------------


def half_is_enough():
    def decides(self, votes):
        return 2 * len(self.members.intersection(votes)) + 1 >= len(self.members)

    return patch.object(Electorate, "decides", decides)


def a_commit_needs_no_quorum():
    """Whoever hears of a result takes it, and whoever opens commits with one vote."""
    return patch.object(Electorate, "decides", lambda self, votes: bool(self.members.intersection(votes)))


def votes_are_forgotten():
    """A restart knows its promise, but not what it voted for."""
    recall = Promises.recall

    def forgetful(self, head, plan):
        if self._record is not None:
            self._record = replace(self._record, voted=None)
        recall(self, head, plan)

    return patch.object(Promises, "recall", forgetful)


def promises_are_forgotten():
    """Whoever lost its disk votes at once, and whoever kept it takes any ballot."""
    recall = Promises.recall

    def forgetful(self, head, plan):
        self._record = None
        recall(self, head, plan)
        self.votes = True

    return patch.object(Promises, "recall", forgetful)


def marks_are_not_looked_at():
    """A directory that was rolled back votes at once."""
    return patch.object(promises, "_mark_of", lambda *_: b"")


def no_earlier_result_is_proposed():
    return patch.object(opener, "must_propose", lambda *_: None)


def snapshots_are_taken_again():
    """An abandoned exchange gives its snapshot up, though others may commit it."""
    release = Attendance._release

    def thaw(self, **said):
        self._at.ledger.exposed = False
        release(self, **said)

    return patch.object(Attendance, "_release", thaw)


def votes_of_all_attempts_add_up():
    """The opener asks, but everyone votes in the first ballot they knew: promises bind nobody."""
    opened = Attendance.opened

    def backwards(self, peer, round_id, message):
        self._at.promises.promised = None
        self._at.attempt = min(self._at.attempt, round_id.attempt)
        opened(self, peer, round_id, message)

    return patch.object(Attendance, "opened", backwards)


def any_snapshot_will_do():
    """After a change of cuts a node brings what it froze of other layers."""

    def bring(self, following):
        frozen = self._at.ledger.of(self._at.ledger._layers)
        if frozen is None and not following.is_witness:
            following.freeze()
        else:
            following.promise(frozen or rt.Frozen(following.round_id, 0, 0), leaving=self._at.leaving)

    return patch.object(Attendance, "_offer_snapshot", bring)


MUTATIONS = [
    any_snapshot_will_do,
    half_is_enough,
    votes_are_forgotten,
    promises_are_forgotten,
    marks_are_not_looked_at,
    no_earlier_result_is_proposed,
    a_commit_needs_no_quorum,
    snapshots_are_taken_again,
    votes_of_all_attempts_add_up,
]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_broken_rule_is_noticed(mutation, record_property):
    with ExitStack() as stack:
        stack.enter_context(mutation())
        for seed in range(4_000):
            try:
                run_schedule(seed)
            except Violation as violation:
                record_property("caught", f"seed {seed}: {violation}")
                return
            except AssertionError:
                continue  # it may also hang; that is not what is looked for
    pytest.fail("no schedule noticed")


# --- the world itself ------------------------------------------------------------------------------------------


def test_a_schedule_is_a_function_of_its_seed():
    assert run_schedule(4711) == run_schedule(4711)


def test_a_quiet_world_commits_without_anyone_falling_behind():
    world = World(4, seed=3)
    world.run(60)
    assert world.rounds() >= 10
    assert not world.caught_up
    assert all(report.manifest is not None for report in world.reports)
    assert {Ballot(1, 0)} == {head.ballot for head in world.committed.values()}
