"""The round machine, as members experience it: commits that are equal everywhere, or none."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.machine_world import POLICY, World, honest_digests, make_plan

from atoll.core.identity import Identity
from atoll.core.manifest import contributors, read_head, require_signers
from atoll.core.round_id import RoundId
from atoll.node.averaging import round_types as rt
from atoll.node.averaging.round import Phase
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

IDENTITIES = [Identity.generate() for _ in range(4)]


def world(size: int = 3, **changes) -> World:
    return World(IDENTITIES[:size], **changes)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rounds_commit_the_same_manifests_everywhere(size):
    w = world(size)
    w.run(30)
    rounds = min(len(heads) for heads in w.committed.values())
    assert rounds >= 3
    for number in range(rounds):
        assert len({heads[number].hash for heads in w.committed.values()}) == 1
    chain = w.committed[w.peers[0]]
    for before, after in pairwise(chain):
        assert after.manifest.previous_hash == before.hash
        require_signers(read_head(after.committed, "r"), contributors(after))
    assert all(report.manifest is not None for report in w.reports)


def test_committed_tokens_and_samples_add_up():
    w = world(3)
    w.run(20)
    head = w.committed[w.peers[0]][-1]
    total = sum(item.tokens for h in w.committed[w.peers[0]][: head.round] for item in h.manifest.contributions)
    assert head.committed_tokens == total
    assert set(head.data.holdings) == set(w.peers)


def test_a_silent_member_blocks_the_commit_and_loses_nobodys_progress():
    w = world(3)
    silent, other = w.peers[0], w.peers[1]
    w.drop = lambda sender, receiver, message: sender == silent and message.WhichOneof("body") == "digest"
    while not any(report.manifest is None for report in w.reports):
        w.run(5)
        assert w.now < 300, "the round must be given up"
    assert any("no digest" in report.reason and silent in report.reason for report in w.reports)
    before = len(w.committed[other])
    kept = w.tokens[other]
    w.drop = lambda *_: False
    w.run(60)
    assert len(w.committed[other]) > before
    brought = next(i for i in w.committed[other][before].manifest.contributions if i.peer_id == other)
    assert brought.tokens >= kept > 0


def test_differing_digests_never_commit():
    w = world(3)
    liar = w.peers[1]
    w.digests[liar] = lambda start: tuple(
        type(state)(layer=state.layer, round=state.round, anchor_digest=b"x" * 32, momentum_digest=b"x" * 32)
        for state in honest_digests(start)
    )
    w.run(60)
    assert all(not heads for heads in w.committed.values())
    assert any("replicas differ" in report.reason for report in w.reports)


def test_a_lost_commit_is_learnt_from_the_others():
    w = world(3)
    lost = []

    def drop(sender, receiver, message):
        if message.WhichOneof("body") == "commit" and not lost:
            lost.append(receiver)
            return True
        return False

    w.drop = drop
    w.run(40)
    assert lost
    assert w.committed[lost[0]][0].hash == w.committed[w.peers[0]][0].hash


def test_the_next_in_order_opens_when_the_opener_is_dead():
    w = world(3)
    first = w.machines[w.peers[0]].round_id.order(w.peers)[0]
    w.dead.add(first)
    w.run(100)
    openers = {report.round_id.order(w.peers).index(first) for report in w.reports}
    assert openers
    assert all(report.manifest is None for report in w.reports)  # no majority rule here: it never commits alone
    alive = [peer for peer in w.peers if peer != first]
    plan = make_plan(alive, version=2)
    for peer in alive:
        w.feed(peer, rt.PlanReceived(plan))
    w.run(60)
    assert w.committed[alive[0]]
    assert w.committed[alive[0]][0].manifest.round.plan_version == 2


def test_nobody_meets_under_two_plans():
    w = world(3)
    newer = make_plan(w.peers, version=2)
    w.feed(w.peers[0], rt.PlanReceived(newer))
    w.run(20)
    for heads in w.committed.values():
        assert not heads
    for peer in w.peers[1:]:
        w.feed(peer, rt.PlanReceived(newer))
    w.run(40)
    assert {head.manifest.round.plan_version for heads in w.committed.values() for head in heads} == {2}
    assert len({len(heads) for heads in w.committed.values()}) == 1


def test_the_run_stops_at_its_tokens():
    w = world(2, policy=replace(POLICY, stop_tokens=250))
    w.run(60)
    assert all(machine.finished for machine in w.machines.values())
    final = {heads[-1].hash for heads in w.committed.values()}
    assert len(final) == 1
    before = {peer: len(heads) for peer, heads in w.committed.items()}
    w.run(60)
    assert before == {peer: len(heads) for peer, heads in w.committed.items()}


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
    w = world(3)
    seen = []

    def drop(sender, receiver, message):
        if message.WhichOneof("body") == "start":
            attempt = (message.start.round.number, message.start.round.attempt)
            if attempt not in seen:  # the same message goes to every receiver
                tamper(message.start)
            seen.append(attempt)
        return False

    w.drop = drop
    w.run(12)
    assert seen
    assert all(not heads for heads in w.committed.values())
    assert any(report.manifest is None for report in w.reports)


def test_a_member_that_fell_behind_is_told_to_catch_up():
    w = world(3)
    late = w.peers[2]
    w.run(2, train=False)
    w.drop = lambda sender, receiver, message: receiver == late or sender == late
    plan = make_plan([peer for peer in w.peers if peer != late], version=2)
    for peer in w.peers[:2]:
        w.feed(peer, rt.PlanReceived(plan))
    w.run(40)
    w.drop = lambda *_: False
    again = make_plan(w.peers, version=3)
    for peer in w.peers:
        w.feed(peer, rt.PlanReceived(again))
    w.run(20)
    assert any(peer == late for peer, _ in w.caught_up)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.0, 0.25), st.integers(2, 4))
def test_under_random_loss_heads_never_fork(seed, loss, size):
    """At every moment, two members at the same round hold the same manifest."""
    rng = random.Random(seed)
    w = world(size, drop=lambda *_: rng.random() < loss)
    by_round: dict[int, bytes] = {}
    for _ in range(20):
        w.run(5)
        for heads in w.committed.values():
            for head in heads:
                assert by_round.setdefault(head.round, head.hash) == head.hash
    w.drop = lambda *_: False
    w.run(150)
    assert all(machine.phase is not Phase.RESOLVING for machine in w.machines.values())


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@settings(max_examples=40, deadline=None)
def test_no_claim_in_ready_ends_the_run_or_the_machines(tokens, samples):
    w = world(3)
    liar = w.peers[0]

    def exaggerate(sender, receiver, message):
        if sender == liar and message.WhichOneof("body") == "ready":
            message.ready.tokens, message.ready.samples = tokens, samples
        return False

    w.drop = exaggerate
    w.run(20)
    w.drop = lambda *_: False
    w.run(100)
    head = w.committed[w.peers[1]][-1]
    cap = w.plan.assignment(liar).max_round_tokens
    for item in head.manifest.contributions:
        assert item.tokens <= cap
    assert head.committed_tokens <= cap * 3 * head.round
    assert head.data.cursor < 10_000


def test_an_old_commit_does_not_make_a_bound_follower_forget():
    w = world(3)
    w.run(20)
    old = w.committed[w.peers[0]][0].committed
    held = []

    def replay(sender, receiver, message):
        machine = w.machines[receiver]
        if message.WhichOneof("body") == "commit" and machine.phase is Phase.HOLDING and not held:
            held.append(receiver)
            forged = dp.RoundMessage(commit=dp.Commit(round=message.commit.round, manifest=old))
            w.queue.append((w.now, receiver, rt.Received(sender, forged)))
        return False

    before = {peer: len(heads) for peer, heads in w.committed.items()}
    w.drop = replay
    w.run(20)
    assert held
    assert not w.caught_up
    assert len(w.committed[held[0]]) > before[held[0]]


def test_a_resolution_that_proves_nothing_does_not_bind_for_ever():
    w = world(3)
    silent = w.peers[2]
    w.drop = lambda sender, receiver, message: receiver == silent and message.WhichOneof("body") == "commit"
    machine = w.machines[silent]
    while machine.phase is not Phase.HOLDING:
        w.run(0.05)
        assert w.now < 60
    machine._resolve(machine._following)
    garbage = manifest_pb2.CommittedManifest(payload=b"garbage")
    w.feed(silent, rt.Resolved(machine._following.round_id, garbage))
    assert machine.phase is Phase.HOLDING  # its time is not over: it stays bound
    w.now += 1_000
    machine._resolve(machine._following)
    machine._following.bound_until = 0.0
    w.feed(silent, rt.Resolved(machine._following.round_id, garbage))
    assert machine.phase is Phase.IDLE


def test_an_outsider_cannot_abandon_a_round():
    w = world(3)
    outsider = IDENTITIES[3].peer_id

    def shout(sender, receiver, message):
        if message.WhichOneof("body") == "ready":
            abandon = dp.RoundMessage(abandon=dp.Abandon(round=message.ready.round, reason="because"))
            w.queue.append((w.now, receiver, rt.Received(outsider, abandon)))
        return False

    w.drop = shout
    w.run(20)
    assert all(report.manifest is not None for report in w.reports)
    assert w.committed[w.peers[0]]


def rounds_of(plan_version, number, attempt):
    return {"run_id": "r", "plan_version": plan_version, "fragment": 0, "number": number, "attempt": attempt}


small = st.integers(0, 4)
huge = st.one_of(st.integers(0, 200), st.just(2**64 - 1))
KINDS = {
    "report": lambda r, n: dp.TokenReport(round=r, tokens=n),
    "open": lambda r, n: dp.Open(round=r, head_hash=b"x", members=["a"] * (n % 5)),
    "ready": lambda r, n: dp.Ready(round=r, tokens=n, samples=n),
    "start": lambda r, n: dp.Start(round=r, elements=n, part_elements=n % 1000),
    "digest": lambda r, n: dp.Digest(round=r),
    "commit": lambda r, n: dp.Commit(round=r),
    "abandon": lambda r, n: dp.Abandon(round=r, reason="x"),
}
messages = st.tuples(st.sampled_from(sorted(KINDS)), small, small, small, huge)


@settings(max_examples=60, deadline=None)
@given(st.lists(messages, max_size=15), st.integers(0, 60))
@example([("abandon", 0, 0, 0, 0)] * 5 + [("abandon", 0, 2, 0, 0)], 4)  # a claim to be ahead, while we are bound
def test_no_sequence_of_messages_from_a_member_breaks_the_machine(noise, moment):
    w = world(2)
    w.run(moment / 10)
    for kind, plan_version, number, attempt, amount in noise:
        round_id = RoundId(**rounds_of(plan_version, number, attempt)).to_proto()
        message = dp.RoundMessage(**{kind: KINDS[kind](round_id, amount)})
        w.feed(w.peers[0], rt.Received(w.peers[1], message))
        w.run(0.3)
    w.run(150)
    assert len(w.committed[w.peers[0]]) >= 1
