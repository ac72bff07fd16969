"""Reports of rounds, losses and genesis: stored once, and only when they can be true."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from unit.coordinator.world import RUN, World, abandoned_report, commit, genesis_report, hash_of, round_report

from atoll.coordinator.rounds import reports
from atoll.coordinator.rounds.round_checks import MAX_ATTEMPT, MAX_ROUNDS_AHEAD
from atoll.coordinator.runs import recovery
from atoll.coordinator.store.records import Evaluation, Event, Round
from atoll.core.identity import Identity
from atoll.core.manifest import sign_tie_break
from atoll.core.quorum import Ballot
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb


@pytest.fixture
def world() -> World:
    made = World()
    made.train("ann", "bob")
    return made


def members(world: World) -> list[Identity]:
    return [world.identities[name] for name in ("ann", "bob")]


def genesis_hash(world: World) -> bytes:
    return world.state.memory[RUN].committed[0].manifest_hash


def rounds(world: World) -> list[Round]:
    return [record for record in world.records if isinstance(record, Round)]


def test_rounds_move_the_head_and_resending_them_does_not(world: World) -> None:
    first = round_report(1, genesis_hash(world), members(world))
    second = round_report(2, hash_of(first), members(world), committed_before=1000)
    for report in (first, first, second, second, first):
        world.say("ann", rounds=[report])
    assert [(row.number, row.tokens, row.members) for row in rounds(world)] == [(1, 1000, 2), (2, 1000, 2)]
    assert (world.run.head_round, world.run.committed_tokens) == (2, 2000)


def test_an_unchanged_set_of_present_members_is_shared(world: World) -> None:
    previous = genesis_hash(world)
    for number in range(1, 4):
        report = round_report(number, previous, members(world), committed_before=1000 * (number - 1))
        world.say("ann", rounds=[report])
        previous = hash_of(report)
    for _ in range(2):
        committed = world.state.memory[RUN].committed
        assert committed[1].present == {member.peer_id for member in members(world)}
        assert len({id(committed[number].present) for number in range(1, 4)}) == 1
        world.restart()


def test_rounds_may_arrive_out_of_order(world: World) -> None:
    first = round_report(1, genesis_hash(world), members(world))
    second = round_report(2, hash_of(first), members(world), committed_before=1000)
    world.say("bob", rounds=[second])
    world.say("ann", rounds=[first])
    assert (world.run.head_round, world.run.committed_tokens) == (2, 2000)
    assert len(rounds(world)) == 2


def test_an_abandoned_round_is_stored_and_logged_once(world: World) -> None:
    report = abandoned_report(1)
    for _ in range(2):
        world.say(world.opener_of(report), rounds=[report])
    assert [row.reason for row in rounds(world)] == ["a member was silent"]
    assert world.kinds().count("round.abandoned") == 1
    assert world.run.head_round == 0


def test_the_run_finishes_at_its_tokens() -> None:
    world = World()
    world.train("ann", "bob", stop_tokens=1500)
    first = round_report(1, genesis_hash(world), members(world))
    world.say("ann", rounds=[first])
    assert world.run.state == "TRAINING"
    world.say("ann", rounds=[round_report(2, hash_of(first), members(world), committed_before=1000)])
    assert world.run.state == "FINISHED"
    plans = len(world.plans)
    world.join("cid")
    world.wait(5)
    assert len(world.plans) == plans


def forged(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), members(world), signers=[members(world)[0]])


def strangers(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), [*members(world), Identity.generate()])


def without_reporter(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), [world.identities["bob"]])


def only_the_reporter(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), [world.identities["ann"]])


def above_the_cap(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), members(world), tokens_each=1001)


def heavier_than_its_tokens(world: World) -> mb.RoundReport:
    report = round_report(1, genesis_hash(world), members(world))
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    manifest.contributions[0].weight += 1
    report.manifest.CopyFrom(commit(manifest.SerializeToString(), members(world)))
    return report


def too_far_ahead(world: World) -> mb.RoundReport:
    return round_report(MAX_ROUNDS_AHEAD + 1, b"x" * 32, members(world), committed_before=10**6)


def abandoned_in_the_future(world: World) -> mb.RoundReport:
    return abandoned_report(3)


def attempted_too_often(world: World) -> mb.RoundReport:
    return abandoned_report(1, attempt=MAX_ATTEMPT + 1)


def other_run(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), members(world), run_id="other")


def unknown_plan(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), members(world), plan_version=7)


def wrong_layers(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), members(world), layers=2)


def broken_chain(world: World) -> mb.RoundReport:
    return round_report(1, b"x" * 32, members(world))


def invented_tokens(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), members(world), committed_before=10**12)


def twice_the_same(world: World) -> mb.RoundReport:
    ann = world.identities["ann"]
    return round_report(1, genesis_hash(world), [ann, ann])


def rubbish(world: World) -> mb.RoundReport:
    name = pb.RoundId(run_id=RUN, plan_version=1, number=1)
    return mb.RoundReport(
        round=name, committed=True, manifest=manifest_pb2.CommittedManifest(payload=b"\xff" * 9), seconds=1
    )


def endless(world: World) -> mb.RoundReport:
    report = abandoned_report(1)
    report.seconds = math.inf
    return report


def huge(world: World) -> mb.RoundReport:
    report = abandoned_report(1)
    report.round.number = 2**64 - 1
    return report


@pytest.mark.parametrize(
    "make",
    [
        forged,
        strangers,
        without_reporter,
        only_the_reporter,
        above_the_cap,
        heavier_than_its_tokens,
        too_far_ahead,
        abandoned_in_the_future,
        attempted_too_often,
        other_run,
        unknown_plan,
        wrong_layers,
        broken_chain,
        invented_tokens,
        twice_the_same,
        rubbish,
        endless,
        huge,
    ],
)
def test_impossible_reports_are_logged_and_dropped(world: World, make: Callable[[World], mb.RoundReport]) -> None:
    world.say("ann", rounds=[make(world)])
    assert rounds(world) == []
    assert world.run.head_round == 0
    assert world.kinds()[-1] == "round.rejected"


def test_a_second_truth_about_a_round_is_refused(world: World) -> None:
    world.say("ann", rounds=[round_report(1, genesis_hash(world), members(world))])
    world.say("bob", rounds=[round_report(1, genesis_hash(world), members(world), tokens_each=400, attempt=1)])
    assert [row.tokens for row in rounds(world)] == [1000]
    assert world.kinds()[-1] == "round.rejected"


def test_after_an_outage_rounds_of_several_openers_all_count_in_any_order(world: World) -> None:
    told = [round_report(1, genesis_hash(world), members(world))]
    for number in range(2, 9):
        told.append(round_report(number, hash_of(told[-1]), members(world), committed_before=1000 * (number - 1)))
    for name, numbers in (("bob", (5, 8)), ("ann", (1, 2, 6, 7)), ("bob", (3, 4))):
        world.say(name, rounds=[told[number - 1] for number in numbers])
    assert sorted(row.number for row in rounds(world)) == list(range(1, 9))
    assert (world.run.head_round, world.run.committed_tokens) == (8, 8000)
    assert "round.rejected" not in world.kinds()


def test_a_member_that_once_was_alone_cannot_go_on_alone(world: World) -> None:
    world.say("ann", mb.NODE_STATE_FAILED)
    world.wait(2)
    world.say("ann", mb.NODE_STATE_READY)
    world.wait(2)
    assert [len(plan.members) for plan in world.plans] == [2, 1, 2]
    first = round_report(1, genesis_hash(world), members(world), plan_version=3)
    world.say("bob", rounds=[first])
    alone = [world.identities["bob"]]
    world.say("bob", rounds=[round_report(2, hash_of(first), alone, plan_version=2, committed_before=1000)])
    assert (world.run.head_round, world.kinds()[-1]) == (1, "round.rejected")


# --- by majority -------------------------------------------------------------------------------------


@pytest.fixture
def five() -> World:
    made = World()
    made.train("ann", "bob", "cid", "dan", "eve")
    return made


def named(world: World, *names: str) -> list[Identity]:
    return [world.identities[name] for name in names]


def head_and_last_event(world: World) -> tuple[int, str]:
    return world.run.head_round, world.kinds()[-1]


def test_a_majority_commits_without_absent_members(five: World) -> None:
    some = named(five, "ann", "bob", "cid", "dan")
    report = round_report(1, genesis_hash(five), some, gone=tuple(named(five, "dan")))
    five.say("ann", rounds=[report])
    (row,) = rounds(five)
    assert (row.members, len(row.present), row.committed_tokens) == (4, 3, 2000)
    assert head_and_last_event(five) == (1, "round.committed")


def test_present_members_decide_the_next_round(five: World) -> None:
    first = round_report(1, genesis_hash(five), named(five, "ann", "bob", "cid"))
    five.say("ann", rounds=[first])
    three = named(five, "cid", "dan", "eve")  # a majority of all, but one of those three who decide
    five.say("cid", rounds=[round_report(2, hash_of(first), three, committed_before=1500)])
    assert head_and_last_event(five) == (1, "round.rejected")
    two = named(five, "ann", "bob")
    five.say("ann", rounds=[round_report(2, hash_of(first), two, committed_before=1500)])
    assert head_and_last_event(five) == (2, "round.committed")


def test_half_of_those_who_decide_need_the_coordinators_vote(world: World) -> None:
    ann = world.identities["ann"]
    report = round_report(1, genesis_hash(world), [ann])
    world.say("ann", rounds=[report])
    assert head_and_last_event(world) == (0, "round.rejected")
    ballot = Ballot(1, 0)
    for forger in (ann, world.operator):
        report.manifest.tie_break.CopyFrom(sign_tie_break(forger, report.manifest.payload, ballot))
        world.say("ann", rounds=[report])
    assert head_and_last_event(world) == (1, "round.committed")
    assert world.kinds().count("round.rejected") == 2


def test_a_result_may_be_committed_by_a_later_attempt_under_a_newer_plan(five: World) -> None:
    five.join("fay")
    five.wait(2)
    made_by = named(five, "ann", "bob", "cid")
    report = round_report(1, genesis_hash(five), made_by, ballot=Ballot(2, 7))
    five.say("dan", rounds=[report])
    (row,) = rounds(five)
    assert (row.plan_version, row.attempt, row.made_under) == (2, 7, 1)
    assert five.run.head_round == 1
    five.say("dan", evaluations=[mb.EvaluationReport(round=1, loss=3.0)])  # opened it, and was not part of it
    assert five.run.loss == 3.0


def test_votes_of_an_attempt_do_not_count_in_another(five: World) -> None:
    report = round_report(1, genesis_hash(five), named(five, "ann", "bob", "cid"))
    report.round.attempt = report.manifest.ballot_attempt = 3
    five.say("ann", rounds=[report])
    assert head_and_last_event(five) == (0, "round.rejected")


def test_contributions_missing_from_some_sums_do_not_count(five: World) -> None:
    report = round_report(1, genesis_hash(five), named(five, "ann", "bob", "cid"), gone=tuple(named(five, "cid")))
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    for tokens, verdict in ((500, "round.rejected"), (0, "round.committed")):
        manifest.contributions[2].partial = True
        manifest.contributions[2].tokens = tokens
        manifest.committed_tokens = 1000 + tokens
        voters = named(five, "ann", "bob", "dan")
        report.manifest.CopyFrom(commit(manifest.SerializeToString(), voters))
        five.say("ann", rounds=[report])
        assert five.kinds()[-1] == verdict
    assert (rounds(five)[0].partial, five.run.committed_tokens) == (1, 1000)


@pytest.mark.parametrize(("codec", "name"), [(pb.CODEC_INT4, "int4"), (99, "99")])
def test_the_codec_of_a_round_is_in_the_log(five: World, codec: int, name: str) -> None:
    report = round_report(1, genesis_hash(five), named(five, "ann", "bob", "cid"))
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    manifest.codec = codec
    report.manifest.CopyFrom(commit(manifest.SerializeToString(), named(five, "ann", "bob", "dan")))
    five.say("ann", rounds=[report])
    assert rounds(five)[0].codec == name


def screened_report(world: World, tokens: int, *verdicts: manifest_pb2.Verdict) -> mb.RoundReport:
    """Round 1 of ann, bob and cid with 4 parts; cid's tokens as they say."""
    report = round_report(1, genesis_hash(world), named(world, "ann", "bob", "cid"))
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    manifest.parts_total = 4
    manifest.verdicts.extend(verdicts)
    manifest.contributions[2].tokens = tokens
    manifest.committed_tokens = 1000 + tokens
    report.manifest.CopyFrom(commit(manifest.SerializeToString(), named(world, "ann", "bob", "dan")))
    return report


