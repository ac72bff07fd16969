"""Attacks that destroy a round of bare hivemind, on an Atoll round. docs/explain/trust.md has a row for each."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from support.exchange_swarm import ELEMENTS, ROUND, STALL, TIMEOUT, Swarm, part_frames, reheaded
from support.lying_members import LIES, is_sketches, lie_in_sums, turned_sketches
from support.machine_plans import POLICY, make_plan
from support.memory_network import Fault, FrameInTransit
from support.virtual_time import run_virtually

from atoll.core.errors import AtollError, PeerMisbehaved, RoundAbandoned
from atoll.core.frames import Frame, FrameKind
from atoll.core.round_id import RoundId
from atoll.node.exchange.audit import draw_parts
from atoll.node.exchange.auditor import Dispute
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.exchange_streams import PROTOCOL
from atoll.node.exchange.weighted_sum import weighted_mean
from atoll.node.rounds.decide import build_start, check_start
from atoll.v1 import dataplane_pb2 as dp

FP32 = CODECS["fp32"]
PEERS = ["p0", "p1", "p2"]
NUMBER = RoundId("r", 1, 0, 1, 0)
Change = Callable[[Frame], Frame]


def filled(value: float) -> Change:
    return lambda frame: Frame(frame.kind, frame.header, struct.pack("<f", value) * (len(frame.body) // 4))


async def attack(change: Change, bandwidth: dict[str, int], nth: int = 0) -> Swarm:
    """b replaces its nth part to a; a and c settle and repair without it."""
    swarm = Swarm({"a": 1, "b": 2, "c": 3}, "fp32", bandwidth, part_frames("b", "a", nth, change))
    await swarm.run()
    assert swarm.seconds < STALL.total_seconds()  # nobody waited
    await swarm.settle_and_repair(["a", "c"])
    return swarm


BODIES = {
    "dtype U5000": lambda f: reheaded(f, codec=99, elements=2**32 - 1),
    "NaN": filled(float("nan")),
    "inf": filled(float("inf")),
    "shape [1]": lambda f: Frame(f.kind, reheaded(f, elements=1).header, bytes(f.body)[:4]),
    "one value under the true header": lambda f: Frame(f.kind, f.header, bytes(f.body)[:4]),
    "float64": lambda f: Frame(f.kind, f.header, bytes(f.body) * 2),
    "complex": lambda f: Frame(f.kind, reheaded(f, elements=1024).header, bytes(f.body) * 2),
    "wrong size": lambda f: Frame(f.kind, f.header, bytes(f.body)[:-4]),
}


@pytest.mark.parametrize("change", BODIES.values(), ids=BODIES.keys())
def test_a_part_that_is_not_what_is_due_is_refused_by_name_and_nobody_waits(change: Change) -> None:
    async def scene() -> None:
        swarm = await attack(change, {"a": 1, "c": 1})
        swarm.assert_true(["a", "c"])
        assert list(swarm.held["a"].faults) == ["b"]
        assert torch.isfinite(swarm.averages["a"]).all()
        await swarm.close()

    run_virtually(scene())


def test_an_update_of_1e30_makes_no_replica_differ() -> None:
    """Atoll does not detect this yet: it moves the average. See `What a member can still do` in trust.md."""

    async def scene() -> None:
        swarm = await attack(filled(1e30), {"a": 1, "c": 1})
        assert torch.equal(swarm.averages["a"], swarm.averages["c"])
        assert torch.isfinite(swarm.averages["a"]).all()
        await swarm.close()

    run_virtually(scene())


@pytest.mark.parametrize("tokens", [10**9, 2**64 - 3, 2**64 - 1])  # -3 is 2^64 - 3 on the wire
def test_no_weight_passes_the_plan(tokens: int) -> None:
    plan = make_plan(PEERS)
    ready = {peer: dp.Ready(round=NUMBER.to_proto(), tokens=100, samples=10) for peer in PEERS}
    ready["p1"].tokens = tokens
    start = build_start(POLICY, plan, NUMBER, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)
    weights = {item.peer_id: item.weight for item in start.contributions}
    assert weights == {"p0": 100, "p1": 10_000, "p2": 100}
    check_start(POLICY, plan, NUMBER, ready["p0"], "p0", start)
    for item in start.contributions:
        if item.peer_id == "p1":
            item.weight = item.tokens = tokens
    with pytest.raises(PeerMisbehaved, match="more than the plan allows"):
        check_start(POLICY, plan, NUMBER, ready["p0"], "p0", start)


def test_a_weight_of_nan_is_no_number_on_the_wire() -> None:
    nan = dp.Ready.FromString(b"\x11" + struct.pack("<d", float("nan")))  # field 2 as a double
    assert nan.tokens == 0
    zero = [torch.ones(4), torch.full((4,), 5.0)]
    assert torch.equal(weighted_mean(zero, [1, 0]), torch.ones(4))


def test_a_declared_bandwidth_gives_nobody_a_larger_share() -> None:
    """Not among members: shares follow the plan, which the operator signs, and which gives little for a boast."""
    plan = make_plan(PEERS)
    ready = {peer: dp.Ready(round=NUMBER.to_proto(), tokens=100, samples=10) for peer in PEERS}
    start = build_start(POLICY, plan, NUMBER, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)
    sizes = [piece.end - piece.start for piece in start.partition]
    assert max(sizes) - min(sizes) <= 128
    greedy = replace(
        plan,
        assignments=tuple(
            replace(item, max_reduce_bytes_per_second=10**12 if item.peer_id == "p1" else 1)
            for item in plan.assignments
        ),
    )
    forged = build_start(POLICY, greedy, NUMBER, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)
    with pytest.raises(PeerMisbehaved, match="cuts the vector"):
        check_start(POLICY, plan, NUMBER, ready["p0"], "p0", forged)


def test_too_many_parts_end_the_senders_stream_and_every_model_is_equal() -> None:
    async def scene() -> None:
        swarm = Swarm({"a": 1, "b": 2, "c": 3, "d": 0}, "fp32", {"a": 1, "c": 1})
        await swarm.begin(["a", "b", "c"])
        stream = await swarm.networks["d"].open("a", PROTOCOL, TIMEOUT)
        await stream.send(FrameKind.MESSAGE, dp.ExchangeHeader(round=ROUND.to_proto()).SerializeToString())
        for index, elements in swarm.frames_of("a") * 2:
            header = dp.PartHeader(index=index, elements=elements, codec=FP32.number).SerializeToString()
            try:
                await stream.send(FrameKind.PART, header, FP32.encode(torch.full((elements,), 100.0)))
            except AtollError:
                break  # its stream was ended
        await swarm.finish()
        assert list(swarm.held["a"].faults) == ["d"]
        await swarm.settle_and_repair(["a", "b", "c"])
        swarm.assert_true(["a", "b", "c"])
        await swarm.close()

    run_virtually(scene())


def test_three_parallel_streams_of_one_sender_are_one_vote() -> None:
    async def scene() -> None:
        swarm = Swarm({"a": 1, "b": 1, "c": 1}, "fp32", {"a": 1, "c": 1})
        await swarm.begin()
        await asyncio.sleep(0.5)
        for _ in range(2):
            stream = await swarm.networks["b"].open("a", PROTOCOL, TIMEOUT)
            await stream.send(FrameKind.MESSAGE, dp.ExchangeHeader(round=ROUND.to_proto()).SerializeToString())
            with pytest.raises(PeerMisbehaved, match="second stream"):
                await stream.receive(TIMEOUT)
        await swarm.finish()
        await swarm.settle_and_repair(["a", "b", "c"])
        counted = swarm.assert_true(["a", "b", "c"])
        assert all(peers == {"a", "b", "c"} for peers in counted)
        await swarm.close()

    run_virtually(scene())


def test_a_reducer_that_returns_nan_is_named_and_repaired() -> None:
    async def scene() -> None:
        swarm = await attack(filled(float("nan")), {"b": 1})
        swarm.assert_true(["a", "c"])
        assert list(swarm.held["a"].faults) == ["b"]
        assert torch.isfinite(swarm.averages["a"]).all()
        await swarm.close()

    run_virtually(scene())


def test_a_reducer_that_adds_100_for_some_is_outvoted() -> None:
    def more(frame: Frame) -> Frame:
        elements = dp.PartHeader.FromString(frame.header).elements
        return Frame(frame.kind, frame.header, FP32.encode(FP32.decode(frame.body, elements) + 100))

    async def scene() -> None:
        swarm = Swarm({"a": 1, "b": 2, "c": 3}, "fp32", {"b": 1}, part_frames("b", "a", 0, more))
        await swarm.run()
        await swarm.settle_and_repair(["a", "b", "c"])
        swarm.assert_true(["a", "b", "c"])
        await swarm.close()

    run_virtually(scene())


TOO_LARGE = {"1e38", "100 more"}
WEIGHTS = {"a": 3, "b": 3, "c": 2, "d": 3, "e": 3}


async def agreeing(codec: str, fault: Fault | None = None) -> Swarm:
    """Five members that agree, as training does."""
    swarm = Swarm(WEIGHTS, codec, fault=fault, screening=True)
    common_E = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(99))
    for peer, own_E in swarm.vectors.items():
        swarm.vectors[peer] = common_E + 0.5 * own_E
    return swarm


async def audited(codec: str = "int8", fault: Fault | None = None) -> tuple[Swarm, dict[str, tuple[Dispute, ...]]]:
    """Their exchange, with what everybody's audit of it finds."""
    swarm = await agreeing(codec, fault)
    await swarm.run()
    await swarm.settle_and_repair(list(WEIGHTS))
    return swarm, await swarm.audit(list(WEIGHTS))


