"""The round machine, as members experience it: commits that are equal everywhere, or none, and nobody hangs."""

from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.machine_node import BLANK
from support.machine_plans import GENESIS, POLICY, make_plan
from support.machine_votes import FakeVoteSigner
from support.machine_world import World

from atoll.core.plan import Base
from atoll.core.quorum import COORDINATOR, Ballot, VoteRecord
from atoll.core.round_id import RoundId
from atoll.node.rounds import types as rt
from atoll.node.rounds.machine import RoundMachine
from atoll.node.rounds.types import Phase
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2


def first_opener(world: World) -> str:
    return world.nodes[world.peers[0]].machine.round_id.opener(world.peers)


def members_of(head) -> set[str]:
    return {item.peer_id for item in head.manifest.contributions}


def committed(world: World, number: int):
    return lambda: world.rounds() >= number and len(world.heads()) == 1


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_rounds_commit_the_same_manifests_everywhere(size):
    w = World(size)
    assert w.run(60, until=committed(w, 4))
    for before, after in pairwise(w.committed[number] for number in sorted(w.committed)):
        assert after.manifest.previous_hash == before.hash
    assert all(report.manifest is not None for report in w.reports)


def test_committed_tokens_add_up_and_every_member_holds_samples():
    w = World(3)
    w.run(20)
    head = w.committed[w.rounds()]
    assert head.committed_tokens == sum(c.tokens for h in w.committed.values() for c in h.manifest.contributions)
    assert set(head.data.holdings) == set(w.peers)


def test_a_dead_member_costs_one_deadline_and_is_dropped():
    w = World(4)
    assert w.run(60, until=committed(w, 3))
    victim = w.peers[2]
    w.kill(victim)
    before, began = w.rounds(), w.now
    assert w.run(60, until=committed(w, before + 1))
    assert w.now - began < 12
    assert victim not in w.committed[before + 1].electorate.members
    began = w.now
    assert w.run(60, until=committed(w, before + 4))
    assert w.now - began < 12  # nobody waits for it any more


@pytest.mark.parametrize("phase", [Phase.FREEZING, Phase.READY, Phase.EXCHANGING, Phase.AWAITING_SETTLE, Phase.STAGING])
def test_a_member_frozen_in_any_phase_holds_nobody_up_and_returns_without_losing_progress(phase):
    w = World(4, seed=5)
    assert w.run(60, until=committed(w, 3))
    victim = next(peer for peer in w.peers if peer != first_opener(w))
    assert w.run(60, until=lambda: w.nodes[victim].machine.phase is phase)
    w.freeze(victim)
    before, began = w.rounds(), w.now
    assert w.run(60, until=lambda: w.rounds() > before)
    assert w.now - began < 12
    w.run(10)
    trained = w.nodes[victim].trained
    w.thaw(victim)
    assert w.run(60, until=lambda: victim in w.committed[w.rounds()].electorate.members)
    assert w.run(60, until=committed(w, w.rounds()))
    assert w.nodes[victim].spent >= trained > 0  # what it trained before it was frozen counts


def test_a_member_with_long_steps_is_waited_for():
    w = World(4)
    slow = w.peers[1]
    w.step_seconds[slow] = 2.0
    assert w.run(120, until=lambda: w.rounds() >= 30)
    present = [slow in w.committed[number].electorate.members for number in range(10, 31)]
    assert sum(present) >= 0.9 * len(present)


@pytest.mark.parametrize(("place", "most"), [("stands by", 1.5), ("trains", 10.0)])
def test_who_stands_by_is_not_waited_for(place, most):
    """Where the same slow member trains, its rounds take as long as it."""
    routes = [[(peer, 0, POLICY.layers - 1)] for peer in ("p0", "p1", "p2")]
    seconds = {}
    for step_seconds in (0.0, 3.0):
        w = World(4, seed=3, routes=routes if place == "stands by" else None)
        w.step_seconds["p3"] = step_seconds
        assert w.run(600, until=lambda w=w: w.rounds() >= 12)
        seconds[step_seconds] = w.now
        weights = {item.peer_id: item.weight for item in w.committed[12].manifest.contributions}
        assert bool(weights.get("p3")) is (place == "trains")
    assert (seconds[3.0] <= 1.5 * seconds[0.0]) is (place == "stands by")
    assert seconds[3.0] <= most * seconds[0.0]


