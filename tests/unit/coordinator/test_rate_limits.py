"""What one member can make the coordinator do and keep: little, whatever it sends."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from support.memory_store import MemoryStore
from unit.coordinator.world import (
    ELIGIBLE_STATES,
    RUN,
    SECRET,
    World,
    abandoned_report,
    commit,
    genesis_report,
    hash_of,
    round_report,
)

from atoll.coordinator.call_rates import CallRates
from atoll.coordinator.live import attendance
from atoll.coordinator.rounds import coordinator_seat
from atoll.coordinator.runs import admission, checkpoints, departure
from atoll.coordinator.state import draft, run_memory
from atoll.coordinator.state.rate_limits import REFUSED_REPORTS_RATE, STORED_ROWS_RATE, Allowance, Rate
from atoll.coordinator.store.records import Event, PlanRow, Round
from atoll.core import manifest as manifests
from atoll.core.errors import Busy, InvalidRequest, NotFound, PeerMisbehaved, SignatureInvalid
from atoll.core.identity import Identity
from atoll.core.quorum import MAX_SEATS
from atoll.core.round_id import RoundId
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2
from atoll.v1 import membership_pb2 as mb

ALL = ("ann", "bob", "cid", "dan", "eve")


@pytest.fixture
def world() -> World:
    made = World()
    made.train(*ALL, stop_tokens=5_000_000)
    return made


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The public keys of all signatures that are looked at."""
    keys: list[bytes] = []
    real = manifests.verify

    def counted(context: str, payload: bytes, signature: bytes, public_key: bytes) -> None:
        keys.append(public_key)
        real(context, payload, signature, public_key)

    monkeypatch.setattr(manifests, "verify", counted)
    return keys


def own_attempts(world: World, name: str, number: int = 1) -> list[mb.RoundReport]:
    """Abandoned attempts at a round that were this node's to open."""
    told = (abandoned_report(number, attempt=attempt) for attempt in range(5000))
    return [report for report in told if world.opener_of(report) == name]


def stored(world: World) -> MemoryStore:
    store = MemoryStore()
    store.apply(world.records)
    return store


# --- signatures ----------------------------------------------------------------------------------------


def test_one_signature_many_times_is_refused_unread(world: World, verified: list[bytes]) -> None:
    eve = world.identities["eve"]
    genesis = world.state.memory[RUN].committed[0].manifest_hash
    report = round_report(1, genesis, [eve])
    report.manifest.signatures.extend([report.manifest.signatures[0]] * 4000)
    world.say("eve", rounds=[report] * 10)
    assert world.kinds()[-1] == "round.rejected"
    assert verified == []
    report = round_report(1, genesis, [eve])
    report.manifest.signatures.append(report.manifest.signatures[0])
    world.say("eve", rounds=[report])
    assert verified == []


def test_signatures_of_strangers_are_refused_unread(world: World, verified: list[bytes]) -> None:
    signers = [world.identities["eve"], Identity.generate()]
    genesis = world.state.memory[RUN].committed[0].manifest_hash
    world.say("eve", rounds=[round_report(1, genesis, [world.identities["eve"]], signers=signers)])
    assert world.kinds()[-1] == "round.rejected"
    assert verified == []


def test_impossible_reports_are_rejected_before_signatures_are_verified(world: World, verified: list[bytes]) -> None:
    everyone = [world.identities[name] for name in ALL]
    genesis = world.state.memory[RUN].committed[0].manifest_hash
    for report in (
        round_report(1, genesis, everyone, committed_before=10**12),
        round_report(1, b"x" * 32, everyone),
        round_report(1, genesis, everyone, layers=2),
        round_report(1, hash_of(genesis_report(everyone[0])), everyone[:1]),  # too few votes
    ):
        world.say("eve", rounds=[report])
        assert world.kinds()[-1] == "round.rejected"
    assert verified == []