@pytest.mark.parametrize(("parts", "tokens"), [(2, 500), (3, 0)])
def test_contributions_screened_out_of_most_sums_do_not_count_and_are_logged(
    five: World, parts: int, tokens: int
) -> None:
    said = [
        manifest_pb2.Verdict(reducer=place, contributor=2, parts_left_out=part)
        for place, part in ((0, 1), (1, parts - 1))
    ]
    five.say("ann", rounds=[screened_report(five, 500 - tokens, *said)])
    assert five.kinds()[-1] == "round.rejected"
    five.say("ann", rounds=[screened_report(five, tokens, *said)])
    assert five.kinds()[-1] == "round.committed"
    told = [record.message for record in five.records if isinstance(record, Event)][-1]
    assert ("screening excluded cid from most sums" in told) == (not tokens)
    (cid,) = named(five, "cid")
    assert rounds(five)[0].screened == (() if tokens else (cid.peer_id,))
    assert five.run.committed_tokens == 1000 + tokens


def test_verdicts_of_or_about_strangers_are_no_manifests(five: World) -> None:
    for reducer, contributor in ((3, 2), (0, 3)):
        said = manifest_pb2.Verdict(reducer=reducer, contributor=contributor, parts_left_out=1)
        five.say("ann", rounds=[screened_report(five, 500, said)])
        assert head_and_last_event(five) == (0, "round.rejected")


