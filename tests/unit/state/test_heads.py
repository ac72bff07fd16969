"""Which head a newcomer believes: votes that commit it, and the agreement of those who hold anything."""

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from structlog.testing import capture_logs
from support.donors import (
    ANN,
    BOB,
    CLEO,
    DAN,
    EVE,
    FAY,
    GENESIS,
    OPERATOR,
    QUICK,
    DonorSwarm,
    commit,
    history,
    plan_of,
    state_of,
)
from support.virtual_time import in_virtual_time

from atoll.core.errors import NotFound, Unreachable
from atoll.core.frames import FrameKind
from atoll.core.identity import Identity
from atoll.core.manifest import Head
from atoll.node.state import heads
from atoll.node.state.catchup import catch_up, fetch_manifest, newest_round
from atoll.node.state.state_client import PROTOCOL
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

ALL = (ANN, BOB, CLEO, DAN, EVE)
ONE, TWO = state_of(1.0), state_of(2.0)
FIRST = commit(ONE, 1, [ANN, BOB, DAN], after=GENESIS)
SECOND = commit(TWO, 2, [ANN, BOB], after=FIRST, present=[ANN, BOB, DAN])


@pytest.fixture
def donor_swarm(tmp_path):
    return DonorSwarm(tmp_path)


async def believed(donor_swarm, plan, held=None, operator=OPERATOR):
    fetched = await catch_up(
        donor_swarm.network, plan, state_of(9.0), held, operator_key=operator.public_key, policy=QUICK
    )
    return fetched.head if fetched else None


@in_virtual_time
async def test_a_newcomer_believes_what_a_majority_voted_for(donor_swarm):
    for member in (ANN, BOB, DAN):
        donor_swarm.serve(member, history(FIRST, SECOND), TWO)
    plan = plan_of(ANN, BOB, CLEO, DAN, seats=(ANN, BOB, DAN))
    assert (await believed(donor_swarm, plan)).hash == SECOND.hash
    assert await believed(donor_swarm, plan, held=SECOND) is None
    assert await newest_round(donor_swarm.network, plan, FIRST, operator_key=OPERATOR.public_key) == 2


FORGERIES = {
    "nobody signed": lambda poison: [commit(poison, 10**6, [], after=SECOND)],
    "only the liar": lambda poison: [commit(poison, 10**6, [EVE], after=SECOND)],
    "names others": lambda poison: [commit(poison, 10**6, [EVE], after=SECOND, present=[ANN, BOB, EVE])],
    "follows genesis": lambda poison: [commit(poison, 10**6, [ANN, BOB, DAN, EVE], after=GENESIS)],
    "a chain of its own": lambda poison: [
        before := commit(poison, 10**6 - 1, [EVE]),
        commit(poison, 10**6, [EVE], after=before),
    ],
    "another second round": lambda poison: [FIRST, commit(poison, 2, [EVE], after=FIRST)],
}


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES.keys())
@in_virtual_time
async def test_one_of_four_cannot_make_others_believe_a_forged_head(donor_swarm, forge):
    poison = state_of(666.0)
    for member in (ANN, BOB, DAN):
        donor_swarm.serve(member, history(FIRST, SECOND), TWO)
    donor_swarm.serve(EVE, forge(poison), poison)
    with capture_logs() as logs:
        head = await believed(donor_swarm, plan_of(*ALL, seats=(ANN, BOB, DAN)))
    assert head.hash == SECOND.hash
    assert [line["peer"] for line in logs if line["event"] == "head rejected"] == [EVE.peer_id]


@pytest.mark.parametrize("liar", [ANN, BOB, DAN], ids=["ann", "bob", "dan"])
@in_virtual_time
async def test_nobody_hides_the_true_head_by_leaving_out_its_votes(donor_swarm, liar):
    """Whichever member does it: the copies of one manifest are compared in the order of the plan."""
    voters = [ANN, BOB, DAN]
    fewer = Head(manifest_pb2.CommittedManifest(payload=FIRST.committed.payload, ballot_plan_version=1))
    for member in voters:
        donor_swarm.serve(member, history(fewer if member is liar else FIRST), ONE)
    with capture_logs() as logs:
        head = await believed(donor_swarm, plan_of(*voters, CLEO, seats=voters))
    assert head == FIRST
    assert [line["peer"] for line in logs if line["event"] == "head rejected"] == [liar.peer_id]


