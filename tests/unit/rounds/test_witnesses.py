"""Members that do not hold a round's layers: they bring nothing, and decide with the others when holders attest."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from support.machine_node import BLANK
from support.machine_plans import GENESIS, OFFSETS, POLICY, layers_after, make_plan, policies
from support.machine_votes import FakeVoteSigner
from support.machine_world import World

from atoll.core.errors import PeerMisbehaved
from atoll.core.fragments import split_into_fragments
from atoll.core.manifest import Head, changed_layers, manifest_hash
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds import types as rt
from atoll.node.rounds.decide import (
    build_start,
    check_payload,
    check_start,
    is_attested,
    is_witness,
    manifest_payload,
    parts_total,
    position_at,
)
from atoll.node.rounds.machine import RoundMachine
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

WHOLE, FRONT, BACK = "p0", "p1", "p2"
ROUTES = [[(WHOLE, 0, 2)], [(FRONT, 0, 1), (BACK, 2, 2)]]
PEERS = [WHOLE, FRONT, BACK]
PLAN = make_plan(PEERS, routes=ROUTES)
CUT = policies(POLICY)(PLAN)  # two fragments: layers 0 and 1, and layer 2
NUMBER = RoundId("r", 1, 0, 1, 0)
MARK = b"ourmark8"


def started() -> dp.Start:
    ready = {peer: dp.Ready(tokens=100, samples=4, mark=MARK) for peer in PEERS}
    return build_start(CUT, PLAN, NUMBER, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)


def nonces_of(start: dp.Start) -> list[bytes]:
    opener = NUMBER.opener(PLAN.openers(GENESIS))
    return [bytes(16) if it.weight and it.peer_id != opener else b"" for it in start.contributions]


def result(present: Sequence[str] = PEERS, digest: bytes = b"a" * 32) -> bytes:
    start = started()
    there = [item.peer_id for item in start.contributions if item.peer_id in present]
    settle = dp.Settle(present=there, digests=[b"d" * 32] * parts_total(start), nonces=nonces_of(start))
    return manifest_payload(CUT, PLAN, GENESIS, start, settle, layers_after(CUT, GENESIS, digest))


def test_only_holders_bring_and_reduce_and_only_drivers_get_data():
    start = started()
    assert {item.peer_id: item.weight for item in start.contributions} == {WHOLE: 100, FRONT: 100, BACK: 0}
    assert {piece.reducer for piece in start.partition} == {WHOLE, FRONT}
    check_start(CUT, PLAN, NUMBER, dp.Ready(mark=MARK), BACK, start)
    place = [item.peer_id for item in start.contributions].index(BACK)
    for name in ("weight", "samples"):
        wrong = dp.Start()
        wrong.CopyFrom(start)
        setattr(wrong.contributions[place], name, 1)
        with pytest.raises(PeerMisbehaved, match="more than the plan"):
            check_start(CUT, PLAN, NUMBER, dp.Ready(tokens=100, samples=4), WHOLE, wrong)
    manifest = manifest_pb2.Manifest.FromString(result())
    assert manifest.fragments == 2
    assert changed_layers(manifest) == range(2)
    assert {item.peer_id for item in manifest.data.holdings} == {WHOLE, FRONT}
    assert manifest.committed_tokens == 2 * 50
    check_payload(CUT, PLAN, GENESIS, result())


@pytest.mark.parametrize(("peer", "mark"), [(WHOLE, b"another8"), (WHOLE, b""), (FRONT, b"short"), (FRONT, b"l" * 9)])
def test_a_start_repeats_our_mark_and_has_no_endless_ones(peer, mark):
    mine, start = dp.Ready(tokens=100, samples=4, mark=MARK), started()
    check_start(CUT, PLAN, NUMBER, mine, WHOLE, start)
    next(item for item in start.contributions if item.peer_id == peer).mark = mark
    with pytest.raises(PeerMisbehaved, match="mark"):
        check_start(CUT, PLAN, NUMBER, mine, WHOLE, start)
    manifest = manifest_pb2.Manifest.FromString(result())
    assert {item.mark for item in manifest.contributions} == {MARK}
    manifest.contributions[0].mark = b"long mark"
    with pytest.raises(PeerMisbehaved, match="mark"):
        check_payload(CUT, PLAN, GENESIS, manifest.SerializeToString(deterministic=True))


def test_a_start_without_a_holder_is_refused():
    ready = {BACK: dp.Ready(tokens=100, samples=4)}
    with pytest.raises(PeerMisbehaved, match="holds the round's layers"):
        build_start(CUT, PLAN, NUMBER, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)


@pytest.mark.parametrize("what", ["fragments", "witness", "others"])
def test_a_result_that_its_plan_cannot_have_had_is_none_to_vote_for(what):
    manifest = manifest_pb2.Manifest.FromString(result())
    if what == "fragments":
        manifest.fragments = 1
    elif what == "witness":
        for item in manifest.contributions:
            item.weight = 100
    else:
        manifest.layers[2].round = 1
    with pytest.raises(PeerMisbehaved):
        check_payload(CUT, PLAN, GENESIS, manifest.SerializeToString(deterministic=True))


def test_a_result_of_an_older_plan_may_be_cut_otherwise():
    later = make_plan(PEERS, 2)
    check_payload(policies(POLICY)(later), later, GENESIS, result())
    scattered = manifest_pb2.Manifest.FromString(result())
    scattered.layers[0].round, scattered.layers[2].round = 1, 1
    scattered.layers[1].CopyFrom(GENESIS.manifest.layers[1])
    with pytest.raises(PeerMisbehaved, match="consecutive"):
        check_payload(policies(POLICY)(later), later, GENESIS, scattered.SerializeToString(deterministic=True))


def test_a_result_wants_the_word_of_half_of_the_holders_that_took_part():
    assert not is_witness(PLAN, WHOLE, result())
    assert not is_witness(PLAN, FRONT, result())
    assert is_witness(PLAN, BACK, result())
    assert is_attested(PLAN, result(), {WHOLE})
    assert not is_attested(PLAN, result(), {BACK})
    assert not is_attested(PLAN, result(), set())
    many = make_plan(["a", "b", "c", "d"], routes=[[("a", 0, 2)], [("b", 0, 2)], [("c", 0, 1), ("d", 2, 2)]])
    manifest = manifest_pb2.Manifest.FromString(result())
    del manifest.contributions[:]
    manifest.contributions.extend(manifest_pb2.Contribution(peer_id=peer, present=True) for peer in "abcd")
    payload = manifest.SerializeToString()
    assert not is_attested(many, payload, {"a"})
    assert is_attested(many, payload, {"a", "c"})
    manifest.contributions[1].present = manifest.contributions[2].present = False  # who leaves is asked, too
    assert not is_attested(many, manifest.SerializeToString(), {"a"})
    older = manifest_pb2.Manifest.FromString(payload)
    older.round.plan_version = 0  # who held what then is not known here
    for item in older.contributions[:3]:
        item.weight = 10
    assert not is_attested(many, older.SerializeToString(), {"a"})
    assert is_attested(many, older.SerializeToString(), {"a", "d"})
    assert not is_attested(many, older.SerializeToString(), {"a", "x"})


def waiting_witness(present: Sequence[str] = PEERS) -> tuple[RoundMachine, str]:
    """BACK, which waits for the Commit, and the opener."""
    machine = RoundMachine(
        BACK, policies(POLICY), FakeVoteSigner(BACK), GENESIS, PLAN, 0.0, BLANK, draw_mark=lambda: MARK
    )
    opener = NUMBER.opener(PLAN.openers(GENESIS))
    opened = dp.Open(round=NUMBER.to_proto(), head_hash=GENESIS.hash, deadline_ms=4000)
    machine.step(rt.Received(opener, dp.RoundMessage(open=opened)), 0.1)
    start = started()
    machine.step(rt.Received(opener, dp.RoundMessage(start=start)), 0.2)
    settle = dp.Settle(
        round=NUMBER.to_proto(),
        present=[item.peer_id for item in start.contributions if item.peer_id in present],
        as_reported=True,
        deadline_ms=4000,
        nonces=nonces_of(start),
    )
    machine.step(rt.Received(opener, dp.RoundMessage(settle=settle)), 0.3)
    assert machine.phase is rt.Phase.AWAITING_COMMIT
    return machine, opener


def propose(*holders: str, payload: bytes | None = None) -> dp.RoundMessage:
    payload = payload or result()
    words = [FakeVoteSigner(peer).attest(payload) for peer in holders]
    proposal = dp.Proposal(payload=payload, attestations=words)
    return dp.RoundMessage(propose=dp.Propose(round=NUMBER.to_proto(), proposal=proposal, deadline_ms=4000))


def test_a_witness_with_a_seat_freezes_nothing_and_votes_for_what_a_holder_attests_to():
    machine, opener = waiting_witness()
    actions = machine.step(rt.Received(opener, propose(WHOLE)), 0.4)
    pledges = [action for action in actions if isinstance(action, rt.Pledge)]
    assert [pledge.record.voted.payload for pledge in pledges if pledge.record.voted] == [result()]
    assert [pledge.message.WhichOneof("body") for pledge in pledges] == ["vote"]
    assert machine.phase is rt.Phase.AWAITING_COMMIT


def votes_of(actions: list[rt.Action]) -> list[rt.Pledge]:
    return [action for action in actions if isinstance(action, rt.Pledge) and action.message.HasField("vote")]


def test_a_seat_votes_once_in_an_attempt_whatever_is_proposed():
    machine, opener = waiting_witness()
    assert votes_of(machine.step(rt.Received(opener, propose(WHOLE)), 0.4))
    assert votes_of(machine.step(rt.Received(opener, propose(WHOLE)), 0.5))  # the same again
    other = propose(FRONT, payload=result(digest=b"b" * 32))
    assert not votes_of(machine.step(rt.Received(opener, other), 0.6))


def test_a_seat_that_told_what_it_has_does_not_vote_itself_away():
    without = [WHOLE, FRONT]
    machine, opener = waiting_witness(without)
    message = propose(WHOLE, payload=result(without))
    assert not votes_of(machine.step(rt.Received(opener, message), 0.4))
    assert machine.phase is rt.Phase.AWAITING_COMMIT  # the others may decide so


@pytest.mark.parametrize("what", ["weights", "an attempt without us", "a seat taken", "of no majority", "mark"])
def test_nobody_makes_up_what_an_earlier_attempt_came_to(what):
    """Attempt 0 was abandoned, and the opener of attempt 1 says that it may be committed."""
    machine, first = waiting_witness()
    abandon = dp.RoundMessage(abandon=dp.Abandon(round=NUMBER.to_proto()))
    machine.step(rt.Received(first, abandon), 0.4)
    later = replace(NUMBER, attempt=1)
    opener = later.opener(PLAN.openers(GENESIS))
    opened = dp.Open(round=later.to_proto(), head_hash=GENESIS.hash, deadline_ms=4000)
    machine.step(rt.Received(opener, dp.RoundMessage(open=opened)), 9.0)
    assert machine.phase is rt.Phase.READY
    manifest = manifest_pb2.Manifest.FromString(result())
    place = {item.peer_id: item for item in manifest.contributions}
    if what == "weights":
        place[WHOLE].weight = place[WHOLE].tokens = 50
        place[WHOLE].tokens //= 2
        manifest.committed_tokens = sum(item.tokens for item in manifest.contributions)
    elif what == "an attempt without us":
        manifest.round.attempt = 1
        later = replace(NUMBER, attempt=2)
    elif what == "mark":
        place[BACK].mark = b"another8"
    elif what == "a seat taken":
        del manifest.seats[1:]
    else:
        alone = place[WHOLE].SerializeToString()
        del manifest.contributions[:], manifest.seats[:]
        manifest.contributions.add().MergeFromString(alone)
        manifest.seats.append(0)
        manifest.committed_tokens = manifest.contributions[0].tokens
    message = propose(WHOLE, FRONT, payload=manifest.SerializeToString(deterministic=True))
    message.propose.round.attempt = 1
    assert not votes_of(machine.step(rt.Received(opener, message), 9.1))
    honest = waiting_witness()[0]
    honest.step(rt.Received(first, abandon), 0.4)
    honest.step(rt.Received(opener, dp.RoundMessage(open=opened)), 9.0)
    message = propose(WHOLE, FRONT)
    message.propose.round.attempt = 1
    assert votes_of(honest.step(rt.Received(opener, message), 9.1))


@pytest.mark.parametrize(
    ("routes", "leaving"),
    [
        ([[("p0", 0, 1), ("p1", 2, 2)]], ["p0"]),
        ([[("p0", 0, 1), ("p1", 2, 2)]], ["p0", "p1"]),
        ([[("p0", 0, 1), ("p1", 2, 2)], [("p2", 0, 1), ("p3", 2, 2)]], ["p0", "p2"]),
    ],
)
def test_rounds_go_on_though_all_holders_of_some_layers_want_to_leave(routes, leaving):
    world = World(2 * len(routes), seed=3, routes=routes)
    assert world.run(60, until=lambda: world.rounds() >= 4)
    for peer in leaving:
        world.feed(peer, rt.Leave())
    before = world.rounds()
    assert world.run(60, until=lambda: world.rounds() >= before + 8)


def test_rounds_go_on_though_the_only_holder_of_some_layers_cannot_write():
    world = World(2, seed=3, routes=[[("p0", 0, 1), ("p1", 2, 2)]])
    assert world.run(60, until=lambda: world.rounds() >= 4)
    world.fill_disk("p0")
    before = world.rounds()
    assert world.run(60, until=lambda: world.rounds() >= before + 8)


@pytest.mark.parametrize(("size", "dead"), [(2, 0), (3, 1), (4, 1), (5, 2)])
def test_a_member_that_makes_up_an_earlier_vote_of_its_own_binds_nobody(size, dead):
    """It says that it voted for a result of an older plan, in which it was alone, and that it holds that."""
    world = World(size, seed=1)
    world.run(20)
    for peer in world.peers[size - dead :]:
        world.kill(peer)
    liar, signer, lies = "p1", FakeVoteSigner("p1"), []

    def lie(sender: str, to: str, message: dp.RoundMessage) -> bool:
        if sender != liar or to == liar or message.WhichOneof("body") != "ready":
            return False
        node = world.nodes[to].machine
        if message.ready.round.number != node.head.round + 1:
            return False
        made = RoundId("r", 1, 0, node.head.round + 1, 0)
        ready = {liar: dp.Ready(tokens=10_000, samples=4)}
        start = build_start(node.policy, node.plan, made, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)
        settle = dp.Settle(present=[liar], digests=[b"d" * 32] * parts_total(start))
        layers = layers_after(node.policy, node.head, b"EVIL" * 8)
        manifest = manifest_pb2.Manifest.FromString(
            manifest_payload(node.policy, node.plan, node.head, start, settle, layers)
        )
        for plan_version in (0, 1):
            manifest.round.plan_version = plan_version
            payload = manifest.SerializeToString(deterministic=True)
            ballot = RoundId("r", plan_version, 0, made.number, 0)
            proposal = dp.Proposal(payload=payload, attestations=[signer.attest(payload)])
            forged = dp.RoundMessage.FromString(message.SerializeToString())
            forged.ready.accepted.CopyFrom(
                dp.Accepted(ballot=ballot.to_proto(), signature=signer.vote(payload, ballot.ballot), proposal=proposal)
            )
            forged.ready.holds.append(manifest_hash(payload))
            lies.append(payload)
            world.at(0.001, world.feed, to, rt.Received(liar, forged))
        return True

    world.network.drop = lie
    world.run(60)
    assert lies
    assert not any(head.committed.payload in lies for head in world.committed.values())


@pytest.mark.parametrize("words", ["none of a holder", "one holder twice", "forged", "of another result"])
def test_a_seat_does_not_believe_an_opener_alone(words):
    machine, opener = waiting_witness()
    message = propose(WHOLE)
    if words == "none of a holder":
        message = propose(BACK)
    elif words == "one holder twice":
        message = propose(WHOLE, WHOLE)
    elif words == "of another result":  # one that leaves the next round to the liar alone
        manifest = manifest_pb2.Manifest.FromString(result())
        for item in manifest.contributions:
            item.present = item.peer_id == WHOLE
        message = propose(WHOLE, payload=manifest.SerializeToString(deterministic=True))
    else:
        message.propose.proposal.attestations[0].signature = b"no"
    actions = machine.step(rt.Received(opener, message), 0.4)
    assert not any(isinstance(action, rt.Pledge) for action in actions)
    assert machine.phase is rt.Phase.IDLE


def test_a_witness_takes_a_committed_round_without_any_state():
    world = World(3, seed=1, routes=ROUTES)
    world.run(60)
    assert world.rounds() >= 10
    assert not world.caught_up
    assert len(world.heads()) == 1
    for head in world.committed.values():
        brought = {item.peer_id for item in head.manifest.contributions if item.weight}
        assert brought <= PLAN.holders(changed_layers(head.manifest))


def test_a_member_that_lost_its_disk_votes_once_a_manifest_holds_its_mark():
    """As a witness, too: the manifest with the new mark is younger than all that an earlier life voted for."""
    world = World(3, seed=1, routes=ROUTES)
    assert world.run(60, until=lambda: world.rounds() >= 4)
    world.kill(BACK)
    world.restart(BACK, disk=False)
    machine, installed = world.nodes[BACK].machine, []
    install = world._install

    def watch(node, head, counted) -> None:
        install(node, head, counted)
        if node.peer == BACK:
            marks = [item.mark for item in head.manifest.contributions if item.peer_id == BACK]
            installed.append((marks, machine.votes))

    lost = world.nodes[BACK].machine.head.round
    world._install = watch
    assert world.run(60, until=lambda: any(votes for _, votes in installed))
    record = world.nodes[BACK].disk.record
    assert record is not None
    *without, (marks, _) = installed
    assert set(marks) <= set(record.marks)
    assert marks
    assert not any(set(marks) & set(record.marks) for marks, _ in without)
    assert lost


def test_a_holder_that_attests_to_a_result_of_its_own_gets_no_vote_for_it():
    """It names itself as the only one who decides the next round, and the other holder's word is lost on the way."""
    world, lies = World(3, seed=4, routes=ROUTES), []

    def lie(sender: str, to: str, message: dp.RoundMessage) -> bool:
        if message.WhichOneof("body") != "digest" or message.digest.round.fragment:
            return False
        if sender != FRONT:
            return sender == WHOLE
        manifest = manifest_pb2.Manifest.FromString(message.digest.payload)
        for item in manifest.contributions:
            item.present = item.peer_id == FRONT
        payload = manifest.SerializeToString(deterministic=True)
        digest = dp.Digest(round=message.digest.round, payload=payload)
        digest.attestation.CopyFrom(FakeVoteSigner(FRONT).attest(payload))
        lies.append(payload)
        world.at(0.001, world.feed, to, rt.Received(FRONT, dp.RoundMessage(digest=digest)))
        return True

    world.network.drop = lie
    assert world.run(300, until=lambda: world.rounds() >= 6)
    assert lies
    assert not any(head.committed.payload in lies for head in world.committed.values())