# --- gaps --------------------------------------------------------------------------------------------


def waiting(world: World) -> list[int]:
    return sorted(number for number, _ in world.state.memory[RUN].waiting_rounds)


@pytest.mark.parametrize("present", [("eve",), ("dan", "eve")])
@pytest.mark.parametrize(("number", "before"), [(2, 0), (5000, 4_999_000)])
def test_a_manifest_never_names_its_own_electorate(present: tuple[str, ...], number: int, before: int) -> None:
    world = World()
    world.train("ann", "bob", "cid", "dan", "eve", stop_tokens=5_000_000)
    few = named(world, *present)
    world.say("eve", rounds=[round_report(number, b"x" * 32, few, tokens_each=1000, committed_before=before)])
    assert (world.run.state, world.run.head_round, world.run.committed_tokens) == ("TRAINING", 0, 0)
    everyone = named(world, "ann", "bob", "cid", "dan", "eve")
    first = round_report(1, genesis_hash(world), everyone)
    second = round_report(2, hash_of(first), everyone, committed_before=2500)
    world.say("ann", rounds=[first, second])
    assert (world.run.head_round, world.run.committed_tokens) == (2, 5000)
    assert waiting(world) == ([5000] if number == 5000 else [])


def test_an_early_round_counts_with_majorities_of_known_voters_and_of_the_plan(five: World) -> None:
    everyone = named(five, "ann", "bob", "cid", "dan", "eve")
    third = round_report(3, b"x" * 32, everyone, committed_before=5000, signers=everyone[:3])
    five.say("ann", rounds=[third])
    assert head_and_last_event(five) == (3, "round.committed")
    other = World()
    other.train("ann", "bob", "cid", "dan", "eve")
    few = named(other, "ann", "bob")  # a majority of neither
    other.say("ann", rounds=[round_report(3, b"x" * 32, few, committed_before=5000)])
    assert (other.run.head_round, waiting(other)) == (0, [3])