@in_virtual_time
async def test_an_honest_member_that_is_one_round_ahead_is_not_called_a_liar(donor_swarm):
    donor_swarm.serve(ANN, history(FIRST, SECOND), TWO)
    for member in (BOB, DAN):
        donor_swarm.serve(member, history(FIRST), ONE)
    with capture_logs() as logs:
        head = await believed(donor_swarm, plan_of(ANN, BOB, CLEO, DAN, seats=(ANN, BOB, DAN)))
    assert head.hash == FIRST.hash
    assert not logs


@in_virtual_time
async def test_members_that_went_on_still_agree_on_the_round_before(donor_swarm):
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST, SECOND), TWO)
    for member in (DAN, EVE):
        donor_swarm.serve(member, history(FIRST), ONE)
    assert (await believed(donor_swarm, plan_of(*ALL, seats=(ANN, BOB, DAN)))).hash == FIRST.hash


@in_virtual_time
async def test_newcomers_in_the_round_do_not_make_its_votes_too_few(donor_swarm):
    crowded = commit(TWO, 2, [ANN, BOB], after=FIRST, present=[ANN, BOB, CLEO, EVE, FAY])
    for member in (ANN, BOB, EVE):
        donor_swarm.serve(member, history(FIRST, crowded), TWO)
    assert (await believed(donor_swarm, plan_of(*ALL, seats=(ANN, BOB, DAN)))).hash == crowded.hash


@in_virtual_time
async def test_where_two_members_decide_one_needs_the_coordinators_vote(donor_swarm):
    plan = plan_of(ANN, BOB, CLEO, DAN, EVE, seats=(ANN, BOB))
    alone = commit(ONE, 1, [ANN], after=GENESIS)
    strangers = commit(ONE, 1, [ANN, EVE], after=GENESIS)
    decided = commit(ONE, 1, [ANN, OPERATOR], after=GENESIS)
    for head in (alone, strangers):
        for member in (ANN, DAN, EVE):
            donor_swarm.serve(member, history(head), ONE)
        with pytest.raises(Unreachable):
            await believed(donor_swarm, plan)
    for member in (ANN, DAN, EVE):
        donor_swarm.serve(member, history(decided), ONE)
    assert (await believed(donor_swarm, plan)).hash == decided.hash


@in_virtual_time
async def test_where_three_members_decide_the_coordinator_has_no_vote(donor_swarm):
    plan = plan_of(*ALL, seats=(ANN, BOB, DAN))
    for member in (ANN, DAN, EVE):
        donor_swarm.serve(member, history(commit(ONE, 1, [ANN, OPERATOR], after=GENESIS)), ONE)
    with pytest.raises(Unreachable):
        await believed(donor_swarm, plan)


@in_virtual_time
async def test_present_members_without_seats_decide_nothing(donor_swarm):
    plan = plan_of(ANN, BOB, CLEO, DAN, EVE, FAY, seats=(ANN, BOB, DAN))
    others = commit(ONE, 1, [CLEO, EVE, FAY], after=GENESIS, present=[ANN, BOB, CLEO, DAN, EVE, FAY])
    for member in (ANN, BOB, DAN, EVE, FAY):
        donor_swarm.serve(member, history(others), ONE)
    with pytest.raises(Unreachable):
        await believed(donor_swarm, plan)


@in_virtual_time
async def test_members_that_hold_nothing_are_not_asked_to_agree(donor_swarm):
    donor_swarm.serve(ANN, history(FIRST), ONE)
    for member in (BOB, DAN, EVE):
        donor_swarm.serve(member, [], None)
    assert (await believed(donor_swarm, plan_of(*ALL, seats=(ANN, BOB, DAN)))).hash == FIRST.hash