def test_a_node_rejected_too_often_is_ignored_for_a_while(world: World, verified: list[bytes]) -> None:
    everyone = [world.identities[name] for name in ALL]
    genesis = world.state.memory[RUN].committed[0].manifest_hash
    true = round_report(1, genesis, everyone)
    forged = round_report(1, genesis, everyone)
    for signature in forged.manifest.signatures:
        signature.signature = b"\0" * 64
    for _ in range(4):
        world.say("eve", rounds=[forged] * 100)
    assert len(verified) == REFUSED_REPORTS_RATE.burst
    world.say("eve", rounds=[true])
    assert world.run.head_round == 0
    world.say("ann", rounds=[true])  # nobody else suffers
    assert world.run.head_round == 1


def test_unknown_fields_of_a_manifest_are_not_stored(world: World) -> None:
    everyone = [world.identities[name] for name in ALL]
    report = round_report(1, world.state.memory[RUN].committed[0].manifest_hash, everyone)
    report.manifest.signatures[0].payload = b"z" * 100_000
    report.manifest.MergeFromString(b"\xa2\x06\x05hello")  # field 100, which nobody knows
    world.say("eve", rounds=[report])
    (row,) = [record for record in world.records if isinstance(record, Round)]
    kept = manifest_pb2.CommittedManifest.FromString(row.manifest)
    assert len(row.manifest) < 3000
    assert kept == round_report_kept(kept)


def round_report_kept(kept: manifest_pb2.CommittedManifest) -> manifest_pb2.CommittedManifest:
    copy = manifest_pb2.CommittedManifest()
    copy.CopyFrom(kept)
    copy.DiscardUnknownFields()
    return copy


def test_unknown_fields_of_a_layer_table_are_not_stored() -> None:
    world = World()
    world.create_run(min_nodes=1)
    world.join("ann")
    world.wait(0.4)
    report = genesis_report(world.identities["ann"])
    report.layers.layers[0].MergeFromString(b"\xa2\x06\x05hello")
    world.say("ann", mb.NODE_STATE_READY, genesis=report)
    assert world.run.state == "TRAINING"
    assert b"hello" not in world.run.layers


# --- rows and events -------------------------------------------------------------------------------------


def test_only_its_opener_may_report_an_abandoned_attempt(world: World) -> None:
    report = abandoned_report(1)
    other = next(name for name in ALL if name != world.opener_of(report))
    world.say(other, rounds=[report])
    assert world.kinds()[-1] == "round.rejected"
    world.say(world.opener_of(report), rounds=[report])
    assert world.kinds()[-1] == "round.abandoned"


def test_an_attempt_that_committed_is_not_abandoned_afterwards(world: World) -> None:
    everyone = [world.identities[name] for name in ALL]
    report = round_report(1, world.state.memory[RUN].committed[0].manifest_hash, everyone)
    world.say("ann", rounds=[report])
    world.say(world.opener_of(report), rounds=[abandoned_report(1)])
    (row,) = stored(world).load().rounds
    assert row.committed


def test_attempts_of_a_round_long_over_are_not_kept(world: World) -> None:
    world.state = replace(world.state, runs={RUN: replace(world.run, head_round=1000)})
    commits = world.state.memory[RUN].committed
    memory = replace(
        world.state.memory[RUN],
        committed={**commits, 1000: run_memory.Commit(b"h" * 32, seats=world.plans[-1].members)},
    )
    world.state = replace(world.state, memory={RUN: memory})
    for number, kind in ((700, "round.rejected"), (900, "round.abandoned"), (1001, "round.abandoned")):
        report = abandoned_report(number)
        world.say(world.opener_of(report), rounds=[report])
        assert world.kinds()[-1] == kind