@pytest.mark.parametrize(
    ("signers", "plan", "head"),
    [
        (("cid", "dan", "eve"), 1, 0),  # those who decided once, and are not planned any more
        (("fay", "gus", "hal"), 2, 0),  # those who are planned, and never decided
        (("ann", "bob", "cid"), 2, 0),  # most of the former, two of the latter
        (("ann", "bob", "cid", "fay"), 2, 3),
    ],
)
def test_a_gap_needs_a_majority_of_both(five: World, signers: tuple[str, ...], plan: int, head: int) -> None:
    for name in ("ann", "bob"):
        five.heads[name] = (3, b"h" * 32)  # so nobody here knows who decides next, and a plan need not have them
        five.say(name)
    for name in ("cid", "dan", "eve"):
        five.hang_up(name)
    five.wait(five.policy.lost_after_seconds - 0.4)
    five.join("fay", "gus", "hal")
    five.wait(2)
    assert (five.members(), five.plans[-1].version) == ({"ann", "bob", "fay", "gus", "hal"}, 2)
    made_by = named(five, *(name for name in signers if plan == 1 or name != "cid"))
    voters = named(five, *signers)
    report = round_report(3, b"x" * 32, made_by, plan_version=plan, signers=voters, committed_before=4000)
    if plan == 1:
        five.connect(five.name_of(made_by[-1].peer_id))
    five.say(five.name_of(made_by[-1].peer_id), rounds=[report])
    assert (five.run.head_round, waiting(five)) == (head, [] if head else [3])