@pytest.mark.parametrize("seed", range(6))
def test_who_stands_by_is_waited_for_where_it_takes_its_vote(seed):
    """One of two that train is gone; the other cannot decide alone, nor with the coordinator."""
    w = World(3, seed=seed, routes=[[(peer, 0, POLICY.layers - 1)] for peer in ("p0", "p1")])
    assert w.run(600, until=lambda: w.rounds() >= 5 and "p2" in w.committed[w.rounds()].electorate.members)
    w.step_seconds["p2"] = 2.5
    w.kill("p1")
    before, told = w.rounds(), len(w.reports)
    assert w.run(60, until=lambda: w.rounds() >= before + 6)
    abandoned = [report.reason for report in w.reports[told:] if report.manifest is None]
    outrun = [reason for reason in abandoned if reason.startswith("this node moved")]  # by who did not wait any more
    assert abandoned == outrun
    assert len(outrun) <= 1


def test_who_stands_by_follows_every_round_that_it_is_in_time_for():
    w = World(4, seed=3, routes=[[(peer, 0, POLICY.layers - 1)] for peer in ("p0", "p1", "p2")])
    assert w.run(600, until=lambda: w.rounds() >= 20)
    there = [w.committed[number].electorate.members for number in range(3, 21)]
    assert sum("p3" in members for members in there) >= 0.9 * len(there)
    assert not any(peer == "p3" for _, peer in w.caught_up)


def test_a_result_that_cannot_be_is_not_voted_for():
    """An opener that makes up an earlier result gets no votes, and a member that makes up a vote does not bind."""
    w = World(3)
    assert w.run(60, until=committed(w, 3))
    liar = w.peers[0]

    def forge(sender, to, message):
        if sender == liar and message.WhichOneof("body") == "start":
            payload = manifest_pb2.Manifest(
                round=message.start.round,
                previous_hash=w.nodes[to].machine.head.hash,
                contributions=[manifest_pb2.Contribution(peer_id=liar, present=True)],
                committed_tokens=10**12,
            ).SerializeToString()
            round_id = message.start.round
            for forged in (payload, b"\xff"):
                word = FakeVoteSigner(liar).attest(forged)
                proposal = dp.Proposal(payload=forged, attestations=[word])
                message.propose.CopyFrom(dp.Propose(round=round_id, proposal=proposal, deadline_ms=1000))
        if sender == liar and message.WhichOneof("body") == "ready":
            ballot = message.ready.round
            message.ready.accepted.CopyFrom(dp.Accepted(ballot=ballot, proposal=dp.Proposal(payload=b"made up")))
            message.ready.accepted.ballot.attempt = 2**31
        return False

    w.network.drop = forge
    before = w.rounds()
    assert w.run(120, until=lambda: w.rounds() >= before + 3)
    assert all(head.committed_tokens < 10**6 for head in w.committed.values())
    assert all(set(w.peers[1:]) <= head.electorate.members for head in w.committed.values())


def test_an_opener_cannot_settle_the_others_out():
    w = World(3)
    assert w.run(60, until=committed(w, 3))
    liar = w.peers[0]

    def forge(sender, to, message):
        if sender == liar and message.WhichOneof("body") == "settle":
            del message.settle.present[:]
            message.settle.present.append(liar)
        return False

    w.network.drop = forge
    before = w.rounds()
    assert w.run(120, until=lambda: w.rounds() >= before + 3)
    assert all(len(head.electorate.members) >= 2 for head in w.committed.values())


def test_replicas_that_differed_once_do_not_block_for_ever():
    w = World(2)
    assert w.run(60, until=committed(w, 2))
    w.acceptor.up = False
    w.layers_of = lambda peer, digest: digest if peer == w.peers[0] else b"x" * 32
    w.run(20)
    w.layers_of = lambda peer, digest: digest
    w.acceptor.up = True
    assert w.run(120, until=committed(w, w.rounds() + 2))


def test_the_next_in_order_opens_when_the_opener_is_dead():
    w = World(3)
    w.run(0.5)
    w.kill(first_opener(w))
    assert w.run(60, until=committed(w, 2))
    assert w.committed[1].manifest.round.attempt > 0


def test_the_opener_dies_after_the_votes_and_its_result_is_adopted_by_the_next():
    w = World(3)
    opener = first_opener(w)
    w.network.drop = lambda sender, to, message: sender == opener and message.WhichOneof("body") == "commit"
    assert w.run(60, until=lambda: any(head.round == 1 for head in w.ledger.installed[opener]))
    w.kill(opener)
    assert w.run(60, until=committed(w, 2))
    first = {head.hash for heads in w.ledger.installed.values() for head in heads if head.round == 1}
    assert first == {w.committed[1].hash}
    assert w.committed[1].manifest.round.attempt == 0


