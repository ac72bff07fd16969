"""The butterfly: equal bits on every member, whatever the codec loses; what is no part touches no sum."""

import asyncio
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from support.exchange_swarm import ELEMENTS, ROUND, TIMEOUT, Swarm, part_frames, reheaded
from support.virtual_time import run_virtually

from atoll.core.errors import PeerMisbehaved, RoundAbandoned
from atoll.core.frames import Frame, FrameKind
from atoll.node.exchange.codecs import CODECS
from atoll.node.exchange.exchange_streams import PROTOCOL
from atoll.v1 import dataplane_pb2 as dp


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("size", [1, 2, 3, 5])
async def test_everyone_ends_with_the_same_bits_near_the_weighted_mean(codec, size):
    weights = {f"p{i}": 10 * (i + 1) for i in range(size)}
    with ThreadPoolExecutor(2) as executor:
        swarm = Swarm(weights, codec, executor=executor)
        await swarm.run()
        assert all(held.digests == swarm.held["p0"].digests for held in swarm.held.values())
        assert all(swarm.held["p0"].digests)
        assert not any(held.partial or held.faults for held in swarm.held.values())
        await swarm.close()
    first = next(iter(swarm.averages.values()))
    for average in swarm.averages.values():
        assert torch.equal(average, first)
    exact = sum(swarm.vectors[p] * w for p, w in weights.items()) / sum(weights.values())
    tolerance = {"fp32": 1e-6, "fp16": 1e-3, "bf16": 5e-3, "int8": 2e-2, "int4": 0.25, "int2": 0.55}[codec]
    assert float((first - exact).norm() / exact.norm()) < tolerance


def test_start_may_reach_members_at_different_moments():
    async def scene():
        swarm = Swarm({"a": 1, "b": 1, "c": 1})
        await swarm.run(delays={"b": 0.7, "c": 0.9})
        assert all(all(held.digests) and not held.partial for held in swarm.held.values())
        await swarm.close()

    run_virtually(scene())


def test_a_member_of_weight_zero_receives_without_contributing():
    async def scene():
        swarm = Swarm({"a": 5, "b": 0, "c": 5}, "fp32")
        await swarm.run()
        exact = (swarm.vectors["a"] + swarm.vectors["c"]) / 2
        for peer, average in swarm.averages.items():
            assert torch.allclose(average, exact, atol=1e-6)
            assert swarm.held[peer].partial == ()
        await swarm.close()

    run_virtually(scene())


def test_a_member_without_upload_reduces_nothing():
    async def scene():
        swarm = Swarm({"a": 1, "b": 1, "c": 1}, "fp32", bandwidth={"a": 10, "b": 10, "c": 0})
        await swarm.run()
        assert all(all(held.digests) for held in swarm.held.values())
        assert swarm.exchanges["c"].bytes_sent < swarm.exchanges["a"].bytes_sent
        await swarm.close()

    run_virtually(scene())


BAD_PARTS = {
    "short": lambda f: Frame(f.kind, f.header, bytes(f.body)[:-1]),
    "long": lambda f: Frame(f.kind, f.header, bytes(f.body) + b"\0"),
    "nan": lambda f: Frame(f.kind, f.header, b"\xff" * len(f.body)),
    "no header": lambda f: Frame(f.kind, b"\xff\xff\xff", f.body),
    "other kind": lambda f: Frame(FrameKind.BODY, f.header, f.body),
    "out of turn": lambda f: reheaded(f, index=3),
    "broadcast": lambda f: reheaded(f, elements=1),
    "other codec": lambda f: reheaded(f, codec=1),
}


@pytest.mark.parametrize("change", BAD_PARTS.values(), ids=BAD_PARTS.keys())
@pytest.mark.parametrize("nth", [0, 2])
def test_what_a_contributor_sends_instead_of_a_part_never_touches_a_sum(change, nth):
    async def scene():
        weights, bandwidth = {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 1}  # b only contributes
        swarm = Swarm(weights, "fp16", bandwidth, fault=part_frames("b", "a", nth, change))
        await swarm.run()
        assert list(swarm.held["a"].faults) == ["b"]
        assert swarm.held["a"].partial == ("b",)
        assert swarm.held["c"].faults == {}
        assert swarm.held["c"].partial == ()
        await swarm.settle_and_repair(["a", "c"])
        counted = swarm.assert_true(["a", "c"])
        mine = swarm.parts_of("a")
        assert [("b" in counted[i]) for i in mine] == [i < nth for i in range(len(mine))]
        assert swarm.seconds < TIMEOUT.total_seconds() / 10  # nobody waited for anything
        await swarm.close()

    run_virtually(scene())


def test_who_is_missing_in_a_sum_of_nobody_is_partial_too():
    async def scene():
        fault = part_frames("a", "b", 0, BAD_PARTS["short"])
        swarm = Swarm({"a": 1, "b": 0}, "fp16", {"b": 1}, fault=fault)  # b only reduces: it has no progress
        await swarm.run()
        assert swarm.held["b"].partial == ("a",)
        await swarm.close()

    run_virtually(scene())


@pytest.mark.parametrize("change", BAD_PARTS.values(), ids=BAD_PARTS.keys())
def test_what_a_reducer_sends_instead_of_an_average_is_repaired_from_others(change):
    async def scene():
        bandwidth = {"b": 1}  # b reduces everything
        swarm = Swarm({"a": 1, "b": 2, "c": 3}, "fp16", bandwidth, fault=part_frames("b", "a", 2, change))
        await swarm.run()
        assert list(swarm.held["a"].faults) == ["b"]
        assert [bool(digest) for digest in swarm.held["a"].digests] == [i < 2 for i in range(swarm.total)]
        assert all(swarm.held["c"].digests)
        await swarm.settle_and_repair(["a", "c"])
        swarm.assert_true(["a", "c"])
        await swarm.close()

    run_virtually(scene())