@pytest.mark.parametrize("lie", sorted(LIES.keys() - TOO_LARGE))
def test_a_reducer_that_sends_the_same_lie_to_all_is_found_by_all_others(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_in_sums(monkeypatch, lambda peer: peer == "b", LIES[lie])

    async def scene() -> None:
        swarm, found = await audited()
        for peer in WEIGHTS.keys() - {"b"}:
            assert [(it.reducer, it.contributor) for it in found[peer]] == [("b", None)]
        assert found["b"] == ()
        await swarm.close()

    run_virtually(scene())


@pytest.mark.parametrize("lie", sorted(TOO_LARGE))
def test_an_average_that_no_optimiser_can_reach_is_refused_when_it_arrives(
    lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lie_in_sums(monkeypatch, lambda peer: peer == "b", LIES[lie])

    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "fp32", screening=True)
        await swarm.run()
        for peer in WEIGHTS.keys() - {"b"}:
            assert list(swarm.held[peer].faults) == ["b"]
            assert not any(swarm.held[peer].digests[index] for index in swarm.parts_of("b"))
        await swarm.close()

    run_virtually(scene())


def test_an_opener_that_settles_on_bytes_of_its_own_is_not_believed_and_frames_nobody() -> None:
    """The opener e says that a part of b is what only e holds. All others fetch that, and refuse the result."""

    async def scene() -> None:
        swarm = await agreeing("fp32")
        await swarm.run()
        index = swarm.parts_of("b")[0]
        elements = swarm.layout.part(index).elements
        forged = CODECS["fp32"].encode(torch.full((elements,), 3.0))
        await swarm.exchanges["e"]._average.put(index, forged)
        digests = [*swarm.held["a"].digests]
        digests[index] = swarm.exchanges["e"]._average.digest(index)
        honest = sorted(WEIGHTS.keys() - {"e"})
        for peer in honest:
            await swarm.exchanges[peer].repair(digests, lambda part: ("e",), TIMEOUT)
        seeds = [bytes([number]) * 32 for number in range(2)]  # that draw this part
        found = await swarm.audit(honest, next(seed for seed in seeds if index in drawn_by(swarm, seed)))
        assert all(it.reducer is None for peer in honest if peer != "b" for it in found[peer])
        assert all(found[peer] for peer in honest if peer != "b")
        await swarm.close()

    run_virtually(scene())


def drawn_by(swarm: Swarm, seed: bytes) -> list[int]:
    return [index for indices in draw_parts(seed, swarm.layout.reducer_shares).values() for index in indices]


def test_honest_members_find_nothing() -> None:
    async def scene() -> None:
        swarm, found = await audited()
        assert set(found.values()) == {()}
        await swarm.close()

    run_virtually(scene())


def test_a_contributor_whose_sketches_are_false_is_named_beside_every_reducer() -> None:
    async def turned(passage: FrameInTransit) -> Frame:
        frame = passage.frame
        lies = passage.sender == "e" and is_sketches(passage.protocol, frame)
        return turned_sketches(frame) if lies else frame

    async def scene() -> None:
        swarm, found = await audited(fault=turned)
        for peer in WEIGHTS.keys() - {"e"}:
            others = WEIGHTS.keys() - {peer, "e"}
            assert {(it.reducer, it.contributor) for it in found[peer]} == {(other, "e") for other in others}
        await swarm.close()

    run_virtually(scene())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda frame: Frame(frame.kind, frame.header, bytes(frame.body)[:-4]), True),
        (lambda frame: Frame(frame.kind, frame.header, b"\xff" * len(frame.body)), True),
        (lambda frame: None, False),
    ],
    ids=["a size that is not due", "NaN", "silence"],
)
def test_sketches_that_are_none_are_as_good_as_silence(change: Callable[[Frame], Frame | None], named: bool) -> None:
    async def broken(passage: FrameInTransit) -> Frame | None:
        frame = passage.frame
        lies = passage.sender == "c" and is_sketches(passage.protocol, frame)
        return change(frame) if lies else frame

    async def scene() -> None:
        swarm, found = await audited(fault=broken)
        assert set(found.values()) == {()}
        swarm.assert_nobody_blamed_but("c")
        assert all(("c" in swarm.exchanges[peer].faults) is named for peer in WEIGHTS.keys() - {"c"})
        await swarm.close()

    run_virtually(scene())


def test_sketches_are_given_twice_at_most_and_not_after_the_attempt() -> None:
    async def scene() -> None:
        swarm, _ = await audited()
        ask = dp.ExchangeHeader(round=ROUND.to_proto(), audit_seed=bytes(32)).SerializeToString()
        for expected in (None, PeerMisbehaved):
            stream = await swarm.networks["b"].open("a", PROTOCOL, TIMEOUT)
            await stream.send(FrameKind.MESSAGE, ask)
            if expected is None:
                assert (await stream.receive(TIMEOUT)).body
            else:
                with pytest.raises(expected, match="times for sketches"):
                    await stream.receive(TIMEOUT)
        swarm.exchanges["a"].drop_sink()
        stream = await swarm.networks["d"].open("a", PROTOCOL, TIMEOUT)
        await stream.send(
            FrameKind.MESSAGE, dp.ExchangeHeader(round=ROUND.to_proto(), audit_seed=bytes([7]) * 32).SerializeToString()
        )
        with pytest.raises(RoundAbandoned, match="has ended"):
            await stream.receive(TIMEOUT)
        await swarm.close()

    run_virtually(scene())