def test_two_of_four_go_on_with_the_coordinator_and_wait_without_it():
    w = World(4)
    assert w.run(60, until=committed(w, 2))
    w.acceptor.up = False
    for peer in w.peers[:2]:
        w.kill(peer)
    before = w.rounds()
    w.run(40)
    assert w.rounds() == before
    assert all(node.trained > node.spent for node in w.live())  # training goes on
    waiting = {node.peer: node.spent for node in w.live()}
    w.acceptor.up = True
    assert w.run(60, until=committed(w, before + 1))
    assert COORDINATOR.encode() in {vote.public_key for vote in w.committed[before + 1].committed.signatures}
    for node in w.live():
        assert node.spent > waiting[node.peer] + 1_000  # what was trained while waiting counts


def test_a_minority_cut_off_commits_nothing_and_its_progress_enters_after_healing():
    w = World(5)
    assert w.run(60, until=committed(w, 2))
    few, many = w.peers[:2], w.peers[2:]
    w.network.part(few, many)
    heads = {peer: w.nodes[peer].machine.head.round for peer in few}
    w.run(30)
    assert {peer: w.nodes[peer].machine.head.round for peer in few} == heads
    assert min(w.nodes[peer].machine.head.round for peer in many) > max(heads.values())
    w.heal()
    spent = {peer: w.nodes[peer].spent for peer in few}
    assert w.run(20, until=lambda: all(w.nodes[peer].spent > spent[peer] + 500 for peer in few))


def test_a_restarted_voter_remembers_and_a_forgetful_one_abstains():
    w = World(3)
    assert w.run(60, until=committed(w, 3))
    kept, lost = w.peers[0], w.peers[1]
    for peer in (kept, lost):
        w.kill(peer)
        w.restart(peer, disk=peer == kept)
    assert w.nodes[kept].machine.votes
    assert not w.nodes[lost].machine.votes
    assert w.run(60, until=lambda: w.nodes[lost].machine.votes)  # once it was part of a round


@pytest.mark.parametrize("victim", range(3))
def test_a_member_with_a_full_disk_still_contributes_holds_nobody_up_and_decides_nothing(victim):
    w = World(3, policy=replace(POLICY, due_tokens=lambda *_: 600))
    assert w.run(120, until=committed(w, 4))
    usual, began, before = w.now / 4, w.now, w.rounds()
    full = w.peers[victim]
    w.fill_disk(full)
    assert w.run(120, until=committed(w, before + 6))
    assert (w.now - began) / 6 < 1.5 * usual
    for number in range(before + 1, before + 7):
        weights = {item.peer_id: item.weight for item in w.committed[number].manifest.contributions}
        assert weights[full] > 100
        assert full not in w.committed[number].electorate.members
    w.fill_disk(full, full=False)
    assert w.run(60, until=lambda: full in w.committed[w.rounds()].electorate.members)


def test_two_of_three_with_full_disks_block_nobody_once_they_are_known():
    w = World(3)
    assert w.run(60, until=committed(w, 2))
    w.fill_disk(w.peers[0])
    assert w.run(60, until=committed(w, w.rounds() + 2))
    w.fill_disk(w.peers[1])
    assert w.run(60, until=committed(w, w.rounds() + 4))


def test_who_leaves_in_order_makes_the_round_open_and_decides_no_more():
    w = World(2, policy=replace(POLICY, due_tokens=lambda *_: 10_000))
    w.run(10)
    assert w.rounds() == 0
    left, stays = w.peers
    w.acceptor.up = False
    w.leave(left)
    assert w.run(30, until=lambda: w.rounds() == 1)
    assert members_of(w.committed[1]) == {left, stays}
    assert w.committed[1].seats == (stays,)  # nobody is missed, the coordinator is not needed


def test_differing_replicas_never_commit_unless_a_majority_agrees():
    w = World(3)
    liar = w.peers[1]
    w.layers_of = lambda peer, digest: b"x" * 32 if peer == liar else digest
    assert w.run(60, until=lambda: w.rounds() >= 2)
    assert all(
        not any(head.manifest.layers[0].anchor_digest == b"x" * 32 for head in w.committed.values()) for _ in [0]
    )
    assert any(peer == liar for peer, _ in w.caught_up)
    pair = World(2)
    pair.layers_of = lambda peer, digest: digest if peer == pair.peers[0] else b"x" * 32
    pair.acceptor.up = False
    pair.run(60)
    assert pair.rounds() == 0
    assert any("replicas differ" in report.reason for report in pair.reports)


