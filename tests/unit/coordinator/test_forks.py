"""Two results of one round: the coordinator finds them, bans the member that voted for both, and ends one of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from unit.coordinator.world import RUN, World, hash_of, round_report

from atoll.coordinator.runs import bans, forks, lifecycle
from atoll.coordinator.store.records import Event, ProofRow
from atoll.core.identity import Identity
from atoll.core.membership import DenyList, issue_deny_list
from atoll.core.proofs import DOUBLE_VOTE, verify_proof
from atoll.core.quorum import Ballot
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

LIAR, ONE_SIDE, OTHER_SIDE = "liar", ("ann", "bob", "cid"), ("dan", "eve", "fay")
ALL = (LIAR, *ONE_SIDE, *OTHER_SIDE)
LONG = 250.0  # seconds: nothing was committed for twice the longest round
Chain = dict[int, mb.RoundReport]


@pytest.fixture
def world() -> World:
    world = World()
    world.train(*ALL, stop_tokens=10**12)
    return world


def grow(
    world: World,
    chain: Chain,
    count: int,
    names: Iterable[str] = ALL,
    *,
    signers: Iterable[str] | None = None,
    tokens_each: int = 500,
    ballot: Ballot | None = None,
) -> Chain:
    """The chain with the next `count` rounds of these nodes."""
    chain = dict(chain)
    members = [world.identities[name] for name in names]
    voters = members if signers is None else [world.identities[name] for name in signers]
    for number in range(len(chain) + 1, len(chain) + count + 1):
        before = chain.get(number - 1)
        previous = hash_of(before) if before else world.state.memory[RUN].committed[0].manifest_hash
        tokens = committed_tokens(before) if before else 0
        chain[number] = round_report(
            number,
            previous,
            members,
            committed_before=tokens,
            signers=voters,
            tokens_each=tokens_each,
            ballot=ballot,
            attempt=0,
        )
    return chain


def committed_tokens(report: mb.RoundReport) -> int:
    return manifest_pb2.Manifest.FromString(report.manifest.payload).committed_tokens


def hold(world: World, chain: Chain, names: Iterable[str]) -> None:
    for name in names:
        world.heads[name] = (max(chain), hash_of(chain[max(chain)]))
        world.say(name)


def report(world: World, chain: Chain, first: int = 1) -> None:
    """Openers report the rounds of a chain from `first` on, one a second."""
    for number in range(first, len(chain) + 1):
        world.wait(1)
        world.say(world.opener_of(chain[number]), rounds=[chain[number]])


def answer(world: World, chains: dict[str, Chain], seconds: float = 30, most: int = forks.BATCH) -> list[str]:
    """Members that are asked about a fork answer from their disks, for a while; the names of those.

    `most`: rounds in one answer.
    """
    asked = []
    for _ in range(int(seconds)):
        world.wait(1)
        inquiry = world.state.memory[RUN].fork_inquiry
        if inquiry is None or world.name_of(inquiry.peer_id) not in chains:
            continue
        name = world.name_of(inquiry.peer_id)
        asked.append(name)
        rounds = range(inquiry.first, min(inquiry.first + most, len(chains[name]) + 1))
        manifests = [chains[name][number].manifest for number in rounds]
        world.say(name, manifests=mb.ManifestAnswer(first=inquiry.first, manifests=manifests))
    return asked


def events(world: World, kind: str) -> list[str]:
    return [row.message for row in world.records if isinstance(row, Event) and row.kind == kind]


def proofs(world: World) -> list[ProofRow]:
    return [row for row in world.records if isinstance(row, ProofRow)]


def banned(world: World) -> set[str]:
    return {node.name for node in world.state.nodes.values() if node.banned}


@pytest.mark.parametrize("more", [(0, 0), (3, 1), (1, 4), (2, 2)])
def test_who_votes_twice_is_proved_banned_and_gone_and_the_log_goes_on(world: World, more: tuple[int, int]) -> None:
    common = grow(world, {}, 5)
    one = grow(world, common, 1, (LIAR, *ONE_SIDE))
    other = grow(world, common, 1, (LIAR, *OTHER_SIDE))
    one, other = grow(world, one, more[0], ONE_SIDE), grow(world, other, more[1], OTHER_SIDE)
    report(world, one)
    hold(world, one, (LIAR, *ONE_SIDE))
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), LONG)

    assert banned(world) == {LIAR}
    (row,) = proofs(world)
    breach = verify_proof(row.proof)
    assert (breach.culprit, breach.kind) == (world.identities[LIAR].peer_id, DOUBLE_VOTE)
    assert (breach.run_id, breach.round) == (RUN, 6) == (row.run_id, row.round)
    assert (row.culprit, row.sentence) == (breach.culprit, breach.sentence)
    assert len(events(world, "run.forked")) == len(events(world, "trust.proved")) == 1
    assert LIAR in events(world, "trust.proved")[0]

    base = world.plans[-1].base
    assert (base.round, base.manifest_hash) == (len(one), hash_of(one[len(one)]))
    assert world.identities[LIAR].peer_id not in {*base.seats, *world.plans[-1].members}
    assert world.run.head_round == len(one)
    assert {world.name_of(peer) for peer in world.plans[-1].members} == {*ONE_SIDE, *OTHER_SIDE}


def test_it_is_done_once(world: World) -> None:
    common = grow(world, {}, 2)
    one, other = grow(world, common, 1, (LIAR, *ONE_SIDE)), grow(world, common, 1, (LIAR, *OTHER_SIDE))
    report(world, one)
    hold(world, one, (LIAR, *ONE_SIDE))
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), LONG)
    plans = len(world.plans)
    assert not answer(world, dict.fromkeys(OTHER_SIDE, other), 150)  # they still hold what is void
    assert (len(world.plans), len(events(world, "run.forked"))) == (plans, 1)


def test_a_fork_of_two_ballots_is_ended_and_nobody_is_banned(world: World) -> None:
    common = grow(world, {}, 2)
    one = grow(world, common, 1, (LIAR, *ONE_SIDE))
    other = grow(world, common, 1, (LIAR, *OTHER_SIDE), ballot=Ballot(1, 1))
    report(world, one)
    hold(world, one, (LIAR, *ONE_SIDE))
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), LONG)
    assert not banned(world)
    assert "no double vote" in events(world, "run.forked")[0]
    assert world.plans[-1].base.manifest_hash == hash_of(one[3])


def test_after_a_restart_the_fork_is_ended_without_a_proof(world: World) -> None:
    common = grow(world, {}, 2)
    one, other = grow(world, common, 1, (LIAR, *ONE_SIDE)), grow(world, common, 1, (LIAR, *OTHER_SIDE))
    report(world, one)
    world.restart()
    for name in ALL:
        world.connect(name, mb.NODE_STATE_TRAINING)
    hold(world, one, (LIAR, *ONE_SIDE))
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), LONG)
    assert not banned(world)
    assert world.plans[-1].base.manifest_hash == hash_of(one[3])


def test_a_fork_of_long_ago_is_found_in_steps(world: World) -> None:
    common = grow(world, {}, 3)
    one = grow(world, grow(world, common, 1, (LIAR, *ONE_SIDE)), 80, ONE_SIDE)
    other = grow(world, grow(world, common, 1, (LIAR, *OTHER_SIDE)), 75, OTHER_SIDE)
    report(world, one)
    hold(world, one, (LIAR, *ONE_SIDE))
    hold(world, other, OTHER_SIDE)
    assert len(answer(world, dict.fromkeys(OTHER_SIDE, other), LONG)) > 1
    assert events(world, "run.forked")[0].startswith("round 4 ")
    assert world.plans[-1].base.manifest_hash == hash_of(one[len(one)])


def test_a_second_result_without_a_majority_changes_nothing(world: World) -> None:
    common = grow(world, {}, 2)
    one = grow(world, common, 1)
    made_up = grow(world, common, 1, (LIAR, *OTHER_SIDE), signers=(LIAR, "dan", "eve"))
    report(world, one)
    hold(world, one, ALL)
    hold(world, made_up, [LIAR])
    plans = len(world.plans)
    answer(world, {LIAR: made_up})
    assert (len(world.plans), banned(world), events(world, "run.forked")) == (plans, set(), [])
    assert any("not a majority" in message for message in events(world, "round.rejected"))


def test_forged_votes_change_nothing(world: World) -> None:
    common = grow(world, {}, 2)
    one, forged = grow(world, common, 1), grow(world, common, 1, tokens_each=400)
    for signature in forged[3].manifest.signatures:
        signature.signature = bytes(64)
    report(world, one)
    hold(world, one, ALL)
    hold(world, forged, [LIAR])
    plans = len(world.plans)
    answer(world, {LIAR: forged})
    assert (len(world.plans), banned(world), events(world, "run.forked")) == (plans, set(), [])


def test_a_head_that_nobody_knows_costs_a_question_a_minute_and_hides_no_fork(world: World) -> None:
    common = grow(world, {}, 2)
    one, other = grow(world, common, 1, (LIAR, *ONE_SIDE)), grow(world, common, 1, (LIAR, *OTHER_SIDE))
    report(world, one)
    hold(world, one, (LIAR, *ONE_SIDE))
    world.heads[LIAR] = (3, b"x" * 32)
    world.say(LIAR)
    assert answer(world, {LIAR: one}, 50) == [LIAR]
    hold(world, other, OTHER_SIDE)
    for place in range(40):
        world.heads[LIAR] = (3, bytes([place]) * 32)
        world.say(LIAR)
        answer(world, {LIAR: one, **dict.fromkeys(OTHER_SIDE, other)}, 1)
        if banned(world):
            break
    assert banned(world) == {LIAR}


def fork(world: World, before: int = 2) -> tuple[Chain, Chain]:
    """Two results of the round after `before`, of which openers reported the first."""
    common = grow(world, {}, before)
    one, other = grow(world, common, 1, (LIAR, *ONE_SIDE)), grow(world, common, 1, (LIAR, *OTHER_SIDE))
    report(world, one)
    return one, other


def is_ended(world: World, chain: Chain) -> bool:
    """Whether the run goes on from the newest round of a chain."""
    return world.plans[-1].base.manifest_hash == hash_of(chain[len(chain)])


def test_the_liar_is_gone_at_once_and_the_fork_stays_while_nobody_else_holds_the_log(world: World) -> None:
    one, other = fork(world)
    for name in ONE_SIDE:
        world.hang_up(name)
    hold(world, one, [LIAR])
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), 60)
    assert banned(world) == {LIAR}
    assert world.plans[-1].base.round == 0
    for name in ONE_SIDE:
        world.connect(name, mb.NODE_STATE_TRAINING)
    hold(world, one, ONE_SIDE)
    answer(world, {}, LONG)
    assert is_ended(world, one)


def test_a_claim_to_an_old_head_takes_the_run_back_nowhere(world: World) -> None:
    one, other = fork(world, 10)
    hold(world, one, [LIAR])
    hold(world, other, OTHER_SIDE)
    ahead = grow(world, one, 1, ONE_SIDE)
    hold(world, ahead, ONE_SIDE)  # not reported yet
    world.heads["ann"] = (1, hash_of(one[1]))
    world.say("ann", mb.NODE_STATE_CATCHING_UP)
    for _ in range(20):
        answer(world, dict.fromkeys(OTHER_SIDE, other), 1)
        assert world.plans[-1].base.round == 0
    world.say("bob", rounds=[ahead[12]])
    hold(world, ahead, ONE_SIDE)
    answer(world, {}, LONG)
    assert is_ended(world, ahead)


def test_a_majority_on_the_other_side_does_not_win(world: World) -> None:
    one, other = fork(world)
    other = grow(world, other, 3, OTHER_SIDE)
    hold(world, one, ["ann"])
    for name in ("bob", "cid"):
        world.hang_up(name)
    hold(world, other, (LIAR, *OTHER_SIDE))
    answer(world, dict.fromkeys(OTHER_SIDE, other), LONG)
    assert is_ended(world, one)
    assert world.run.head_round == 3


def test_answers_that_do_not_fit_are_asked_for_in_pieces(world: World) -> None:
    one, other = fork(world, 28)
    hold(world, one, (LIAR, *ONE_SIDE))
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), 60, most=10)
    assert banned(world) == {LIAR}


def test_members_that_change_their_heads_all_the_time_hide_no_fork(world: World) -> None:
    one, other = fork(world)
    hold(world, one, ALL)
    hold(world, other, ["dan"])
    for turn in range(240):
        for place, name in enumerate(("ann", "bob")):
            world.heads[name] = (3, bytes([turn % 200]) * 32) if turn % 2 == place else (3, hash_of(one[3]))
            world.say(name)
        answer(world, {"ann": one, "bob": one, "dan": other}, 1)
        if banned(world):
            return
    pytest.fail("the fork was not found")


def test_a_run_that_is_paused_is_not_recovered(world: World) -> None:
    one, other = fork(world)
    hold(world, one, (LIAR, *ONE_SIDE))
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), 2)
    assert banned(world) == {LIAR}
    world.take(lifecycle.pause(world.state, world.now, RUN))
    answer(world, {}, 60)
    assert world.plans[-1].base.round == 0
    world.take(lifecycle.start(world.state, world.now, RUN, world.policy))
    answer(world, {}, LONG)
    assert is_ended(world, one)


def test_healthy_rounds_on_the_side_of_the_log_are_not_made_void(world: World) -> None:
    """The recovery comes just after a commit that all of that side hold, never while the next one is near."""
    one, other = fork(world)
    hold(world, one, (LIAR, *ONE_SIDE))
    world.wait(8)
    hold(world, other, OTHER_SIDE)
    for _ in range(6):
        answer(world, dict.fromkeys(OTHER_SIDE, other), 6)
        assert not is_ended(world, one)
        one = grow(world, one, 1, ONE_SIDE)
        world.say("ann", rounds=[one[len(one)]])
        hold(world, one, ONE_SIDE)
        world.wait(1.0)
        if is_ended(world, one):
            return
    pytest.fail("the fork was not ended")


@pytest.mark.parametrize("head", [(10**9, b""), (10**9, b"x" * 32), (2**63, b"x" * 32)])
def test_a_claim_to_be_far_ahead_holds_up_the_end_of_a_fork_for_minutes_only(
    world: World, head: tuple[int, bytes]
) -> None:
    one, other = fork(world)
    hold(world, one, (LIAR, *ONE_SIDE))
    world.heads["cid"] = head
    world.say("cid")
    hold(world, other, OTHER_SIDE)
    answer(world, dict.fromkeys(OTHER_SIDE, other), 2 * LONG)
    assert is_ended(world, one)


def test_a_gap_is_not_filled_with_the_other_side_of_a_fork(world: World) -> None:
    one, other = fork(world)
    other = grow(world, other, 7, OTHER_SIDE)
    hold(world, one, ["ann", "bob"])
    world.hang_up("cid")
    hold(world, other, (LIAR, *OTHER_SIDE))
    for _ in range(120):
        world.wait(1)
        if world.asked_node:  # they have no round between
            first = world.state.memory[RUN].inquiry.first  # type: ignore[union-attr]
            held = [other[first].manifest] if first == len(other) else []
            world.say(world.asked_node, manifests=mb.ManifestAnswer(first=first, manifests=held))
    assert (world.run.head_round, events(world, "run.gap")) == (3, [])


def test_a_peer_of_which_only_the_ban_is_left_is_unbanned_by_its_id(world: World) -> None:
    lost = Identity.generate().peer_id
    world.say("cid", deny_list=issue_deny_list(world.operator, 7, frozenset({lost}), world.now.unix_ms / 1000))
    assert world.state.deny.peer_ids == {lost}
    world.take(bans.unban(world.state, world.now, lost))
    assert world.state.deny.peer_ids == frozenset()


def test_the_operator_takes_a_ban_back(world: World) -> None:
    world.take(bans.ban(world.state, world.now, LIAR, ""))
    number = world.state.deny.number
    world.take(bans.unban(world.state, world.now, LIAR))
    assert world.state.deny == DenyList(number + 1, frozenset())
    world.take(bans.unban(world.state, world.now, LIAR))  # again
    assert world.state.deny.number == number + 1
    world.connect(LIAR)
    world.wait(20)
    assert LIAR in world.members()