SEVEN = ("ann", "bob", "cid", "dan", "eve", "fay", "gus")


@pytest.fixture
def seven() -> World:
    made = World()
    made.train(*SEVEN)
    return made


def handed_over(world: World) -> list[mb.RoundReport]:
    """Rounds 1 to 4, each decided by the one before; in the end none of those is left who began."""
    steps = (  # who voted, and who was present
        (("ann", "bob", "cid", "dan"), ("ann", "bob", "cid", "dan")),
        (("ann", "bob", "cid"), ("cid", "dan", "eve", "fay", "gus")),
        (("eve", "fay", "gus"), ("eve", "fay", "gus")),
        (("eve", "fay", "gus"), ("eve", "fay", "gus")),
    )
    told: list[mb.RoundReport] = []
    tokens, previous = 0, genesis_hash(world)
    for number, (voters, present) in enumerate(steps, 1):
        members = named(world, *present)
        told.append(round_report(number, previous, members, committed_before=tokens, signers=named(world, *voters)))
        tokens, previous = tokens + 500 * len(members), hash_of(told[-1])
    return told


def test_rounds_wait_for_earlier_ones_across_a_restart(seven: World) -> None:
    first, second, third, fourth = handed_over(seven)
    seven.say("ann", rounds=[first])
    seven.say("gus", rounds=[fourth])  # the four that decide after round 1 did not vote
    assert (seven.run.head_round, waiting(seven)) == (1, [4])
    seven.restart()
    for name in SEVEN:
        seven.connect(name, mb.NODE_STATE_TRAINING)
    seven.say("gus", rounds=[third])
    assert (seven.run.head_round, waiting(seven)) == (1, [3, 4])
    seven.say("bob", rounds=[second])
    assert (seven.run.head_round, seven.run.committed_tokens, waiting(seven)) == (4, 7500, [])
    assert "round.rejected" not in seven.kinds()
    seven.restart()
    assert (seven.run.head_round, waiting(seven)) == (4, [])


def test_waiting_rounds_commit_in_any_order_of_arrival(seven: World) -> None:
    for report in reversed(handed_over(seven)):
        assert seven.run.head_round == 0
        seven.say("ann", rounds=[report])
    assert (seven.run.head_round, waiting(seven), seven.run.rounds_opened) == (4, [], 4)
    assert sorted(row.number for row in rounds(seven)) == [1, 2, 3, 4]


def test_a_gap_is_logged_and_a_recovery_closes_it(seven: World) -> None:
    *_, fourth = handed_over(seven)
    seven.say("gus", rounds=[fourth])
    seven.wait(100)
    assert seven.kinds().count("run.gap") == 1
    for name in ("dan", "eve", "fay", "gus"):
        seven.heads[name] = (4, hash_of(fourth))
        seven.say(name)
    seven.take(recovery.recover(seven.state, seven.now, RUN, force=True))
    assert (seven.run.head_round, waiting(seven)) == (4, [])
    seven.say("gus", rounds=[fourth])
    assert seven.run.committed_tokens == 7500


