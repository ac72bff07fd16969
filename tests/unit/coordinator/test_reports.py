"""Reports of rounds, losses and genesis: stored once, and only when they can be true."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import pytest
from unit.coordinator.world import CORPUS, RUN, World, abandoned_report, commit, genesis_report, hash_of, round_report

from atoll.coordinator.rounds import reports
from atoll.coordinator.rounds.round_checks import MAX_ATTEMPT, MAX_LAYER_PARAMETERS
from atoll.coordinator.rounds.source_losses import from_text, to_text
from atoll.coordinator.rounds.zero_digests import sizes_to_hash
from atoll.coordinator.runs import admission
from atoll.coordinator.services import views
from atoll.coordinator.state import draft
from atoll.coordinator.store import retention
from atoll.coordinator.store.records import Evaluation, Event, Round
from atoll.core.identity import Identity
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
        assert len({id(committed[number].seats) for number in range(1, 4)}) == 1
        world.restart()


def test_a_round_whose_predecessor_is_unknown_is_ignored_until_it_is_sent_again(world: World) -> None:
    first = round_report(1, genesis_hash(world), members(world))
    second = round_report(2, hash_of(first), members(world), committed_before=1000)
    events = len(world.kinds())
    world.say("bob", rounds=[second])
    assert (world.run.head_round, rounds(world), len(world.kinds())) == (0, [], events)
    world.say("ann", rounds=[first])
    world.say("bob", rounds=[second])
    assert (world.run.head_round, world.run.committed_tokens) == (2, 2000)


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


def of_another_epoch(world: World) -> mb.RoundReport:
    return round_report(1, genesis_hash(world), members(world), epoch=2)


def with_a_seat_for_nobody(world: World) -> mb.RoundReport:
    report = round_report(1, genesis_hash(world), members(world))
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    manifest.seats.append(2)
    report.manifest.CopyFrom(commit(manifest.SerializeToString(), members(world)))
    return report


def without_seats(world: World) -> mb.RoundReport:
    report = round_report(1, genesis_hash(world), members(world))
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    manifest.ClearField("seats")
    manifest.ClearField("coordinator_seat")
    report.manifest.CopyFrom(commit(manifest.SerializeToString(), members(world)))
    return report


def rubbish(world: World) -> mb.RoundReport:
    name = pb.RoundId(run_id=RUN, plan_version=1, number=1)
    return mb.RoundReport(
        round=name, committed=True, manifest=manifest_pb2.CommittedManifest(payload=b"\xff" * 9), seconds=1
    )


def endless(world: World) -> mb.RoundReport:
    report = abandoned_report(1)
    report.seconds = math.inf
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
        attempted_too_often,
        other_run,
        unknown_plan,
        wrong_layers,
        broken_chain,
        invented_tokens,
        twice_the_same,
        of_another_epoch,
        with_a_seat_for_nobody,
        without_seats,
        rubbish,
        endless,
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


@pytest.mark.parametrize("number", [3, 2**64 - 1])
@pytest.mark.parametrize("committed", [True, False])
def test_reports_of_rounds_far_ahead_cost_nothing(world: World, number: int, committed: bool) -> None:
    report = abandoned_report(number)
    report.committed = committed
    before = len(world.records)
    world.say("ann", rounds=[report])
    assert len(world.records) == before


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


def test_members_with_seats_decide_the_next_round(five: World) -> None:
    first = round_report(1, genesis_hash(five), named(five, "ann", "bob", "cid"))
    five.say("ann", rounds=[first])
    three = named(five, "cid", "dan", "eve")  # a majority of all, but one of those three who decide
    five.say("cid", rounds=[round_report(2, hash_of(first), three, committed_before=1500)])
    assert head_and_last_event(five) == (1, "round.rejected")
    two = named(five, "ann", "bob")
    five.say("ann", rounds=[round_report(2, hash_of(first), two, committed_before=1500)])
    assert head_and_last_event(five) == (2, "round.committed")


def test_present_members_without_seats_decide_nothing(five: World) -> None:
    everyone = named(five, "ann", "bob", "cid", "dan", "eve")
    first = round_report(1, genesis_hash(five), everyone, seats=named(five, "cid", "bob", "ann"))
    five.say("ann", rounds=[first])
    for signers, expected in ((("cid", "dan", "eve"), (1, "round.rejected")), (("ann", "bob"), (2, "round.committed"))):
        voters = named(five, *signers)
        five.say("cid", rounds=[round_report(2, hash_of(first), everyone, committed_before=2500, signers=voters)])
        assert head_and_last_event(five) == expected


@pytest.mark.parametrize(
    ("names", "voters"),
    [(("ann", "bob"), ("ann",)), (("ann", "bob", "cid", "dan"), ("ann", "dan"))],
)
def test_half_of_an_even_number_of_members_and_the_coordinators_vote_are_a_majority(
    names: tuple[str, ...], voters: tuple[str, ...]
) -> None:
    world = World()
    world.train(*names)
    stranger = world.enrol("zoe")
    half = named(world, *voters)
    for signers, expected in (
        (half, (0, "round.rejected")),
        ([*half, stranger], (0, "round.rejected")),
        ([world.operator], (0, "round.rejected")),
        ([*half, world.operator], (1, "round.committed")),
    ):
        world.say("ann", rounds=[round_report(1, genesis_hash(world), named(world, *names), signers=signers)])
        assert head_and_last_event(world) == expected


def test_the_operators_vote_does_not_count_where_the_coordinator_has_no_seat(five: World) -> None:
    everyone, two = named(five, "ann", "bob", "cid", "dan", "eve"), named(five, "ann", "bob")
    for more, expected in (([five.operator], (0, "round.rejected")), (named(five, "eve"), (1, "round.committed"))):
        five.say("ann", rounds=[round_report(1, genesis_hash(five), everyone, signers=[*two, *more])])
        assert head_and_last_event(five) == expected


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


def test_contributions_missing_from_most_sums_do_not_count(five: World) -> None:
    report = round_report(1, genesis_hash(five), named(five, "ann", "bob", "cid"), gone=tuple(named(five, "cid")))
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    for tokens, verdict in ((500, "round.rejected"), (0, "round.committed")):
        del manifest.verdicts[:]
        manifest.parts_total = 10
        manifest.verdicts.add(reducer=0, contributor=2, parts_missing=6)
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


@pytest.mark.parametrize("present", [("eve",), ("dan", "eve")])
@pytest.mark.parametrize("number", [1, 5000])
def test_a_manifest_never_names_its_own_electorate(five: World, present: tuple[str, ...], number: int) -> None:
    few = named(five, *present)
    report = round_report(number, genesis_hash(five), few, committed_before=1000 * (number - 1))
    five.heads["eve"] = (number, hash_of(report))
    five.say("eve", rounds=[report])
    five.wait(3)  # it is asked for what it lacks
    five.say("eve", manifests=mb.ManifestAnswer(first=1, manifests=[report.manifest]))
    assert (five.run.head_round, rounds(five)) == (0, [])


def test_a_newcomer_does_not_make_the_votes_of_the_others_too_few(five: World) -> None:
    first = round_report(1, genesis_hash(five), named(five, "ann", "bob"), signers=named(five, "ann", "bob", "cid"))
    everyone = named(five, "ann", "bob", "cid", "dan", "eve")
    deciding = named(five, "ann", "bob")
    second = round_report(2, hash_of(first), everyone, committed_before=1000, signers=deciding)
    five.say("ann", rounds=[first, second])
    assert head_and_last_event(five) == (2, "round.committed")


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
    before = len(world.records)
    world.say("ann", evaluations=[mb.EvaluationReport(round=2**40, loss=0.001)])
    assert (world.run.loss_round, len(world.records)) == (0, before)


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


def spoil_momentum(manifest: manifest_pb2.Manifest) -> None:
    manifest.layers[-1].momentum_digest = hashlib.sha256(b"\0\0\x80\x3f" * 10).digest()


def spoil_protocol(manifest: manifest_pb2.Manifest) -> None:
    manifest.protocol.major = 9


@pytest.mark.parametrize(
    "spoil",
    [spoil_digest, spoil_order, spoil_round, spoil_run, spoil_corpus, spoil_data, spoil_momentum, spoil_protocol],
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


def test_a_genesis_with_a_layer_larger_than_any_is_refused_and_no_zeros_are_hashed_for_it() -> None:
    world = World()
    world.create_run(min_nodes=1)
    world.join("ann")
    world.wait(0.4)
    report = genesis_report(world.identities["ann"])
    report.layers.layers[0].parameters = MAX_LAYER_PARAMETERS + 1
    assert sizes_to_hash(report.layers) == set()
    world.say("ann", mb.NODE_STATE_READY, genesis=report)
    assert world.kinds()[-1] == "genesis.rejected"
    told = [it.message for it in world.records if isinstance(it, Event) and it.kind == "genesis.rejected"]
    assert f"must have at most {MAX_LAYER_PARAMETERS}" in told[-1]


def test_genesis_signed_by_someone_else_is_refused() -> None:
    world = World()
    world.create_run(min_nodes=1)
    world.join("ann")
    world.wait(0.4)
    world.say("ann", mb.NODE_STATE_READY, genesis=genesis_report(Identity.generate()))
    assert world.kinds()[-1] == "genesis.rejected"


# --- long runs ---------------------------------------------------------------------------------------


def test_a_long_run_keeps_a_bounded_part_in_memory_and_the_same_after_a_restart(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "KEPT_COMMITS", 8)
    monkeypatch.setattr(draft, "KEPT_COMMITS", 8)
    monkeypatch.setattr(reports, "THIN_EVERY", 4)
    previous, tokens, first = genesis_hash(world), 0, None
    for number in range(1, 41):
        report = round_report(number, previous, members(world), committed_before=tokens)
        world.say("ann", rounds=[report])
        if number == 3:
            info = mb.CheckpointInfo(round=3, manifest_hash=hash_of(report), bytes=1)
            world.say("bob", checkpoints_changed=True, checkpoints=[info])
        previous, tokens, first = hash_of(report), tokens + 1000, first or report
    assert first is not None
    for _ in range(2):
        assert sorted(world.state.memory[RUN].committed) == [0, 3, *range(33, 41)]
        view = views.run_view(world.state, world.run, world.now.unix_ms)
        assert (view.rounds_committed, world.run.committed_tokens) == (40, 40_000)
        world.restart()
        for name in ("ann", "bob"):
            world.connect(name, mb.NODE_STATE_TRAINING)
    before = len(world.records)
    world.say("ann", rounds=[first], evaluations=[mb.EvaluationReport(round=2, loss=3.0)])
    kinds = [type(record) for record in world.records[before:]]
    assert Round not in kinds  # forgotten, and not taken for news
    assert world.run.head_round == 40


# --- losses by source ------------------------------------------------------------------------------

MIXED = f'source = "corpus"\ncorpus = "{CORPUS}"\nmixture = [{{ weights = {{ web = 3, code = 1 }} }}]'


def of_sources(*rows: tuple[str, float, int, int]) -> mb.EvaluationReport:
    sources = [mb.SourceLoss(name=name, loss=loss, windows=held, tokens=tokens) for name, loss, held, tokens in rows]
    return mb.EvaluationReport(loss=5.0, sources=sources)


def test_losses_of_sources_are_stored_and_shown() -> None:
    world = World()
    world.train("ann", "bob", data=MIXED)
    world.say("ann", evaluations=[of_sources(("web", 4.5, 48, 3000), ("code", 6.5, 16, 1000))])
    (stored,) = (record for record in world.records if isinstance(record, Evaluation))
    assert world.run.sources == stored.sources
    (shown,) = views.run_view(world.state, world.run, world.now.unix_ms, (stored,)).evaluations
    assert [(source.name, source.loss, source.windows, source.tokens) for source in shown.sources] == [
        ("web", 4.5, 48, 3000),
        ("code", 6.5, 16, 1000),
    ]
    world.say("bob", evaluations=[mb.EvaluationReport(loss=4.0)])  # of a node that reports none
    assert (world.run.loss, world.run.sources) == (4.0, "")


def test_a_view_of_a_long_run_has_losses_by_source_of_some_rounds_and_of_the_newest() -> None:
    world = World()
    world.train("ann", "bob", data=MIXED)
    text = to_text([mb.SourceLoss(name="web", loss=1.0, windows=1)])
    rows = tuple(Evaluation(RUN, number, 1.0, 0, text) for number in range(1001))
    shown = views.run_view(world.state, world.run, world.now.unix_ms, rows).evaluations
    assert len(shown) == 1001
    assert 300 <= sum(bool(item.sources) for item in shown) <= views.MAX_SOURCE_POINTS
    assert shown[-1].sources


@pytest.mark.parametrize(
    "rows",
    [
        [("web", math.nan, 1, 0)],
        [("web", -1.0, 1, 0)],
        [("web", 1e300, 1, 0)],
        [("web", 1.0, 0, 0)],
        [("web", 1.0, 1, 2**63)],
        [("web", 1.0, 1, 0), ("web", 1.0, 1, 0)],
        [("books", 1.0, 1, 0)],
        [("Web", 1.0, 1, 0)],
        [("", 1.0, 1, 0)],
        [("\x1b[2J", 1.0, 1, 0)],
        [("w" * 65, 1.0, 1, 0)],
    ],
)
def test_sources_that_the_run_cannot_have_are_refused(rows: list[tuple[str, float, int, int]]) -> None:
    world = World()
    world.train("ann", "bob", data=MIXED)
    world.say("ann", evaluations=[of_sources(*rows)])
    assert (world.run.loss, world.kinds()[-1]) == (0, "evaluation.rejected")


@pytest.mark.parametrize(("data", "count"), [('path = "corpus"', 2), (MIXED.rpartition("\n")[0], 65)])
def test_sources_of_text_without_any_and_too_many_are_refused(data: str, count: int) -> None:
    world = World()
    world.train("ann", "bob", data=data)
    many = [(f"source-{number}", 1.0, 1, 0) for number in range(count)]
    world.say("ann", evaluations=[of_sources(*many)])
    assert (world.run.loss, world.kinds()[-1]) == (0, "evaluation.rejected")
    if count > 64:
        world.say("ann", evaluations=[of_sources(*many[:64])])
        assert world.run.loss == 5.0


UNMIXED = MIXED.rpartition("\n")[0]
INVENTED = [(f"source-{number}", 1.0, 1, 0) for number in range(64)]


def sources_of(world: World) -> set[str]:
    """Names of the newest evaluation as it is stored."""
    return {source.name for source in from_text(world.run.sources)}


def test_a_member_on_probation_names_no_source_while_there_are_others() -> None:
    world = World()
    world.train("ann", "bob", data=UNMIXED)
    world.take(admission.set_probation(world.state, world.now, world.identities["ann"].peer_id, on_probation=True))
    world.say("ann", evaluations=[of_sources(*INVENTED)])
    assert sources_of(world) == {"other"}
    world.say("bob", evaluations=[of_sources(("web", 4.5, 48, 3000), ("code", 6.5, 16, 1000))])
    assert sources_of(world) == {"web", "code"}
    world.say("ann", evaluations=[of_sources(("web", 4.0, 48, 3000), ("books", 6.5, 16, 1000))])
    assert sources_of(world) == {"web", "other"}


def test_members_of_a_run_of_strangers_name_its_sources() -> None:
    world = World()
    both = world.train("ann", "bob", data=UNMIXED)
    for one in both:
        world.take(admission.set_probation(world.state, world.now, one.peer_id, on_probation=True))
    world.say("ann", evaluations=[of_sources(("web", 4.5, 48, 3000))])
    assert sources_of(world) == {"web"}


@pytest.mark.parametrize("restarts", [False, True])
def test_invented_names_give_way_to_sources_that_members_report(
    monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    monkeypatch.setattr(reports, "KEPT_EVALUATIONS", 4)
    world = World()
    both = world.train("ann", "bob", data=UNMIXED, stop_tokens=10**6)
    world.say("ann", evaluations=[of_sources(*INVENTED)])
    if restarts:
        world.restart()
        for name in ("ann", "bob"):
            world.connect(name, mb.NODE_STATE_TRAINING)
    previous, found = genesis_hash(world), []
    for number in range(1, 7):
        report = round_report(number, previous, both, committed_before=1000 * (number - 1))
        previous = hash_of(report)
        told = of_sources(("web", 4.5, 48, 3000), ("source-0", 6.5, 16, 1000))
        told.round = number
        world.say("ann", rounds=[report], evaluations=[told])
        found.append(sources_of(world))
    assert found == [{"other", "source-0"}] * 3 + [{"web", "source-0"}] * 3
    assert len(world.run.source_names) == 64
    for _ in range(10):  # of a round that was evaluated: no time passes
        told = of_sources(*[(f"new-{name}", *rest) for name, *rest in INVENTED])
        told.round = 6
        world.say("bob", evaluations=[told])
    assert {"web", "source-0"} <= set(world.run.source_names)
