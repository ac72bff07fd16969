"""Rounds of a model in fragments: what Start, Settle and a result say of the one whose turn it is."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine_plans import GENESIS, OFFSETS, POLICY, layers_after, make_plan
from support.machine_world import World

from atoll.core.errors import PeerMisbehaved
from atoll.core.fragments import split_into_fragments
from atoll.core.manifest import Head
from atoll.core.round_id import RoundId
from atoll.core.round_schedule import due_tokens
from atoll.core.run_spec import SyncSection
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds.decide import build_start, check_payload, check_start, manifest_payload, parts_total
from atoll.node.rounds.opener import StageDeadlines
from atoll.node.rounds.types import RoundPolicy
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2

PEERS = ["p0", "p1", "p2", "p3"]
PLAN = make_plan(PEERS)


def of_two_fragments(head: Head = GENESIS) -> tuple[RoundPolicy, dp.Start, tuple[manifest_pb2.LayerState, ...]]:
    """The policy, an honest Start of the round after `head`, and the layers that it comes to."""
    policy = replace(POLICY, fragments=split_into_fragments(OFFSETS, 2))
    number = head.round + 1
    round_id = RoundId("r", 1, policy.fragment_of(number).index, number, 0)
    ready = {peer: dp.Ready(tokens=100, samples=4) for peer in PEERS}
    start = build_start(policy, PLAN, round_id, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)
    return policy, start, layers_after(policy, head, b"a" * 32)


def test_a_round_averages_its_fragment_and_counts_its_share_of_the_tokens() -> None:
    policy, start, _ = of_two_fragments()
    mine = dp.Ready(tokens=100, samples=4)
    assert start.elements == policy.fragments[0].elements
    assert [(item.weight, item.tokens) for item in start.contributions] == [(100, 50)] * len(PEERS)
    check_start(policy, PLAN, RoundId.from_proto(start.round), mine, PEERS[0], start)
    with pytest.raises(PeerMisbehaved):  # the other fragment's turn comes next
        check_start(policy, PLAN, replace(RoundId.from_proto(start.round), number=2), mine, PEERS[0], start)
    start.contributions[0].tokens = 100
    with pytest.raises(PeerMisbehaved, match="more than the plan"):
        check_start(policy, PLAN, RoundId.from_proto(start.round), mine, PEERS[0], start)


def test_a_result_that_touches_other_layers_than_its_fragments_is_none_to_vote_for() -> None:
    policy, start, layers = of_two_fragments()
    digests = [b"d" * 32] * parts_total(start)
    settle = dp.Settle(present=[item.peer_id for item in start.contributions], digests=digests)
    payload = manifest_payload(policy, PLAN, GENESIS, start, settle, layers)
    check_payload(policy, PLAN, GENESIS, payload)
    manifest = manifest_pb2.Manifest.FromString(payload)
    assert manifest.committed_tokens == 50 * len(PEERS)
    for change in ("another layer", "no round", "another fragment"):
        wrong = manifest_pb2.Manifest.FromString(payload)
        if change == "another layer":
            wrong.layers[2].anchor_digest = b"b" * 32
        elif change == "no round":
            wrong.layers[0].round = 0
        else:
            wrong.round.fragment = 1
        with pytest.raises(PeerMisbehaved):
            check_payload(policy, PLAN, GENESIS, wrong.SerializeToString(deterministic=True))
    head = Head(manifest_pb2.CommittedManifest(payload=payload))
    _, second, after = of_two_fragments(head)
    assert second.elements == policy.fragments[1].elements
    assert {after[layer].round for layer in policy.fragments[0].layers} == {1}
    assert {after[layer].round for layer in policy.fragments[1].layers} == {2}


def test_fragments_take_turns_and_all_that_is_trained_is_in_the_rounds_of_each() -> None:
    world = World(3, seed=5, policy=replace(POLICY, fragments=split_into_fragments(OFFSETS, 3)))
    world.run(20)
    missed, late = world.rounds(), world.peers[0]
    world.freeze(late)
    assert world.run(30, until=lambda: world.rounds() >= missed + 3)
    world.thaw(late)
    assert world.run(200, until=lambda: world.rounds() >= missed + 36)
    made = [world.committed[number].manifest for number in sorted(world.committed)]
    assert [manifest.round.fragment for manifest in made] == [index % 3 for index in range(len(made))]
    trained = {node.peer: node.trained for node in world.nodes.values()}
    weights: Counter[tuple[str, int]] = Counter()
    for manifest in made:
        for item in manifest.contributions:
            assert item.tokens in (0, item.weight // 3)  # nothing where screening or a crash kept it out
            weights[item.peer_id, manifest.round.fragment] += item.weight
    for (peer, _), weight in weights.items():
        assert 0.7 * trained[peer] < weight <= trained[peer]  # what is missing is under way
    assert world.committed[world.rounds()].committed_tokens <= sum(trained.values())


def test_a_large_fragment_has_deadlines_of_its_own() -> None:
    small, large = StageDeadlines.of(replace(POLICY, fragments=split_into_fragments((0, 128, 4096), 2)))
    for _ in range(9):
        small.exchange(4).observe(0.1)
        large.exchange(4).observe(10.0)
    assert small.exchange(4).timeout_seconds < 2
    assert large.exchange(4).timeout_seconds > 4 * POLICY.exchange_timeout.total_seconds() / 5
    assert small.ready is large.ready


@given(st.integers(1, 64), st.integers(0, 10**9), st.integers(1, 100_000), st.integers(1, 10**6))
def test_fragments_are_due_after_their_share_but_a_step_of_everybody(fragments, committed, first, round_tokens):
    sync = SyncSection(round_tokens=round_tokens)
    whole = due_tokens(sync, committed, first)
    due = due_tokens(sync, committed, first, fragments)
    assert due == max(min(first, whole), whole // fragments)
    assert due <= whole