def test_nobody_meets_under_two_plans_and_members_tell_one_another_the_newer():
    w = World(3)
    newer = make_plan(w.peers, version=2)
    w.issue(newer, to=[w.peers[0]])  # the coordinator reaches only one of them
    assert w.run(60, until=committed(w, 2))
    assert all(node.machine.plan.version == 2 for node in w.live())


@pytest.mark.parametrize("size", [2, 4])
def test_a_member_that_had_the_new_plan_first_is_not_left_out(size):
    """Its opener waits for the plan too: it does not go on without it, whose state would have to be fetched then."""
    for seed in range(20):
        w = World(size, seed=seed)
        assert w.run(60, until=committed(w, 3))
        w.issue(make_plan(w.peers, version=2), to=w.peers[:1])
        before = w.rounds()
        assert w.run(60, until=committed(w, before + 3))
        assert all(head.present == set(w.peers) for head in w.committed.values())


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_member_that_makes_up_a_newer_plan_costs_each_opener_one_attempt(size):
    w = World(size)
    assert w.run(60, until=committed(w, 3))
    liar = w.peers[0]

    def forge(sender, to, message):
        if sender == liar and message.WhichOneof("body") == "ready" and to != liar:
            decline = dp.Decline(round=message.ready.round, reason="so I say", plan_version=99)
            message.decline.CopyFrom(decline)
        return False

    w.network.drop = forge
    assert w.run(120, until=lambda: w.rounds() >= 8)
    w.run(30)  # now every opener had its one
    before, began = w.rounds(), w.now
    assert w.run(60, until=lambda: w.rounds() >= before + 5)
    assert w.now - began < 25  # about as long as with a member that is silent


def test_a_recovery_makes_later_rounds_void():
    w = World(3)
    assert w.run(60, until=committed(w, 3))
    base = w.committed[1]
    w.issue(make_plan(w.peers, 2, Base(base.hash, tuple(w.peers), base.round, 2)))
    w.run(3)
    assert any("another history" in reason for _, reason in w.caught_up)


def test_who_fetched_what_a_recovery_made_void_meanwhile_looks_again():
    w = World(3)
    assert w.run(60, until=committed(w, 3))
    base, machine = w.committed[1], w.nodes["p0"].machine
    assert w.run(60, until=lambda: machine.phase is Phase.IDLE)
    machine.step(rt.PlanReceived(make_plan(w.peers, 2, Base(base.hash, tuple(w.peers), base.round, 2))), 1e6)
    assert machine.plan.version == 2
    void = machine.step(rt.HeadMoved(w.committed[3]), 1e6)
    assert any(isinstance(action, rt.CatchUp) and "another history" in action.reason for action in void)
    assert not any(isinstance(action, rt.CatchUp) for action in machine.step(rt.HeadMoved(base), 1e6))


def test_the_run_stops_at_its_tokens():
    w = World(2, policy=replace(POLICY, stop_tokens=250))
    w.run(60)
    assert all(node.machine.finished for node in w.live())
    assert len(w.heads()) == 1
    before = w.rounds()
    w.run(60)
    assert w.rounds() == before


@pytest.mark.parametrize(
    "tamper",
    [
        lambda start: start.contributions[0].__setattr__("weight", 10**9),
        lambda start: start.contributions[0].__setattr__("tokens", 10**12),
        lambda start: start.partition[0].__setattr__("end", start.partition[0].end + 128),
        lambda start: start.__setattr__("codec", 1),
        lambda start: start.__setattr__("elements", 10),
        lambda start: start.contributions.reverse(),
        lambda start: start.contributions.pop(),
    ],
)
def test_a_start_that_the_plan_does_not_allow_is_refused(tamper):
    w = World(3)
    seen = []

    def forge(sender, to, message):
        if message.WhichOneof("body") == "start":
            attempt = (message.start.round.number, message.start.round.attempt)
            if attempt not in seen:  # the same message goes to every receiver
                tamper(message.start)
            seen.append(attempt)
        return False

    w.network.drop = forge
    w.run(12)
    assert seen
    tampered = {attempt for attempt in seen if attempt[0] == 1}
    assert all((1, head.manifest.round.attempt) not in tampered for head in w.committed.values() if head.round == 1)
    assert any(report.manifest is None for report in w.reports)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_no_claim_in_ready_ends_the_run_or_the_machines(tokens, samples):
    w = World(3)
    liar = w.peers[0]

    def exaggerate(sender, to, message):
        if sender == liar and message.WhichOneof("body") == "ready":
            message.ready.tokens, message.ready.samples = tokens, samples
        return False

    w.network.drop = exaggerate
    w.run(20)
    w.network.drop = lambda *_: False
    assert w.run(100, until=committed(w, w.rounds() + 2))
    head = w.committed[w.rounds()]
    cap = w.plan.assignment(liar).max_round_tokens
    assert head.committed_tokens <= cap * 3 * head.round
    assert head.data.cursor < 10_000