@in_virtual_time
async def test_who_alone_holds_a_head_need_not_have_voted_for_it(donor_swarm):
    """Most members have no seat, so those that do must be enough."""
    others = commit(ONE, 1, [BOB, DAN], after=GENESIS, present=[ANN, BOB, DAN])
    donor_swarm.serve(ANN, history(others), ONE)
    assert (await believed(donor_swarm, plan_of(ANN, BOB, CLEO, DAN, seats=(ANN, BOB, DAN)))).hash == others.hash


@in_virtual_time
async def test_two_holders_that_contradict_one_another_are_not_believed(donor_swarm):
    other = commit(TWO, 1, [ANN, BOB, DAN], after=GENESIS)
    donor_swarm.serve(ANN, history(FIRST), ONE)
    donor_swarm.serve(BOB, history(other), TWO)
    with pytest.raises(Unreachable):
        await believed(donor_swarm, plan_of(ANN, BOB, CLEO, DAN, seats=(ANN, BOB, DAN)))


@in_virtual_time
async def test_genesis_is_believed_by_the_hash_in_the_plan(donor_swarm):
    donor_swarm.serve(ANN, history(), state_of(0.0))
    donor_swarm.serve(EVE, [commit(state_of(666.0), 0, [])], state_of(666.0))
    assert (await believed(donor_swarm, plan_of(ANN, CLEO, EVE))).hash == GENESIS.hash


@in_virtual_time
async def test_after_a_recovery_the_void_history_is_left_for_the_base(donor_swarm):
    plan = plan_of(ANN, BOB, CLEO, version=7, base=FIRST)
    donor_swarm.serve(ANN, history(FIRST, SECOND), TWO)  # has not heard of the recovery
    donor_swarm.serve(BOB, history(FIRST), ONE)
    assert (await believed(donor_swarm, plan, held=SECOND)).hash == FIRST.hash
    assert await believed(donor_swarm, plan, held=FIRST) is None


@in_virtual_time
async def test_a_private_manifest_at_our_own_round_gives_way(donor_swarm):
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST), ONE)
    private = commit(TWO, 1, [CLEO], after=GENESIS)
    assert (await believed(donor_swarm, plan_of(ANN, BOB, CLEO), held=private)).hash == FIRST.hash


@in_virtual_time
async def test_a_newer_head_of_ours_is_kept(donor_swarm):
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST), ONE)
    assert await believed(donor_swarm, plan_of(ANN, BOB, CLEO), held=SECOND) is None


@in_virtual_time
async def test_members_that_change_their_state_still_say_what_their_head_is(donor_swarm):
    holdings = [donor_swarm.serve(member, history(FIRST), ONE) for member in (ANN, BOB)]
    assert (await fetch_manifest(donor_swarm.network, ANN.peer_id, "r", None)).hash == FIRST.hash
    holdings[0].moving = True
    assert (await fetch_manifest(donor_swarm.network, ANN.peer_id, "r", None)).hash == FIRST.hash


@in_virtual_time
async def test_a_frozen_member_does_not_keep_the_others_from_being_believed(donor_swarm, monkeypatch):
    monkeypatch.setattr(heads, "_STRAGGLERS_TIMEOUT", timedelta(milliseconds=50))
    for member in (ANN, BOB, DAN):
        donor_swarm.serve(member, history(FIRST), ONE)

    async def freeze(stream):
        await asyncio.Event().wait()

    donor_swarm.hub.join(EVE.peer_id).handle(PROTOCOL, freeze)
    async with asyncio.timeout(2):
        assert (await believed(donor_swarm, plan_of(*ALL, seats=(ANN, BOB, DAN)))).hash == FIRST.hash


@in_virtual_time
async def test_former_members_that_are_gone_keep_nobody_waiting(donor_swarm, monkeypatch):
    monkeypatch.setattr(heads, "_STRAGGLERS_TIMEOUT", timedelta(milliseconds=50))

    async def freeze(stream):
        await asyncio.Event().wait()

    donor_swarm.serve(ANN, history(FIRST), ONE)
    for member in (BOB, DAN, EVE):
        donor_swarm.hub.join(member.peer_id).handle(PROTOCOL, freeze)
    plan = replace(plan_of(ANN, CLEO, seats=(ANN, BOB, DAN)), former=(BOB.peer_id, DAN.peer_id, EVE.peer_id))
    async with asyncio.timeout(2):
        assert (await believed(donor_swarm, plan)).hash == FIRST.hash