def test_a_flood_of_reports_costs_a_bounded_number_of_rows(world: World) -> None:
    before = len(world.records)
    told = own_attempts(world, "eve")
    for start in range(0, 750, 250):
        world.say("eve", rounds=told[start : start + 250])
    losses = [mb.EvaluationReport(round=0, loss=-1.0)] * 256
    for _ in range(4):
        world.say("eve", rounds=[abandoned_report(1, attempt=10**6 + 1)] * 256, evaluations=losses)
    kinds = Counter(type(record) for record in world.records[before:])
    assert kinds[Round] == STORED_ROWS_RATE.burst - 1  # one was its connecting
    assert kinds[Event] == STORED_ROWS_RATE.burst - 1 + REFUSED_REPORTS_RATE.burst
    world.wait(15)
    (line,) = [row for row in world.records if isinstance(row, Event) and row.kind == "reports.dropped"]
    assert "2511 reports of eve were dropped" in line.message
    world.hang_up("eve")
    world.connect("eve")  # changes nothing
    world.say("eve", rounds=own_attempts(world, "eve")[750:])
    assert Counter(type(record) for record in world.records[before:])[Round] <= STORED_ROWS_RATE.burst + 20
    world.say(world.opener_of(abandoned_report(2)), rounds=[abandoned_report(2)])
    report = next(report for report in own_attempts(world, "ann"))
    world.say("ann", rounds=[report])
    assert world.kinds()[-1] == "round.abandoned"


def test_reconnecting_repeatedly_stops_filling_the_event_log(world: World) -> None:
    before = world.kinds().count("node.connected")
    for _ in range(2 * int(STORED_ROWS_RATE.burst)):
        world.connect("eve")
    assert world.kinds().count("node.connected") - before < STORED_ROWS_RATE.burst


def test_leaving_repeatedly_stops_filling_the_event_log(world: World) -> None:
    peer = world.identities["eve"].peer_id
    for _ in range(2 * int(STORED_ROWS_RATE.burst)):
        world.take(departure.leave(world.state, world.now, peer, "bye"))
        assert world.state.nodes[peer].left
        world.connect("eve")
    assert world.kinds().count("node.left") + world.kinds().count("node.connected") < STORED_ROWS_RATE.burst + 2 * len(
        ALL
    )


def test_enrolling_repeatedly_stops_filling_the_event_log(world: World) -> None:
    token = world.token()
    world.enrol("eve", token)
    before = world.kinds().count("node.enrolled")
    identity = world.identities["eve"]
    for number in range(2 * int(STORED_ROWS_RATE.burst)):
        name = f"eve-{number // 2}"  # each twice
        again = admission.Applicant(token.token_id, SECRET, identity.peer_id, identity.public_key, name)
        world.take(admission.enrol(world.state, world.now, again))
        assert world.state.nodes[identity.peer_id].name == name
    assert 0 < world.kinds().count("node.enrolled") - before <= STORED_ROWS_RATE.burst


def test_changing_corpora_repeatedly_stops_filling_the_event_log() -> None:
    world = World()
    world.create_run(min_nodes=9)
    world.join("ann", "bob", "eve")
    for number in range(2 * int(STORED_ROWS_RATE.burst)):
        world.say("eve", ELIGIBLE_STATES, corpus_digest=f"{number:064x}")
        world.tick()
    assert 0 < world.kinds().count("node.corpus-differs") <= STORED_ROWS_RATE.burst
    assert len(world.state.memory[RUN].logged_corpus_mismatches) == 1


def test_a_flood_of_checkpoints_is_refused_before_it_is_read(world: World) -> None:
    told = [
        mb.CheckpointInfo(round=number, manifest_hash=b"h" * 32)
        for number in range(checkpoints.MAX_REPORTED_CHECKPOINTS + 1)
    ]
    with pytest.raises(InvalidRequest, match="at most 4096 checkpoints"):
        world.say("eve", checkpoints_changed=True, checkpoints=told)