def test_an_outsider_cannot_end_an_attempt():
    w = World(3)

    def shout(sender, to, message):
        if message.WhichOneof("body") == "ready":
            for forged in (
                dp.RoundMessage(abandon=dp.Abandon(round=message.ready.round, reason="because")),
                dp.RoundMessage(decline=dp.Decline(round=message.ready.round, reason="because", attempt=10**6)),
            ):
                w.feed(to, rt.Received("outsider", forged))
        return False

    w.network.drop = shout
    assert w.run(60, until=committed(w, 3))
    assert all(report.manifest is not None for report in w.reports)


def test_a_commit_without_enough_votes_moves_nobody():
    w = World(3)
    forged = []

    def forge(sender, to, message):
        if message.WhichOneof("body") == "digest":
            manifest = manifest_pb2.CommittedManifest(payload=message.digest.payload)
            commit = dp.Commit(round=message.digest.round, manifest=manifest)
            for peer in w.peers:
                w.feed(peer, rt.Received(w.peers[0], dp.RoundMessage(commit=commit)))
            forged.append(commit)
        return message.WhichOneof("body") == "commit"

    w.network.drop = forge
    w.run(8)
    assert forged
    openers = {report.round_id.opener(w.peers) for report in w.reports if report.manifest is not None}
    assert {peer for peer in w.peers if w.ledger.installed[peer]} <= openers


def rounds_of(plan_version, number, attempt):
    return {"run_id": "r", "plan_version": plan_version, "fragment": 0, "number": number, "attempt": attempt}


small = st.integers(0, 4)
huge = st.one_of(st.integers(0, 200), st.just(2**64 - 1))
KINDS = {
    "report": lambda r, n: dp.TokenReport(round=r, tokens=n, leaving=bool(n % 2)),
    "open": lambda r, n: dp.Open(round=r, head_hash=b"x", deadline_ms=n % 2**32),
    "ready": lambda r, n: dp.Ready(round=r, tokens=n, samples=n, voter=True, accepted=dp.Accepted(ballot=r)),
    "start": lambda r, n: dp.Start(round=r, elements=n, part_elements=n % 1000, deadline_ms=n % 2**32),
    "parts": lambda r, n: dp.Parts(round=r, digests=[b"x" * (n % 40)] * (n % 9), nonce=b"q" * (n % 40)),
    "settle": lambda r, n: dp.Settle(round=r, present=["p0"], digests=[b""] * (n % 9), deadline_ms=n % 2**32),
    "propose": lambda r, n: dp.Propose(round=r, proposal=dp.Proposal(payload=b"\xff" * (n % 7)), deadline_ms=n % 2**32),
    "vote": lambda r, n: dp.Vote(round=r),
    "digest": lambda r, n: dp.Digest(round=r, payload=b"x" * (n % 5)),
    "commit": lambda r, n: dp.Commit(round=r, manifest=manifest_pb2.CommittedManifest(payload=b"x" * (n % 5))),
    "abandon": lambda r, n: dp.Abandon(round=r, reason="x"),
    "decline": lambda r, n: dp.Decline(round=r, reason="x", plan_version=n, attempt=n % 2**32),
}
messages = st.tuples(st.sampled_from(sorted(KINDS)), small, small, small, huge)


@settings(max_examples=150, deadline=None)
@given(st.lists(messages, max_size=15), st.integers(0, 60))
@example([("abandon", 0, 0, 0, 0)] * 5 + [("abandon", 0, 2, 0, 0)], 4)  # a claim to be ahead
def test_no_sequence_of_messages_from_a_member_breaks_the_machine(noise, moment):
    w = World(3)
    w.run(moment / 10)
    for kind, plan_version, number, attempt, amount in noise:
        round_id = RoundId(**rounds_of(plan_version, number, attempt)).to_proto()
        message = dp.RoundMessage(**{kind: KINDS[kind](round_id, amount)})
        w.feed(w.peers[0], rt.Received(w.peers[1], message))
        w.run(0.3)
    assert w.run(200, until=committed(w, w.rounds() + 1))