@in_virtual_time
async def test_a_void_history_does_not_win_by_numbers(donor_swarm):
    plan = plan_of(ANN, BOB, CLEO, DAN, version=7, base=FIRST, seats=(ANN, BOB, DAN))
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST, SECOND), TWO)
    donor_swarm.serve(DAN, history(FIRST), ONE)
    assert (await believed(donor_swarm, plan)).hash == FIRST.hash


@in_virtual_time
async def test_rounds_of_another_epoch_are_void_whatever_plan_they_are_of(donor_swarm):
    plan = replace(plan_of(ANN, BOB, CLEO, DAN, version=7, base=FIRST, seats=(ANN, BOB, DAN)), version=8)
    for epoch, believes in ((1, False), (8, False), (7, True)):
        head = commit(TWO, 2, [ANN, BOB], after=FIRST, present=[ANN, BOB, DAN], plan_version=8, epoch=epoch)
        for member in (ANN, BOB):
            donor_swarm.serve(member, history(FIRST, head), TWO)
        donor_swarm.serve(DAN, history(FIRST), ONE)
        found = await believed(donor_swarm, plan, held=FIRST)
        assert (found is not None and found.hash == head.hash) == believes


@in_virtual_time
async def test_rounds_cannot_be_skipped(donor_swarm):
    leap = commit(TWO, 7, [ANN, BOB, DAN], after=GENESIS)
    donor_swarm.serve(ANN, history(leap), TWO)
    with pytest.raises(Unreachable):
        await believed(donor_swarm, plan_of(ANN, BOB, CLEO, DAN, seats=(ANN, BOB, DAN)))


@in_virtual_time
async def test_the_manifest_before_counts_only_if_it_is_the_one_that_the_head_names(donor_swarm):
    unrelated = commit(ONE, 2, [EVE], after=FIRST)
    claimed = commit(TWO, 3, [EVE], after=SECOND, present=[ANN, BOB, EVE])
    donor_swarm.serve(EVE, history(FIRST, unrelated, claimed), TWO)
    with pytest.raises(Unreachable):
        await believed(donor_swarm, plan_of(ANN, BOB, CLEO, EVE))


class GoneOn:
    """Dan went on with the coordinator's vote, then alone, while the others stood still."""

    def __init__(self, rounds: int = 80) -> None:
        second = commit(ONE, 2, [DAN, OPERATOR], after=FIRST_OF_TWO)
        self.heads = [GENESIS, FIRST_OF_TWO, second]
        while self.heads[-1].round < rounds:
            self.heads.append(commit(TWO, self.heads[-1].round + 1, [DAN], after=self.heads[-1]))
        self.plan = plan_of(ANN, BOB, CLEO, DAN, seats=(ANN, DAN))


FIRST_OF_TWO = commit(ONE, 1, [ANN, DAN], after=GENESIS)


@in_virtual_time
async def test_who_holds_the_round_that_a_history_grew_from_needs_nobody_to_agree(donor_swarm):
    """Two that are equally far behind, and only one in front, would otherwise wait for one another for ever."""
    run = GoneOn()
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST_OF_TWO), ONE)
    donor_swarm.serve(DAN, run.heads, TWO)
    assert await newest_round(donor_swarm.network, run.plan, FIRST_OF_TWO, operator_key=OPERATOR.public_key) == 80
    assert (await believed(donor_swarm, run.plan, held=FIRST_OF_TWO)).hash == run.heads[-1].hash
    assert (await believed(donor_swarm, run.plan)).hash == FIRST_OF_TWO.hash  # a newcomer goes there first


