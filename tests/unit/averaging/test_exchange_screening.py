"""Screening in exchanges between members, and what becomes of its verdicts on the way into a manifest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.exchange_swarm import ELEMENTS, Swarm
from support.machine_plans import GENESIS, POLICY, make_plan
from support.machine_world import World
from support.virtual_time import run_virtually

from atoll.core.errors import PeerMisbehaved
from atoll.core.round_id import RoundId
from atoll.node.averaging.decide import build_start, check_payload, check_settle, check_verdicts, manifest_payload
from atoll.node.averaging.outer import weighted_mean
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
        for peer in WEIGHTS:
            assert torch.equal(swarm.averages[peer], mean_E)
            parts = len(swarm.parts_of(peer))
            assert swarm.held[peer].verdicts == (Verdict(reducer=peer, peer_id="e", parts_left_out=parts),)
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
        assert {verdict.peer_id for held in swarm.held.values() for verdict in held.verdicts} == {"e"}
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
LAYERS = (manifest_pb2.LayerState(layer=0, round=1, anchor_digest=b"a" * 32, momentum_digest=b"m" * 32),)


def started() -> dp.Start:
    ready = {peer: dp.Ready(round=NUMBER.to_proto(), tokens=100, samples=10) for peer in PEERS}
    ready["p3"].tokens = 0
    return build_start(POLICY, PLAN, NUMBER, ready, unix_ms=0, exchange_seconds=5)


def settled(*verdicts: Verdict) -> dp.Settle:
    return dp.Settle(
        round=NUMBER.to_proto(),
        present=[item.peer_id for item in started().contributions],
        digests=[b"d" * 32] * 4,
        verdicts=verdicts,
    )


UNTRUE: dict[str, list[Verdict]] = {
    "of nobody": [Verdict(reducer="p9", peer_id="p1", parts_left_out=1)],
    "about nobody": [Verdict(reducer="p0", peer_id="p9", parts_left_out=1)],
    "about who gave nothing": [Verdict(reducer="p0", peer_id="p3", parts_left_out=1)],
    "nothing said": [Verdict(reducer="p0", peer_id="p1")],
    "too many parts": [Verdict(reducer="p0", peer_id="p1", parts_left_out=1, parts_scaled=1)],
    "twice": [Verdict(reducer="p0", peer_id="p1", parts_left_out=1)] * 2,
    "disorder": [
        Verdict(reducer="p1", peer_id="p0", parts_left_out=1),
        Verdict(reducer="p0", peer_id="p1", parts_left_out=1),
    ],
}


@pytest.mark.parametrize("verdicts", UNTRUE.values(), ids=UNTRUE.keys())
def test_verdicts_that_cannot_be_are_refused(verdicts: list[Verdict]) -> None:
    with pytest.raises(PeerMisbehaved, match="verdict"):
        check_settle(started(), settled(*verdicts))


def test_nobody_speaks_for_another_reducer() -> None:
    theirs = [Verdict(reducer="p1", peer_id="p0", parts_left_out=1)]
    check_verdicts(started(), theirs, said_by="p1")
    with pytest.raises(PeerMisbehaved, match="not its sender's"):
        check_verdicts(started(), theirs, said_by="p2")


@pytest.mark.parametrize(("reducers", "tokens"), [(2, 100), (3, 0)])
def test_tokens_count_unless_more_than_half_of_the_parts_lack_them(reducers: int, tokens: int) -> None:
    verdicts = [Verdict(reducer=peer, peer_id="p1", parts_left_out=1) for peer in PEERS[:reducers]]
    payload = manifest_payload(POLICY, PLAN, GENESIS, started(), settled(*verdicts), LAYERS)
    check_payload(POLICY, PLAN, GENESIS, payload)
    manifest = manifest_pb2.Manifest.FromString(payload)
    assert list(manifest.verdicts) == verdicts
    assert {item.peer_id: item.tokens for item in manifest.contributions} == {
        "p0": 100,
        "p1": tokens,
        "p2": 100,
        "p3": 0,
    }
    assert manifest.committed_tokens == 200 + tokens
    counts = next(item for item in manifest.contributions if item.peer_id == "p1")
    counts.tokens = 100 - tokens
    manifest.committed_tokens = 300 - tokens
    with pytest.raises(PeerMisbehaved, match="counts more"):
        check_payload(POLICY, PLAN, GENESIS, manifest.SerializeToString(deterministic=True))


CHANGES: dict[str, Callable[[dp.Settle], None]] = {
    "dropped": lambda settle: settle.ClearField("verdicts"),
    "turned on the speaker": lambda settle: settle.verdicts[0].__setattr__("peer_id", settle.verdicts[0].reducer),
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
                words = [(it.reducer, it.peer_id) for it in message.settle.verdicts]
                change(message.settle)
                kept = [(it.reducer, it.peer_id) for it in message.settle.verdicts]
                said[attempt] = {reducer for reducer, peer in words if (reducer, peer) not in kept}
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