def test_a_flood_of_data_ranges_is_refused_before_it_is_read(world: World, verified: list[bytes]) -> None:
    eve = world.identities["eve"]
    report = round_report(1, b"x" * 32, [eve])
    manifest = manifest_pb2.Manifest.FromString(report.manifest.payload)
    manifest.data.returned.extend([pb.SampleRange()] * 2**17)
    report.manifest.CopyFrom(commit(manifest.SerializeToString(), [eve]))
    world.say("eve", rounds=[report])
    assert world.kinds()[-1] == "round.rejected"
    assert "more than 65536 ranges" in last_message(world)
    assert verified == []


def last_message(world: World) -> str:
    return [record.message for record in world.records if isinstance(record, Event)][-1]


@pytest.mark.parametrize("spoil", ["payload", "signature", "other-key", "more-votes-than-seats"])
def test_a_report_is_no_place_to_store_things(world: World, spoil: str) -> None:
    report = round_report(1, world.state.memory[RUN].committed[0].manifest_hash, [world.identities["eve"]])
    if spoil == "payload":
        text = report.manifest.payload + b"\xa2\x06\x80\x80\x80\x01" + bytes(2 << 20)  # an unknown field of 2 MiB
        report.manifest.CopyFrom(commit(text, [world.identities["eve"]]))
    elif spoil == "signature":
        report.manifest.signatures[0].signature = b"z" * 100_000
    elif spoil == "other-key":
        report.manifest.CopyFrom(commit(report.manifest.payload, [Identity.generate()]))
    else:
        report.manifest.CopyFrom(
            commit(report.manifest.payload, [world.enrol(f"node-{n}") for n in range(MAX_SEATS + 1)])
        )
    world.say("eve", rounds=[report])
    assert world.kinds()[-1] == "round.rejected"
    assert not any(isinstance(record, Round) for record in world.records)


def test_an_allowance_comes_back_with_time() -> None:
    rate = Rate(3, 0.5)
    left = Allowance().spend(rate, 100.0, 3)
    assert left is not None
    assert left.spend(rate, 101.0) is None
    again = left.spend(rate, 102.0)
    assert again is not None
    assert again.spend(rate, 102.0) is None
    assert again.spend(rate, 1000.0, 3) is not None
    assert again.spend(rate, 1000.0, 3.5) is None


def test_old_events_and_attempts_go_and_are_still_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "KEPT_EVENTS", 30)
    monkeypatch.setattr(draft, "KEPT_ATTEMPTS", 10)
    world.say("eve", rounds=own_attempts(world, "eve")[:60])
    store = stored(world)
    assert len(store.load().rounds) == 10
    newest = store.load().last_event_id
    assert [row.event_id for row in store.events(0, 1000)][-30:] == list(range(newest - 29, newest + 1))
    assert newest == world.state.last_event_id
    assert world.run.rounds_opened == 60
    world.restart()
    assert (world.run.rounds_opened, len(world.state.memory[RUN].abandoned_attempts)) == (60, 10)


# --- plans -----------------------------------------------------------------------------------------------


def flap(world: World, times: int) -> None:
    for turn in range(times):
        world.say("eve", mb.NODE_STATE_READY if turn % 2 else mb.NODE_STATE_FAILED)
        world.wait(1.4)