@in_virtual_time
async def test_what_one_member_lacks_of_a_history_another_may_have(donor_swarm):
    run = GoneOn(rounds=40)
    for member in (ANN, BOB, EVE):
        donor_swarm.serve(member, history(FIRST_OF_TWO), ONE)
    donor_swarm.serve(DAN, [head for head in run.heads if head.round not in range(10, 20)], TWO)
    plan = plan_of(*ALL, FAY, seats=(ANN, DAN))
    assert await believed(donor_swarm, plan, held=FIRST_OF_TWO) is None
    donor_swarm.serve(FAY, [head for head in run.heads if head.round not in range(20, 30)], TWO)
    assert (await believed(donor_swarm, plan, held=FIRST_OF_TWO)).hash == run.heads[-1].hash


@pytest.mark.parametrize("flaw", ["no second vote", "another's vote", "a stranger's votes", "a gap", "another root"])
@in_virtual_time
async def test_a_history_that_did_not_grow_from_ours_is_not_believed(donor_swarm, flaw):
    run = GoneOn(rounds=5)
    voters = {"no second vote": [DAN], "another's vote": [DAN, EVE]}.get(flaw, [DAN, OPERATOR])
    voter = EVE if flaw == "a stranger's votes" else DAN
    root = commit(TWO, 1, [ANN, DAN], after=GENESIS) if flaw == "another root" else FIRST_OF_TWO
    heads_ = [GENESIS, root, commit(ONE, 2, voters, after=root, present=[DAN])]
    while heads_[-1].round < 5:
        heads_.append(commit(TWO, heads_[-1].round + 1, [voter], after=heads_[-1], present=[voter]))
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST_OF_TWO), ONE)
    donor_swarm.serve(DAN, [head for head in heads_ if flaw != "a gap" or head.round != 3], TWO)
    assert await believed(donor_swarm, run.plan, held=FIRST_OF_TWO) is None
    assert await newest_round(donor_swarm.network, run.plan, FIRST_OF_TWO, operator_key=OPERATOR.public_key) == 1


@in_virtual_time
async def test_a_history_longer_than_can_be_followed_needs_a_majority(donor_swarm, monkeypatch):
    run = GoneOn(rounds=5)
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST_OF_TWO), ONE)
    donor_swarm.serve(DAN, run.heads, TWO)
    monkeypatch.setattr(heads, "MAX_HISTORY_ROUNDS", 3)
    assert await believed(donor_swarm, run.plan, held=FIRST_OF_TWO) is None
    monkeypatch.setattr(heads, "MAX_HISTORY_ROUNDS", 4)
    assert (await believed(donor_swarm, run.plan, held=FIRST_OF_TWO)).hash == run.heads[-1].hash


class Dripping:
    """Offers a head, and answers every question about what came before it, one in a while."""

    def __init__(self, donor_swarm, member, head, seconds):
        self.head, self.seconds = head, seconds
        donor_swarm.hub.join(member.peer_id).handle(PROTOCOL, self.answer)

    async def answer(self, stream):
        while True:
            frame = await stream.receive(timedelta(seconds=60))
            if dp.StateRequest.FromString(frame.header).head_manifest:
                reply = dp.StateReply(manifest=self.head.committed)
            else:
                await asyncio.sleep(self.seconds)
                reply = dp.StateReply()
            await stream.send(FrameKind.MESSAGE, reply.SerializeToString())


@in_virtual_time
async def test_who_is_slow_about_its_history_does_not_keep_a_member_from_what_most_agree_on(donor_swarm):
    for member in (ANN, BOB, DAN):
        donor_swarm.serve(member, history(FIRST, SECOND), TWO)
    Dripping(donor_swarm, EVE, commit(state_of(666.0), 1000, [EVE], after=SECOND), 9.0)
    async with asyncio.timeout(50):
        assert (await believed(donor_swarm, plan_of(*ALL, seats=(ANN, BOB, DAN)), held=FIRST)).hash == SECOND.hash