def test_a_restored_coordinator_continues_with_a_majority_of_known_voters(five: World) -> None:
    everyone = named(five, "ann", "bob", "cid", "dan", "eve")
    five.say("ann", rounds=[round_report(1, genesis_hash(five), everyone)])
    five.put(replace(five.run, plan_floor=1000))  # rounds 2 to 9 and their plans are forgotten
    forgotten = round_report(9, b"x" * 32, everyone, plan_version=7, committed_before=20_000)
    five.say("ann", rounds=[forgotten])
    assert head_and_last_event(five) == (1, "round.rejected")
    five.wait(8)
    assert five.plans[-1].version == 1001
    few = round_report(10, hash_of(forgotten), everyone[:2], plan_version=1001, committed_before=22_500)
    five.say(five.name_of(everyone[0].peer_id), rounds=[few])
    assert (five.run.head_round, waiting(five)) == (1, [10])
    eleventh = round_report(
        11, hash_of(few), everyone, plan_version=1001, committed_before=23_500, signers=everyone[:3], tokens_each=400
    )
    five.say("ann", rounds=[eleventh])
    assert (five.run.head_round, waiting(five)) == (11, [])  # 11 names 10
    assert sorted(row.number for row in rounds(five)) == [1, 10, 11]


def test_a_node_has_a_bounded_number_of_rounds_waiting(five: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "MAX_WAITING", 5)
    eve = five.identities["eve"]
    for number in range(2, 20):
        five.say("eve", rounds=[round_report(number, b"x" * 32, [eve])])
    assert waiting(five) == [15, 16, 17, 18, 19]
    before = len(five.records)
    five.say("eve", rounds=[round_report(19, b"x" * 32, [eve])])  # again
    assert len(five.records) == before


def test_a_newcomer_does_not_make_the_votes_of_the_others_too_few(five: World) -> None:
    first = round_report(1, genesis_hash(five), named(five, "ann", "bob"), signers=named(five, "ann", "bob", "cid"))
    everyone = named(five, "ann", "bob", "cid", "dan", "eve")
    deciding = named(five, "ann", "bob")
    second = round_report(2, hash_of(first), everyone, committed_before=1000, signers=deciding)
    five.say("ann", rounds=[first, second])
    assert head_and_last_event(five) == (2, "round.committed")


def test_a_round_that_comes_late_must_be_the_one_that_the_next_follows(five: World) -> None:
    everyone = named(five, "ann", "bob", "cid", "dan", "eve")
    first = round_report(1, genesis_hash(five), everyone)
    second = round_report(2, hash_of(first), everyone, committed_before=2500)
    other = round_report(1, genesis_hash(five), everyone, tokens_each=400)
    five.say("ann", rounds=[second, other])
    assert head_and_last_event(five) == (2, "round.rejected")
    five.say("ann", rounds=[first])
    assert [row.number for row in rounds(five)] == [2, 1]


def test_a_restart_keeps_the_electorate(five: World) -> None:
    first = round_report(1, genesis_hash(five), named(five, "ann", "bob", "cid"))
    five.say("ann", rounds=[first])
    before = five.state.memory[RUN].committed
    five.restart()
    assert five.state.memory[RUN].committed == before


def test_losses_are_kept_and_the_newest_is_shown(world: World) -> None:
    first = round_report(1, genesis_hash(world), members(world))
    second = round_report(2, hash_of(first), members(world), committed_before=1000)
    losses = [mb.EvaluationReport(round=2, loss=3.5), mb.EvaluationReport(round=1, loss=4.5, committed_tokens=7)]
    world.say("ann", rounds=[first, second], evaluations=losses)
    told = [record for record in world.records if isinstance(record, Evaluation)]
    assert [(item.round, item.committed_tokens) for item in told] == [(2, 2000), (1, 1000)]  # the manifests' tokens
    assert (world.run.loss_round, world.run.loss) == (2, 3.5)


def test_the_loss_of_genesis_counts(world: World) -> None:
    world.say("bob", evaluations=[mb.EvaluationReport(loss=5.5)])
    assert world.run.loss == 5.5


def test_an_evaluation_of_an_unknown_round_is_dropped(world: World) -> None:
    world.say("ann", evaluations=[mb.EvaluationReport(round=2**40, loss=0.001)])
    assert (world.run.loss_round, world.kinds()[-1]) == (0, "evaluation.rejected")