def test_a_node_that_joins_and_leaves_repeatedly_causes_few_plans(world: World) -> None:
    before = len(world.plans)
    flap(world, 100)  # 140 seconds
    assert len(world.plans) - before <= 2 * (len(attendance.REJOIN_DELAYS_SECONDS) - 1 + 140 // 30)
    world.say("eve", mb.NODE_STATE_READY)
    world.wait(35)
    assert "eve" in world.members()  # it is let in again
    world.wait(attendance.JOINS_FORGOTTEN_SECONDS)
    for _ in range(2):  # and its past is forgotten
        world.say("eve", mb.NODE_STATE_FAILED)
        world.wait(2)
        world.say("eve", mb.NODE_STATE_READY)
        world.wait(2)
        assert "eve" in world.members()


def test_old_plans_are_deleted_except_those_that_set_a_base(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "KEPT_PLANS", 3)
    for _ in range(6):
        flap(world, 2)
        world.wait(35)
    assert sorted(world.state.memory[RUN].token_caps) == [plan.version for plan in world.plans[-3:]]
    store = MemoryStore()
    store.apply([PlanRow(RUN, plan.version, b"", 0) for plan in world.plans[:-3]])
    store.apply([record for record in world.records if getattr(record, "record", None) is PlanRow])
    assert [row.version for row in store.load().plans] == [1]


# --- attempts --------------------------------------------------------------------------------------------


@pytest.fixture
def four() -> World:
    """The coordinator has a seat, as the number of members is even."""
    made = World()
    made.train("ann", "bob", "dan", "eve")
    return made


def test_one_opener_cannot_use_up_the_attempts_of_a_round(four: World) -> None:
    world = four
    dan, ann = (world.identities[name].peer_id for name in ("dan", "ann"))

    def next_of(peer: str, attempt: int) -> RoundId:
        tries = (RoundId(RUN, 1, 0, 1, count) for count in range(attempt, attempt + 9))
        return next(item for item in tries if world.opener(item) == peer)

    def ask(peer: str, round_id: RoundId) -> bool:
        try:
            answer = world.take(coordinator_seat.answer_vote_request(world.state, world.now, peer, round_id, b""))
        except InvalidRequest:
            return False
        assert isinstance(answer, coordinator_seat.VoteReply)
        return answer.granted

    top = 0
    for _ in range(60):  # a minute of asking for as much as it gets
        jump = coordinator_seat.MAX_ATTEMPT
        while jump > 0:
            wanted = next_of(dan, top + jump)
            if ask(dan, wanted):
                top = wanted.attempt
            else:
                jump //= 2
        world.wait(1)
    assert top < coordinator_seat.MAX_FIRST_ATTEMPT + 1000 + 200
    assert ask(ann, next_of(ann, top + 1))  # the others go on from there
    assert ask(ann, next_of(ann, top + 500))


def test_a_first_vote_request_may_have_a_late_attempt(four: World) -> None:
    world = four
    eve = world.identities["eve"].peer_id
    tries = (RoundId(RUN, 1, 0, 1, count) for count in range(coordinator_seat.MAX_FIRST_ATTEMPT + 10, 10**6))
    far = next(item for item in tries if world.opener(item) == eve)
    with pytest.raises(InvalidRequest, match="too far"):
        coordinator_seat.answer_vote_request(world.state, world.now, eve, far, b"")
    world.wait(20)
    assert coordinator_seat.answer_vote_request(world.state, world.now, eve, far, b"").result.granted


# --- lists -----------------------------------------------------------------------------------------------


def test_excess_checkpoints_and_addresses_are_dropped_without_ending_the_stream(world: World) -> None:
    eve = world.identities["eve"].peer_id
    told = [mb.CheckpointInfo(round=number, manifest_hash=b"h" * 32) for number in range(1, 101)]
    addresses = [f"/ip4/10.0.0.{number}/tcp/1" for number in range(100)]
    world.say("eve", checkpoints_changed=True, checkpoints=told, multiaddrs=addresses)
    assert [item.round for item in world.state.checkpoints[eve]] == list(range(100, 36, -1))
    assert world.state.nodes[eve].multiaddrs == tuple(addresses[:64])


def test_only_rounds_known_as_committed_are_pulled(world: World) -> None:
    everyone = [world.identities[name] for name in ALL]
    ann, eve = (world.identities[name].peer_id for name in ("ann", "eve"))
    true = round_report(1, world.state.memory[RUN].committed[0].manifest_hash, everyone)
    forged = round_report(10**6, b"x" * 32, everyone[:1], signers=[])
    world.say("ann", rounds=[true], checkpoints_changed=True, checkpoints=[info(true)])
    world.say("eve", checkpoints_changed=True, checkpoints=[info(forged)])
    (mine,) = checkpoints.choose_for_pull(world.state, RUN, 0, "")
    assert (mine.peer_id, mine.round) == (ann, 1)
    checkpoints.check_manifest(world.state, mine, true.manifest)
    with pytest.raises(NotFound, match="not known to have committed") as refusal:
        checkpoints.choose_for_pull(world.state, RUN, 0, "eve")
    assert "--unverified" in refusal.value.remedy
    (theirs,) = checkpoints.choose_for_pull(world.state, RUN, 0, "", unverified=True)
    assert theirs.peer_id == eve
    checkpoints.check_manifest(world.state, theirs, forged.manifest, unverified=True)
    with pytest.raises(PeerMisbehaved):
        checkpoints.check_manifest(world.state, theirs, forged.manifest)
    with pytest.raises(PeerMisbehaved):  # not what it said it holds
        checkpoints.check_manifest(world.state, theirs, true.manifest, unverified=True)


@pytest.mark.parametrize("votes_left", [0, 2])
def test_a_true_manifest_without_its_votes_is_not_passed_on(world: World, votes_left: int) -> None:
    everyone = [world.identities[name] for name in ALL]
    true = round_report(1, world.state.memory[RUN].committed[0].manifest_hash, everyone)
    world.say("eve", rounds=[true], checkpoints_changed=True, checkpoints=[info(true)])
    (wanted,) = checkpoints.choose_for_pull(world.state, RUN, 0, "")
    del true.manifest.signatures[votes_left:]
    with pytest.raises(SignatureInvalid):
        checkpoints.check_manifest(world.state, wanted, true.manifest)


def info(report: mb.RoundReport) -> mb.CheckpointInfo:
    return mb.CheckpointInfo(round=report.round.number, manifest_hash=hash_of(report), bytes=1)


# --- calls and messages ------------------------------------------------------------------------------------


def test_a_debt_is_paid_with_time() -> None:
    rate = Rate(10, 2.0)
    full = Allowance().charge(rate, 100.0, 10)
    assert full.debt_seconds(rate, 100.0) == 0
    owing = full.charge(rate, 100.0, 4)
    assert owing.debt_seconds(rate, 100.0) == 2.0
    assert owing.debt_seconds(rate, 101.5) == 0.5
    assert owing.debt_seconds(rate, 102.0) == 0
    assert not owing.is_full(rate, 106.9)
    assert owing.is_full(rate, 107.0)


def test_a_node_that_returns_with_all_that_it_kept_is_not_slowed_down() -> None:
    clock = SteppedClock()
    rates = CallRates(clock)
    rates.begin_call("ann")
    for _ in range(256):  # reports of rounds, the most that a node keeps
        rates.charge("ann", 64 << 10)
    for _ in range(20):  # evaluations
        rates.charge("ann", 16 << 10)
    rates.begin_call("ann")  # it asks for a vote meanwhile


def test_a_member_that_sends_too_much_is_refused_until_it_has_paid() -> None:
    clock = SteppedClock()
    rates = CallRates(clock)
    for _ in range(10):
        rates.charge("eve", 4 << 20)
    with pytest.raises(Busy, match="this node has sent too much"):
        rates.begin_call("eve")
    rates.begin_call("ann")
    clock.seconds += 60
    rates.begin_call("eve")


def test_allowances_of_members_that_went_away_are_forgotten() -> None:
    clock = SteppedClock()
    rates = CallRates(clock)
    for number in range(10_000):
        clock.seconds += 0.1
        rates.begin_call(f"node-{number}")
        rates.charge("eve", 1 << 20)
    assert len(rates._allowances) < 2000
    with pytest.raises(Busy):
        rates.begin_call("eve")


class SteppedClock:
    seconds = 0.0

    def monotonic(self) -> float:
        return self.seconds

    def unix(self) -> float:
        return self.seconds
