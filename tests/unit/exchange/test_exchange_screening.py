"""Screening in exchanges between members, and what becomes of its verdicts on the way into a manifest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.exchange_swarm import ELEMENTS, Swarm
from support.machine_plans import GENESIS, POLICY, layers_after, make_plan
from support.machine_world import World
from support.virtual_time import run_virtually

from atoll.core.errors import PeerMisbehaved
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.weighted_sum import weighted_mean
from atoll.node.rounds.decide import build_start, check_payload, check_settle, check_verdicts, manifest_payload
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2
from atoll.v1.manifest_pb2 import Verdict

WEIGHTS = {"a": 3, "b": 3, "c": 2, "d": 3, "e": 3}


def agreeing(swarm: Swarm) -> None:
    """Give the members a direction in common, as training does."""
    common_E = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(99))
    for peer, own_E in swarm.vectors.items():
        swarm.vectors[peer] = common_E + 0.5 * own_E


def test_who_trains_backwards_is_in_no_sum_and_every_reducer_says_so() -> None:
    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "fp32", screening=True)
        agreeing(swarm)
        swarm.vectors["e"] *= -10
        await swarm.run()
        await swarm.settle_and_repair(list(WEIGHTS))
        honest = [peer for peer in WEIGHTS if peer != "e"]
        mean_E = weighted_mean([swarm.vectors[peer] for peer in honest], [WEIGHTS[peer] for peer in honest])
        for place, peer in enumerate(WEIGHTS):
            assert torch.equal(swarm.averages[peer], mean_E)
            parts = len(swarm.parts_of(peer))
            assert swarm.held[peer].verdicts == (Verdict(reducer=place, contributor=4, parts_left_out=parts),)
            check_verdicts(swarm.start, swarm.held[peer].verdicts, said_by=peer)
        await swarm.close()

    run_virtually(scene())


def test_a_huge_update_is_scaled_down_and_the_manifest_will_say_so() -> None:
    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "fp32", screening=True)
        agreeing(swarm)
        usual = swarm.vectors["e"].norm()
        swarm.vectors["e"] *= 1000
        await swarm.run()
        assert swarm.averages["a"].norm() < 1.5 * usual
        assert {verdict.contributor for held in swarm.held.values() for verdict in held.verdicts} == {4}
        assert sum(verdict.parts_scaled for held in swarm.held.values() for verdict in held.verdicts) == swarm.total
        await swarm.close()

    run_virtually(scene())


def test_without_screening_everything_finite_counts() -> None:
    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "fp32", screening=False)
        agreeing(swarm)
        swarm.vectors["e"] *= -10
        await swarm.run()
        await swarm.settle_and_repair(list(WEIGHTS))
        assert all(peers == set(WEIGHTS) for peers in swarm.assert_true(list(WEIGHTS)))
        assert not any(held.verdicts for held in swarm.held.values())
        await swarm.close()

    run_virtually(scene())


# --- what others say ---------------------------------------------------------------------------------

PEERS = ["p0", "p1", "p2", "p3"]
NUMBER = RoundId("r", 1, 0, 1, 0)
PLAN = make_plan(PEERS)
LAYERS = layers_after(POLICY, GENESIS, b"a" * 32)


def started() -> dp.Start:
    ready = {peer: dp.Ready(round=NUMBER.to_proto(), tokens=100, samples=10) for peer in PEERS}
    ready["p3"].tokens = 0
    return build_start(POLICY, PLAN, NUMBER, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)


def settled(*verdicts: Verdict) -> dp.Settle:
    return dp.Settle(
        round=NUMBER.to_proto(),
        present=[item.peer_id for item in started().contributions],
        digests=[b"d" * 32] * 4,
        verdicts=verdicts,
    )


def one(reducer: int, contributor: int, parts: int = 1) -> Verdict:
    return Verdict(reducer=reducer, contributor=contributor, parts_left_out=parts)


NO_TOKENS = [item.peer_id for item in started().contributions].index("p3")
A, B, C = (place for place in range(4) if place != NO_TOKENS)
UNTRUE: dict[str, list[Verdict]] = {
    "of nobody": [one(9, A)],
    "about nobody": [one(A, 9)],
    "about who gave nothing": [one(A, NO_TOKENS)],
    "nothing said": [Verdict(reducer=A, contributor=B)],
    "too many parts": [Verdict(reducer=A, contributor=B, parts_left_out=1, parts_scaled=1)],
    "twice": [one(A, B)] * 2,
    "disorder": [one(B, A), one(A, B)],
    "half of all": [one(A, B), one(A, C)],
    "without end": [one(A, B)] * 1000,
}


@pytest.mark.parametrize("verdicts", UNTRUE.values(), ids=UNTRUE.keys())
def test_verdicts_that_cannot_be_are_refused(verdicts: list[Verdict]) -> None:
    with pytest.raises(PeerMisbehaved, match="verdict"):
        check_settle(started(), settled(*verdicts), holds_parts=True)


def test_nobody_speaks_for_another_reducer() -> None:
    members = [item.peer_id for item in started().contributions]
    check_verdicts(started(), [one(A, B)], said_by=members[A])
    for said_by in (members[B], members[NO_TOKENS]):
        with pytest.raises(PeerMisbehaved, match="not its sender's"):
            check_verdicts(started(), [one(A, B)], said_by=said_by)
    with pytest.raises(PeerMisbehaved, match="not its sender's"):
        check_verdicts(started(), [one(9, B)], said_by=members[A])


def test_what_hangs_on_a_verdict_does_not_get_into_a_manifest() -> None:
    hung = Verdict.FromString(one(A, B).SerializeToString() + b"\xfa\x7f\x80\x80\x40" + bytes(1 << 20))
    assert hung.ByteSize() > 1 << 20
    payload = manifest_payload(POLICY, PLAN, GENESIS, started(), settled(hung), LAYERS)
    assert payload == manifest_payload(POLICY, PLAN, GENESIS, started(), settled(one(A, B)), LAYERS)


@pytest.mark.parametrize(("reducers", "tokens"), [(2, 100), (3, 0)])
def test_tokens_count_unless_more_than_half_of_the_parts_lack_them(reducers: int, tokens: int) -> None:
    verdicts = [one(reducer, B) for reducer in range(reducers)]
    payload = manifest_payload(POLICY, PLAN, GENESIS, started(), settled(*verdicts), LAYERS)
    check_payload(POLICY, PLAN, GENESIS, payload)
    manifest = manifest_pb2.Manifest.FromString(payload)
    assert list(manifest.verdicts) == verdicts
    due = [100] * 4
    due[NO_TOKENS], due[B] = 0, tokens
    assert [item.tokens for item in manifest.contributions] == due
    assert manifest.committed_tokens == 200 + tokens
    manifest.contributions[B].tokens = 100 - tokens
    manifest.committed_tokens = 300 - tokens
    with pytest.raises(PeerMisbehaved, match="counts more"):
        check_payload(POLICY, PLAN, GENESIS, manifest.SerializeToString(deterministic=True))


@pytest.mark.parametrize("verdicts", [UNTRUE["of nobody"], UNTRUE["twice"], UNTRUE["half of all"]])
def test_a_result_with_verdicts_that_cannot_be_is_none_to_vote_for(verdicts: list[Verdict]) -> None:
    manifest = manifest_pb2.Manifest.FromString(manifest_payload(POLICY, PLAN, GENESIS, started(), settled(), LAYERS))
    manifest.verdicts.extend(
        Verdict(reducer=it.reducer, contributor=it.contributor, parts_left_out=4) for it in verdicts
    )
    with pytest.raises(PeerMisbehaved, match="verdict"):
        check_payload(POLICY, PLAN, GENESIS, manifest.SerializeToString(deterministic=True))


CHANGES: dict[str, Callable[[dp.Settle], None]] = {
    "dropped": lambda settle: settle.ClearField("verdicts"),
    "turned on another": lambda settle: settle.verdicts[0].__setattr__(
        "contributor", (settle.verdicts[0].contributor + 1) % 4
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_nobody_votes_for_a_round_that_changes_its_words(change: Callable[[dp.Settle], None]) -> None:
    w = World(4)
    said: dict[tuple[int, int], set[str]] = {}  # attempt → whose verdicts were changed
    voted: dict[tuple[int, int], set[str]] = {}

    def forge(sender: str, to: str, message: dp.RoundMessage) -> bool:
        kind = message.WhichOneof("body")
        if kind == "settle" and message.settle.verdicts:
            attempt = (message.settle.round.number, message.settle.round.attempt)
            if attempt not in said:  # the same message goes to every receiver
                words = [(it.reducer, it.contributor) for it in message.settle.verdicts]
                change(message.settle)
                kept = [(it.reducer, it.contributor) for it in message.settle.verdicts]
                members = RoundId.from_proto(message.settle.round).order(w.peers)
                said[attempt] = {members[reducer] for reducer, peer in words if (reducer, peer) not in kept}
        if kind == "digest":
            voted.setdefault((message.digest.round.number, message.digest.round.attempt), set()).add(sender)
        return False

    w.network.drop = forge
    w.run(120)
    assert any(said.values())
    assert all(not robbed & voted.get(attempt, set()) for attempt, robbed in said.items())
    w.network.drop = lambda *_: False
    assert w.run(100, until=lambda: w.rounds() >= max(number for number, _ in said) + 2)


def test_simulated_rounds_carry_verdicts_to_every_manifest() -> None:
    w = World(4)
    assert w.run(300, until=lambda: w.rounds() >= 20)
    heads = [head.manifest for head in w.committed.values()]
    assert any(manifest.verdicts for manifest in heads)
    assert any(item.weight and not item.tokens for manifest in heads for item in manifest.contributions)