def test_only_members_of_a_round_evaluate_it(world: World) -> None:
    world.say("ann", rounds=[round_report(1, genesis_hash(world), members(world))])
    world.join("cid")
    world.wait(2)
    assert "cid" in world.members()
    world.say("cid", evaluations=[mb.EvaluationReport(round=1, loss=0.001)])
    assert (world.run.loss, world.kinds()[-1]) == (0, "evaluation.rejected")


def test_fragments_have_their_turns_and_each_counts_its_share() -> None:
    world = World()
    both = world.train("ann", "bob", fragments=2, stop_tokens=10**6)
    opener = world.name_of(both[0].peer_id)
    before = genesis_hash(world)
    for report in (
        round_report(1, before, both),  # counts all of every token
        round_report(1, before, both, fragments=3),
    ):
        world.say(opener, rounds=[report])
        assert world.run.head_round == 0
    first = round_report(1, before, both, fragments=2)
    world.say(opener, rounds=[first])
    world.say(opener, rounds=[round_report(2, hash_of(first), both, fragments=3, committed_before=500)])
    assert (world.run.head_round, world.run.committed_tokens) == (1, 500)
    world.say(opener, rounds=[round_report(2, hash_of(first), both, fragments=2, committed_before=500)])
    assert (world.run.head_round, world.run.committed_tokens) == (2, 1000)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -1.0, 1e300])
def test_a_loss_that_is_no_number_is_dropped(world: World, loss: float) -> None:
    world.say("ann", evaluations=[mb.EvaluationReport(round=0, loss=loss)])
    assert not any(isinstance(record, Evaluation) for record in world.records)
    assert world.kinds()[-1] == "evaluation.rejected"


def test_a_seed_has_nothing_to_report(world: World) -> None:
    world.enrol("seed", world.token(roles=("seed",)))
    world.connect("seed")
    world.say("seed", rounds=[abandoned_report(1)])
    assert rounds(world) == []


# --- genesis ---------------------------------------------------------------------------------------


def spoil_digest(manifest: manifest_pb2.Manifest) -> None:
    manifest.layers[1].anchor_digest = b"short"


def spoil_order(manifest: manifest_pb2.Manifest) -> None:
    manifest.layers[1].layer = 2


def spoil_round(manifest: manifest_pb2.Manifest) -> None:
    manifest.round.number = 1


def spoil_run(manifest: manifest_pb2.Manifest) -> None:
    manifest.round.run_id = "other"


def spoil_corpus(manifest: manifest_pb2.Manifest) -> None:
    manifest.corpus_digest = b"\0" * 32


def spoil_data(manifest: manifest_pb2.Manifest) -> None:
    manifest.data.cursor = 99


def spoil_protocol(manifest: manifest_pb2.Manifest) -> None:
    manifest.protocol.major = 9


@pytest.mark.parametrize(
    "spoil", [spoil_digest, spoil_order, spoil_round, spoil_run, spoil_corpus, spoil_data, spoil_protocol]
)
def test_a_bad_genesis_is_refused_and_another_node_is_asked(spoil: Callable[[manifest_pb2.Manifest], None]) -> None:
    world = World()
    world.create_run(min_nodes=2)
    world.join("ann", "bob")
    world.wait(0.4)
    name = world.name_of(world.state.memory[RUN].genesis_writer)
    report = genesis_report(world.identities[name])
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    spoil(manifest)
    report.manifest.CopyFrom(commit(manifest.SerializeToString(), [world.identities[name]]))
    for _ in range(3):
        world.say(name, mb.NODE_STATE_READY, genesis=report)
    assert world.kinds().count("genesis.rejected") == 1
    world.wait(0.4)
    other = world.name_of(world.state.memory[RUN].genesis_writer)
    assert other != name
    world.say(other, mb.NODE_STATE_READY, genesis=genesis_report(world.identities[other]))
    assert world.run.state == "TRAINING"


def test_genesis_signed_by_someone_else_is_refused() -> None:
    world = World()
    world.create_run(min_nodes=1)
    world.join("ann")
    world.wait(0.4)
    world.say("ann", mb.NODE_STATE_READY, genesis=genesis_report(Identity.generate()))
    assert world.kinds()[-1] == "genesis.rejected"
