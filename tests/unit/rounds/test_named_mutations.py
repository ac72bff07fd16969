"""Five rules without which rounds are not safe: each is broken here in the source, and the suite must notice.

The usual mutants (`make mutants`) break one token at a time. These break a whole rule.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mutants.install import changed
from support.fault_schedules import run_schedule
from support.machine_world import Violation
from unit.rounds import test_marks, test_member_answers, test_recoveries, test_witnesses

ROUNDS = "node/atoll/node/rounds"


def schedules() -> None:
    """Seeded schedules of trouble. To hang is not what is looked for."""
    for seed in range(400):
        try:
            run_schedule(seed)
        except Violation:
            raise
        except AssertionError:
            continue


def recoveries() -> None:
    for seed in range(20):
        test_recoveries.recovered(seed, 5.0)


def lost_disks() -> None:
    test_marks.test_a_lost_record_abstains_until_a_round_has_its_mark()
    test_marks.test_a_round_that_went_on_with_the_former_mark_proves_nothing()


def made_up_votes() -> None:
    for why, ready, change in test_member_answers.UNPROVEN:
        test_member_answers.test_a_vote_that_is_not_proven_declines(why, ready, change)


def openers_alone() -> None:
    for words in ("none of a holder", "one holder twice", "forged", "of another result"):
        test_witnesses.test_a_seat_does_not_believe_an_opener_alone(words)


MUTATIONS = [
    pytest.param(
        "core/atoll/core/quorum.py",
        "Electorate.decides",
        "2 * len(self.members.intersection(votes)) > len(self.members)",
        "len(self.members.intersection(votes)) > 0",
        schedules,
        id="a commit needs no quorum",
    ),
    pytest.param(
        "core/atoll/core/plan.py",
        "Plan.accepts",
        "return head.manifest.epoch == self.base.since_version",
        "return True",
        recoveries,
        id="a void head is installed",
    ),
    pytest.param(
        f"{ROUNDS}/promises.py",
        "Promises._may_vote",
        "mark and mark not in record.marks and record.number <= self._number",
        "False",
        lost_disks,
        id="a lost disk is trusted after any round that it took part in",
    ),
    pytest.param(
        f"{ROUNDS}/member_answers.py",
        "MemberAnswers.take_ready",
        'if ready.HasField("accepted") and peer in self.electorate.members:',
        "if False:",
        made_up_votes,
        id="an earlier vote is not checked",
    ),
    pytest.param(
        f"{ROUNDS}/follower.py",
        "Follower.propose",
        "check_attested(self.plan, self.signer, message.proposal)",
        "pass",
        openers_alone,
        id="a witness skips its check",
    ),
]


@pytest.mark.parametrize(("path", "where", "was", "became", "check"), MUTATIONS)
def test_a_broken_rule_fails_the_suite(path: str, where: str, was: str, became: str, check: Callable[[], None]) -> None:
    with changed(path, where, was, became), pytest.raises((AssertionError, pytest.fail.Exception)):
        check()
    if check is not schedules:  # those pass in test_few_schedules.py
        check()