def test_a_reducer_that_sends_different_averages_is_outvoted():
    def turn(frame):  # the last code of the part
        return Frame(frame.kind, frame.header, frame.body[:-1] + bytes([frame.body[-1] ^ 1]))

    async def scene():
        swarm = Swarm({"a": 1, "b": 2, "c": 3, "d": 4}, "int8", {"b": 1}, part_frames("b", "a", 1, turn))
        await swarm.run()
        assert all(all(held.digests) for held in swarm.held.values())
        assert swarm.held["a"].digests[1] != swarm.held["c"].digests[1]
        await swarm.settle_and_repair(list(swarm.held))
        swarm.assert_true(list(swarm.held))
        await swarm.close()

    run_virtually(scene())


def test_too_many_parts_and_parts_without_weight_are_faults_that_change_nothing():
    async def scene():
        swarm = Swarm({"a": 1, "b": 0, "c": 1, "d": 1}, "fp32", {"a": 1})
        await swarm.begin(["a", "c"])
        part = dp.PartHeader(index=0, elements=512, codec=CODECS["fp32"].number).SerializeToString()

        async def flood(peer, frames):
            stream = await swarm.networks[peer].open("a", PROTOCOL, TIMEOUT)
            await stream.send(FrameKind.MESSAGE, dp.ExchangeHeader(round=ROUND.to_proto()).SerializeToString())
            for header, body in frames:
                await stream.send(FrameKind.PART, header, body)
            return stream

        ours = [
            (
                dp.PartHeader(index=i, elements=e, codec=CODECS["fp32"].number).SerializeToString(),
                CODECS["fp32"].encode(torch.ones(e)),
            )
            for i, e in swarm.frames_of("a")
        ]
        await flood("b", [(part, CODECS["fp32"].encode(torch.ones(512)))])
        await flood("d", [*ours, ours[-1]])
        await swarm.finish()
        assert sorted(swarm.held["a"].faults) == ["b", "d"]
        assert swarm.held["a"].partial == ()
        exact = (swarm.vectors["a"] + swarm.vectors["c"] + 1) / 3  # what d gave before it broke the rules counts
        assert torch.allclose(swarm.averages["a"], exact, atol=1e-6)
        assert torch.equal(swarm.averages["a"], swarm.averages["c"])
        await swarm.close()

    run_virtually(scene())


def test_second_streams_and_outsiders_are_refused_and_named():
    async def scene():
        swarm = Swarm({"a": 1, "b": 1}, "fp32")
        outsider = swarm.hub.join("x")

        async def intrude(network):
            stream = await network.open("a", PROTOCOL, TIMEOUT)
            await stream.send(FrameKind.MESSAGE, dp.ExchangeHeader(round=ROUND.to_proto()).SerializeToString())
            return await stream.receive(TIMEOUT)

        await swarm.begin(["a", "b"])
        await asyncio.sleep(1.0)  # b's own stream came
        refused = await asyncio.gather(intrude(swarm.networks["b"]), intrude(outsider), return_exceptions=True)
        assert all(isinstance(error, PeerMisbehaved) for error in refused)
        assert "second stream" in str(refused[0])
        assert "no part" in str(refused[1])
        await swarm.finish()
        assert sorted(swarm.exchanges["a"].faults) == ["b", "x"]
        assert all(all(held.digests) and not held.partial for held in swarm.held.values())
        await swarm.close()

    run_virtually(scene())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_our_own_numbers_that_are_not_finite_are_our_own_fault(value):
    async def scene():
        swarm = Swarm({"a": 1, "b": 1, "c": 1}, "fp32")
        swarm.vectors["a"][ELEMENTS - 1] = value
        await swarm.begin(["a", "b", "c"])
        with pytest.raises(RoundAbandoned, match="own update"):
            await swarm.tasks.pop("a")
        swarm.servers["a"].end(ROUND)
        await swarm.finish()
        assert all(held.faults == {} for held in swarm.held.values())
        await swarm.settle_and_repair(["b", "c"])
        counted = swarm.assert_true(["b", "c"])
        assert all("a" not in peers for peers in counted)
        await swarm.close()

    run_virtually(scene())


async def test_streams_of_a_round_that_is_not_running_are_refused():
    swarm = Swarm({"a": 1, "b": 1}, patience=timedelta(milliseconds=20))
    stream = await swarm.networks["b"].open("a", PROTOCOL, TIMEOUT)
    await stream.send(FrameKind.MESSAGE, dp.ExchangeHeader(round=ROUND.to_proto()).SerializeToString())
    with pytest.raises(RoundAbandoned, match="not running"):
        await stream.receive(TIMEOUT)
    await swarm.close()


def test_what_we_contributed_is_let_go_at_the_end_without_the_garbage_collector():
    """Tracebacks of ended streams make cycles that would keep a vector of the model's size for long."""

    async def scene() -> None:
        swarm = Swarm({"a": 1, "b": 1, "c": 1}, "fp32", screening=True)
        await swarm.run()
        contribution = weakref.ref(swarm.vectors.pop("a"))
        gc.disable()
        try:
            swarm.servers["a"].end(ROUND)
            await asyncio.sleep(0)
            assert contribution() is None
        finally:
            gc.enable()
        await swarm.close()

    run_virtually(scene())