@pytest.mark.parametrize("offers", ["a head of its own", "the true head"])
@in_virtual_time
async def test_who_is_slow_about_its_history_is_asked_once_and_others_tell_it(donor_swarm, offers):
    run = GoneOn(rounds=80)
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST_OF_TWO), ONE)
    donor_swarm.serve(FAY, run.heads, TWO)
    for member in (DAN, EVE):
        own = commit(state_of(666.0), 1000, [member], after=SECOND)
        Dripping(donor_swarm, member, own if offers == "a head of its own" else run.heads[-1], 9.0)
    plan = plan_of(ANN, BOB, CLEO, DAN, EVE, FAY, seats=(ANN, DAN))
    newest = await newest_round(donor_swarm.network, plan, FIRST_OF_TWO, operator_key=OPERATOR.public_key)
    assert newest == 80


@in_virtual_time
async def test_a_head_that_was_only_believed_does_not_stand_against_a_majority_later(donor_swarm):
    """A newcomer that first reaches a liar alone, whose state then is not there, believes the others after all."""
    forged = commit(state_of(666.0), 1000, [EVE], after=SECOND)
    plan = plan_of(*ALL, seats=(ANN, BOB, DAN))

    async def come(frame):
        for member in (ANN, BOB, DAN):
            if member.peer_id not in donor_swarm.networks:
                donor_swarm.serve(member, history(FIRST, SECOND), TWO)
        return NotFound("that state is not the head here")

    donor_swarm.serve(EVE, [forged], state_of(666.0))
    donor_swarm.behaviours[EVE.peer_id] = come
    assert (await believed(donor_swarm, plan)).hash == SECOND.hash


@in_virtual_time
async def test_a_manifest_that_does_not_fit_does_not_hide_the_true_one_of_another(donor_swarm):
    """Whoever has manifests of a void history, or a forged one, is passed over."""
    run = GoneOn(rounds=6)
    wrong = commit(TWO, 3, [EVE], after=SECOND)
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST_OF_TWO), ONE)
    for member in (EVE, DAN, FAY):
        heads_ = [wrong if head.round == 3 and member is not DAN else head for head in run.heads]
        donor_swarm.serve(member, heads_, TWO)
    plan = plan_of(*ALL, FAY, seats=(ANN, DAN))
    assert await newest_round(donor_swarm.network, plan, FIRST_OF_TWO, operator_key=OPERATOR.public_key) == 6


@pytest.mark.parametrize("held", [None, FIRST, SECOND], ids=["nothing", "the first round", "the newest round"])
@in_virtual_time
async def test_three_of_five_that_are_on_probation_make_nobody_believe_their_chain(donor_swarm, held):
    """They outnumber the two known members that answer. Their chain's own seats are theirs."""
    poison, strangers = state_of(666.0), (EVE, FAY, Identity.generate())
    before = commit(poison, 10**6 - 1, [EVE])
    forged = commit(poison, 10**6, [EVE], after=before)
    for member in (ANN, BOB):
        donor_swarm.serve(member, history(FIRST, SECOND), TWO)
    for member in strangers:
        donor_swarm.serve(member, history(before, forged), poison)
    plan = plan_of(ANN, BOB, CLEO, DAN, *strangers, seats=(ANN, BOB, DAN))
    names = {member.peer_id for member in strangers}
    flagged = tuple(replace(item, on_probation=item.peer_id in names) for item in plan.assignments)
    plan = replace(plan, assignments=flagged)
    head = await believed(donor_swarm, plan, held)
    assert (head is None) is (held is SECOND)
    assert head is None or head.hash == SECOND.hash
    assert await newest_round(donor_swarm.network, plan, SECOND, operator_key=OPERATOR.public_key) == 2


@in_virtual_time
async def test_who_has_nothing_believes_members_on_probation_only_where_nobody_else_offers_a_head(donor_swarm):
    """Else a known member could never join a run of strangers, or come back with an empty disk."""
    strangers = (ANN, BOB, DAN)
    for member in strangers:
        donor_swarm.serve(member, history(FIRST, SECOND), TWO)
    plan = plan_of(CLEO, *strangers, seats=strangers)
    names = {member.peer_id for member in strangers}
    plan = replace(
        plan, assignments=tuple(replace(item, on_probation=item.peer_id in names) for item in plan.assignments)
    )
    assert (await believed(donor_swarm, plan)).hash == SECOND.hash
