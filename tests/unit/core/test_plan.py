"""Which history a plan goes on from, who decides its next round, and who may open it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.donors import ANN, BOB, CLEO, DAN, EVE, GENESIS, OPERATOR, commit, plan_of, state_of

from atoll.core.identity import Identity
from atoll.core.plan import Plan, sign_plan, verify_plan
from atoll.core.quorum import COORDINATOR, Electorate
from atoll.core.round_id import RoundId

ONE, TWO, THREE = (state_of(float(value)) for value in range(1, 4))
FIRST = commit(ONE, 1, [ANN, BOB, DAN], after=GENESIS)
SECOND = commit(TWO, 2, [ANN, BOB], after=FIRST, present=[DAN, BOB, ANN])


def names(*identities: Identity) -> tuple[str, ...]:
    return tuple(identity.peer_id for identity in identities)


def recovered_to_first() -> Plan:
    """Plan 7 goes on from round 1; plan 9 goes on from there, too."""
    return replace(plan_of(ANN, BOB, CLEO, version=7, base=FIRST, seats=(BOB, ANN)), version=9)


def test_a_plan_accepts_its_base_and_later_rounds_of_its_epoch() -> None:
    plan = plan_of(ANN, BOB, CLEO, DAN)
    assert all(plan.accepts(head) for head in (GENESIS, FIRST, SECOND))
    assert not plan.accepts(commit(THREE, 0, []))


def test_after_a_recovery_only_rounds_of_the_new_epoch_count() -> None:
    plan = recovered_to_first()
    assert plan.accepts(FIRST)
    assert not plan.accepts(GENESIS)
    assert not plan.accepts(SECOND)
    assert not plan.accepts(commit(THREE, 1, [ANN, BOB], after=GENESIS, epoch=7))  # beside the base


@pytest.mark.parametrize("version", [1, 6, 7, 8, 9])
@pytest.mark.parametrize("epoch", [0, 1, 6, 7, 9])
def test_the_epoch_counts_and_not_the_version_of_the_plan(version: int, epoch: int) -> None:
    """A member that did not hear of the recovery makes rounds of the old epoch, under whatever plan."""
    head = commit(TWO, 2, [ANN, BOB], after=FIRST, plan_version=version, epoch=epoch)
    assert recovered_to_first().accepts(head) == (epoch == 7)


def test_the_base_names_the_seats_after_it_and_manifests_those_after_them() -> None:
    plan = recovered_to_first()
    assert plan.seats(FIRST) == (*names(BOB, ANN), COORDINATOR)
    third = commit(TWO, 2, [ANN, BOB], after=FIRST, present=[CLEO, EVE, ANN], epoch=7)
    assert plan.seats(third) == names(CLEO, EVE, ANN)
    assert plan.electorate(third) == Electorate(frozenset(names(ANN, CLEO, EVE)))


def test_members_with_seats_open_in_turn_and_nobody_else() -> None:
    plan = plan_of(ANN, BOB, CLEO, DAN)
    head = commit(ONE, 1, [ANN], after=GENESIS, present=[EVE, DAN, ANN, BOB])  # eve is no member, cleo has no seat
    assert plan.openers(head) == names(DAN, ANN, BOB)
    opened = [RoundId("r", 1, 0, 2, attempt).opener(plan.openers(head)) for attempt in range(4)]
    assert opened == [*names(DAN, ANN, BOB), DAN.peer_id]
    assert RoundId("r", 1, 0, 2, 0).opener(()) == ""


@pytest.mark.parametrize(
    ("members", "can"),
    [((ANN, BOB), True), ((ANN,), False), ((ANN, CLEO, EVE), False), ((BOB, DAN), True)],
)
def test_a_plan_without_a_majority_of_the_seats_decides_nothing(members: tuple[Identity, ...], can: bool) -> None:
    head = commit(ONE, 1, [ANN], after=GENESIS, present=[ANN, BOB, DAN])
    assert plan_of(*members).can_decide(head) == can
    half = commit(ONE, 1, [ANN], after=GENESIS, present=[ANN, BOB])  # and the coordinator
    assert plan_of(ANN).can_decide(half)
    assert not plan_of(CLEO, DAN).can_decide(half)


def test_free_seats_go_by_uplink_then_name() -> None:
    plan = plan_of(ANN, BOB, CLEO, DAN)
    given = {ANN.peer_id: 2, BOB.peer_id: 3, CLEO.peer_id: 9, DAN.peer_id: 2}
    assignments = tuple(replace(item, max_reduce_bytes_per_second=given[item.peer_id]) for item in plan.assignments)
    assert replace(plan, assignments=assignments).by_uplink == (*names(CLEO, BOB), *sorted(names(ANN, DAN)))


def test_a_signed_plan_keeps_seats() -> None:
    plan = recovered_to_first()
    read = verify_plan(sign_plan(OPERATOR, plan), OPERATOR.public_key, "r")
    assert read.base == plan.base
    assert read.assignments == plan.assignments