def test_holders_that_differ_are_told_so_and_nobody_votes_for_either():
    world = World(3, seed=6, routes=ROUTES)
    world.layers_of = lambda peer, digest: b"x" * 32 if peer == FRONT else digest
    world.run(40)
    assert world.rounds() == 0
    assert any("differ" in report.reason or "no majority" in report.reason for report in world.reports)


def test_drivers_that_are_all_new_get_data_at_once():
    payload = manifest_pb2.Manifest.FromString(result())
    head = Head(manifest_pb2.CommittedManifest(payload=payload.SerializeToString()))
    later = make_plan(["p8", "p9"], 2, routes=[[("p8", 0, 1), ("p9", 2, 2)]])
    assert position_at(head, PLAN, 8) == head.data
    given = position_at(head, later, 8)
    assert sum(end - start for start, end in given.holdings["p8"]) >= 8
    assert {peer: given.holdings[peer] for peer in head.data.holdings} == dict(head.data.holdings)
    assert set(given.holdings) - head.data.holdings.keys() == {"p8"}


def test_rounds_are_due_by_what_holders_trained():
    """BACK trains as fast as the others; in rounds of the front its tokens count for nothing."""
    world = World(3, seed=2, policy=replace(POLICY, due_tokens=lambda *_: 600), routes=ROUTES)
    assert world.run(60, until=lambda: world.rounds() >= 2)
    first = world.committed[1].manifest
    assert sum(item.weight for item in first.contributions) >= 600
    assert {item.peer_id for item in first.contributions if item.weight} == {WHOLE, FRONT}


def test_a_change_of_cuts_changes_fragments_and_no_layers_version():
    world = World(4, seed=3, policy=replace(POLICY, fragments=split_into_fragments(OFFSETS, 1)))
    world.run(15)
    before = world.rounds()
    peers = world.peers
    routes = [[(peers[0], 0, 2)], [(peers[1], 0, 0), (peers[2], 1, 2)], [(peers[3], 0, 2)]]
    world.issue(make_plan(peers, 2, world.plan.base, routes))
    assert world.run(60, until=lambda: world.rounds() >= before + 8)
    heads = [world.committed[number] for number in sorted(world.committed)]
    versions = [[layer.round for layer in head.manifest.layers] for head in heads]
    for older, newer in pairwise(versions):
        assert all(a <= b for a, b in zip(older, newer, strict=True))
    cut = [changed_layers(head.manifest) for head in heads if head.manifest.round.plan_version == 2]
    assert set(cut) == {range(1), range(1, 3)}


def test_genesis_changes_every_layer():
    assert changed_layers(GENESIS.manifest) == range(3)
    assert isinstance(GENESIS, Head)