def machine_of_three(record: VoteRecord = BLANK) -> RoundMachine:
    return RoundMachine(
        "p0",
        lambda plan: POLICY,
        FakeVoteSigner("p0"),
        GENESIS,
        make_plan(["p0", "p1", "p2"]),
        0.0,
        record,
        draw_mark=lambda: b"ourmark8",
    )


def open_of(attempt: int, version: int) -> rt.Received:
    """An Open by whoever may send it."""
    round_id = RoundId("r", version, 0, 1, attempt)
    opener = round_id.opener(["p0", "p1", "p2"])
    opened = dp.Open(round=round_id.to_proto(), head_hash=GENESIS.hash, deadline_ms=1000)
    return rt.Received(opener, dp.RoundMessage(open=opened))


def test_an_open_that_waited_too_long_does_not_keep_a_later_one_out():
    machine = machine_of_three()
    assert not machine.step(open_of(7, version=2), 0.0)  # of a plan that we do not have yet
    assert not machine.step(open_of(4, version=2), 2.0)
    actions = machine.step(rt.PlanReceived(make_plan(["p0", "p1", "p2"], 2)), 2.5)
    assert [action.round_id.attempt for action in actions if isinstance(action, rt.Freeze)] == [4]
    assert machine.phase is Phase.FREEZING


def test_a_promise_under_a_newer_plan_is_kept_when_that_plan_comes_after_the_restart():
    promised = Ballot(2, 4)
    machine = machine_of_three(VoteRecord(1, GENESIS.hash, promised))
    machine.step(rt.PlanReceived(make_plan(["p0", "p1", "p2"], 2)), 0.0)
    assert machine.round_id.attempt == 5
    actions = machine.step(open_of(4, version=2), 0.1)
    assert [action.message.WhichOneof("body") for action in actions] == ["decline"]


def test_a_link_that_grew_slow_is_given_more_time_than_what_it_failed_in():
    w = World(3, seed=2, policy=replace(POLICY, exchange_timeout=timedelta(seconds=60)))
    given: list[int] = []  # milliseconds for the exchange
    slow = False

    def watch(sender: str, to: str, message: dp.RoundMessage) -> bool:
        if message.HasField("start"):
            given.append(message.start.deadline_ms)
        return slow and message.HasField("parts")

    w.network.drop = watch
    assert w.run(600, until=lambda: bool(given) and given[-1] < 10_000)
    slow, failed, learnt = True, len(w.reports), given[-1]
    assert w.run(600, until=lambda: len(w.reports) >= failed + 9)
    assert not any(report.manifest for report in w.reports[failed + 1 :])
    assert given[-1] > 4 * learnt


def test_a_new_opener_gives_the_time_that_the_last_one_had_learnt():
    w = World(5, seed=2, policy=replace(POLICY, exchange_timeout=timedelta(seconds=600)))
    given: list[int] = []
    w.network.drop = lambda sender, to, message: message.HasField("start") and given.append(message.start.deadline_ms)
    assert w.run(600, until=lambda: w.rounds() >= 6)
    assert given[-1] < 20_000
    w.kill(w.nodes["p0"].machine.openers[0])
    del given[:]
    before = w.rounds()
    assert w.run(600, until=lambda: w.rounds() >= before + 2)
    assert max(given) < 60_000


@pytest.mark.parametrize("seed", range(12))
def test_every_attempt_that_was_opened_is_reported_once_whatever_becomes_of_it(seed):
    w = World(4, seed)
    opened: set[RoundId] = set()

    def watch(sender: str, to: str, message: dp.RoundMessage) -> bool:
        if message.HasField("open"):
            opened.add(RoundId.from_proto(message.open.round))
        return False

    w.network.drop = watch
    w.network.delay = (0.01, 0.4)
    for _ in range(12):
        alone = w.rng.sample(w.peers, 2)
        w.network.part(alone, [peer for peer in w.peers if peer not in alone])
        w.run(w.rng.uniform(0.5, 4))
        w.network.cut = set()
        w.run(w.rng.uniform(0.5, 8))
    assert w.run(120, until=lambda: {report.round_id for report in w.reports} >= opened)
    assert len(w.reports) == len({report.round_id for report in w.reports})
    assert any(report.manifest is None for report in w.reports)
