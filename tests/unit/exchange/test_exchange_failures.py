"""Members die, freeze and drip at every moment of the exchange; the others end in time, equal, and right."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
from support.exchange_swarm import ROUND, STALL, TIMEOUT, Swarm, into, start_message
from support.memory_network import FrameInTransit
from support.virtual_time import Inline, run_virtually

from atoll.core.errors import PartInvalid, Unreachable
from atoll.core.frames import Frame, FrameKind
from atoll.node.exchange.averaged_parts import Average
from atoll.node.exchange.reducer import ContributorQueue
from atoll.node.wire.transport import Stream
from atoll.v1 import dataplane_pb2 as dp

STALL_SECONDS = STALL.total_seconds()
REDUCER_PATIENCE = 2.5 * STALL_SECONDS


class At:
    """A fault that strikes the victims once each, at the n-th frame that they send."""

    def __init__(self, strikes: dict[str, int], strike: Callable[[str], Awaitable[None]]) -> None:
        self.frames = dict.fromkeys(strikes, 0)
        self.struck: set[str] = set()
        self._strikes = strikes
        self._strike = strike
        self._tasks: list[asyncio.Task[None]] = []  # keeps them alive

    async def __call__(self, passage: FrameInTransit) -> Frame | None:
        victim = passage.sender
        if victim in self._strikes:
            self.frames[victim] += 1
            if self.frames[victim] > self._strikes[victim] and victim not in self.struck:
                self.struck.add(victim)
                self._tasks.append(asyncio.create_task(self._strike(victim)))
        if self.struck & {passage.sender, passage.receiver}:
            await asyncio.Event().wait()  # dead and frozen machines neither send nor take anything
        return passage.frame


def killing(strikes: dict[str, int], weights: dict[str, int], codec: str, **options) -> tuple[Swarm, At]:
    fault = At(strikes, lambda victim: swarm.die(victim))
    swarm = Swarm(weights, codec, fault=fault, **options)
    return swarm, fault


def freezing(strikes: dict[str, int], weights: dict[str, int], codec: str, **options) -> tuple[Swarm, At]:
    async def freeze(victim: str) -> None:
        """Its streams stay open; `At` lets nothing in or out."""

    fault = At(strikes, freeze)
    swarm = Swarm(weights, codec, fault=fault, **options)
    return swarm, fault


async def play(swarm: Swarm, survivors: list[str]) -> list[frozenset[str]]:
    """Run, settle, repair, and check what has to be so whatever happened."""
    await swarm.begin()
    began = asyncio.get_running_loop().time()
    for peer in survivors:
        swarm.held[peer] = await swarm.tasks[peer]
    swarm.seconds = asyncio.get_running_loop().time() - began
    await swarm.settle_and_repair(survivors)
    counted = swarm.assert_true(survivors)
    assert all(swarm.held[peer].faults == {} for peer in survivors)
    for peers in counted:
        assert not peers or peers >= set(survivors)  # nobody loses because of somebody else
    for survivor in survivors:
        assert all(counted[index] for index in swarm.parts_of(survivor))
    await swarm.close()
    return counted


WEIGHTS = {"a": 3, "b": 5, "c": 7}


@pytest.mark.parametrize("make", [killing, freezing])
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_a_member_struck_at_any_frame(make, codec):
    async def strike_at(frame: int) -> bool:
        swarm, fault = make({"b": frame}, WEIGHTS, codec)
        await play(swarm, ["a", "c"])
        held = [swarm.held[peer] for peer in ("a", "c")]
        assert {name for parts in held for name in parts.partial} <= {"b"}
        limit = REDUCER_PATIENCE + STALL_SECONDS
        if make is killing:  # who died before it opened its streams is waited for once
            limit = 0.0 if frame >= 2 else STALL_SECONDS
        assert swarm.seconds <= limit, frame
        return bool(fault.struck)

    async def strike_everywhere() -> None:
        frames = 2 + 2 * (3 + 4) + 2 * 4  # headers, contributions, averages: more than it sends
        struck = [await strike_at(frame) for frame in range(frames)]
        assert struck[:15] == [True] * 15
        assert not struck[-1]

    run_virtually(strike_everywhere())


@pytest.mark.parametrize("make", [killing, freezing])
def test_a_member_struck_at_once_is_in_no_sum_and_reduces_nothing(make):
    async def scene() -> None:
        swarm, _ = make({"b": 0}, WEIGHTS, "fp32")
        counted = await play(swarm, ["a", "c"])
        assert [bool(peers) for peers in counted] == [index not in swarm.parts_of("b") for index in range(swarm.total)]
        assert all("b" not in peers for peers in counted)
        assert swarm.held["a"].partial == swarm.held["c"].partial == ("b",)

    run_virtually(scene())


@pytest.mark.parametrize("make", [killing, freezing])
@pytest.mark.parametrize("frames", [(0, 0), (3, 3), (0, 9), (6, 14), (12, 2)])
def test_two_of_five(make, frames):
    async def scene() -> None:
        weights = {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}
        swarm, _ = make({"b": frames[0], "d": frames[1]}, weights, "int8")
        await play(swarm, ["a", "c", "e"])
        assert swarm.seconds <= REDUCER_PATIENCE + 2 * STALL_SECONDS

    run_virtually(scene())


def test_a_bug_of_ours_in_one_conversation_costs_that_reducers_parts_and_no_others(monkeypatch):
    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "int8")
        opens = swarm.networks["a"].open

        async def broken(peer: str, *arguments: object) -> Stream:
            if peer == "b":
                raise AttributeError("'NoneType' object has no attribute 'setsockopt'")
            return await opens(peer, *arguments)

        monkeypatch.setattr(swarm.networks["a"], "open", broken)
        await swarm.begin()
        for peer in WEIGHTS:
            swarm.held[peer] = await swarm.tasks[peer]
        have = [bool(digest) for digest in swarm.held["a"].digests]
        assert [index for index, here in enumerate(have) if not here] == swarm.parts_of("b")
        assert all(swarm.held["c"].digests)
        assert all(parts.faults == {} for parts in swarm.held.values())
        await swarm.close()

    run_virtually(scene())


def test_a_part_with_more_than_its_header_is_refused():
    """What is kept of a part is kept with its header."""
    average = Average(start_message({"a": 1}, "fp32"), into(torch.zeros(1)), Inline())
    good = average.header(0)
    average.check(Frame(FrameKind.PART, good, b""), 0, "a")
    padded = good + b"\x7a\x80\x08" + bytes(1024)  # an unknown field, which parsers skip
    assert dp.PartHeader.FromString(padded).elements
    with pytest.raises(PartInvalid, match="header"):
        average.check(Frame(FrameKind.PART, padded, b""), 0, "a")


def test_a_frozen_contributor_costs_one_stall_and_no_part():
    async def scene() -> None:
        swarm, _ = freezing({"b": 3}, WEIGHTS, "fp32", bandwidth={"a": 1, "c": 1})  # b reduces nothing
        counted = await play(swarm, ["a", "c"])
        assert all(all(swarm.held[peer].digests) for peer in ("a", "c"))  # before any repair
        assert {name for peer in ("a", "c") for name in swarm.held[peer].partial} == {"b"}
        assert all(counted)
        assert swarm.seconds <= STALL_SECONDS * 1.5

    run_virtually(scene())


def test_who_is_silent_in_both_roles_costs_little_more_than_one_stall():
    async def scene() -> None:
        swarm, _ = freezing({"b": 3}, WEIGHTS, "fp32")
        await play(swarm, ["a", "c"])
        assert swarm.seconds <= 1.5 * STALL_SECONDS

    run_virtually(scene())


def test_a_reducer_that_waits_for_a_frozen_contributor_is_not_given_up():
    """Everyone but the frozen one gets every part from the one reducer, which itself has to wait a whole stall."""

    async def scene() -> None:
        swarm, _ = freezing({"b": 2}, WEIGHTS, "fp32", bandwidth={"a": 1})
        await play(swarm, ["a", "c"])
        assert all(swarm.held["c"].digests)
        assert swarm.held["a"].partial == ("b",)

    run_virtually(scene())


def test_one_that_wakes_up_again_gets_the_averages_it_missed_over_the_streams_it_had():
    async def scene() -> None:
        asleep = asyncio.Event()
        awake = asyncio.Event()
        sent = 0

        async def sleep(passage: FrameInTransit) -> Frame:
            nonlocal sent
            sent += passage.sender == "b"
            if sent > 4 and "b" in (passage.sender, passage.receiver):
                asleep.set()
                await awake.wait()
            return passage.frame

        swarm = Swarm(WEIGHTS, "fp32", {"a": 1, "c": 1}, sleep)  # b only contributes
        await swarm.begin(["a", "b", "c"])
        await asleep.wait()
        await asyncio.sleep(1.5 * STALL_SECONDS)
        assert not swarm.tasks["b"].done()
        awake.set()
        await swarm.finish()
        assert swarm.held["b"].digests == swarm.held["a"].digests == swarm.held["c"].digests
        assert all(swarm.held["b"].digests)
        assert {name for held in swarm.held.values() for name in held.partial} == {"b"}
        assert all(held.faults == {} for held in swarm.held.values())
        await swarm.close()

    run_virtually(scene())


def test_a_member_that_never_begins():
    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "fp32")
        await swarm.begin(["a", "c"])
        await swarm.finish()
        await swarm.settle_and_repair(["a", "c"])
        swarm.assert_true(["a", "c"])
        assert swarm.seconds <= REDUCER_PATIENCE + STALL_SECONDS
        assert swarm.held["a"].partial == ("b",)
        await swarm.close()

    run_virtually(scene())


@pytest.mark.parametrize(("seconds", "counted"), [(STALL_SECONDS - 1.5, True), (STALL_SECONDS + 1, False)])
def test_a_reducer_that_cannot_be_dialled_yet_is_dialled_again(seconds, counted):
    """Of two behind NAT, neither can be found until its relay is: at the beginning of a run, that may take a while."""

    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "fp32")
        openings = swarm.networks["a"].open
        found_at = asyncio.get_running_loop().time() + seconds

        async def open_once_found(peer: str, protocol: str, timeout: timedelta) -> Stream:
            if peer == "b" and asyncio.get_running_loop().time() < found_at:
                raise Unreachable("all dials failed")
            return await openings(peer, protocol, timeout)

        swarm.networks["a"].open = open_once_found
        await swarm.run()
        assert swarm.held["b"].partial == (() if counted else ("a",))
        assert all(swarm.held["a"].digests) is counted
        assert swarm.seconds <= STALL_SECONDS + 1
        await swarm.close()

    run_virtually(scene())


def test_all_others_gone_leaves_our_own_share():
    async def scene() -> None:
        swarm, _ = killing({"b": 0, "c": 0}, WEIGHTS, "fp32")
        counted = await play(swarm, ["a"])
        for index, peers in enumerate(counted):
            assert peers == (frozenset("a") if index in swarm.parts_of("a") else frozenset())

    run_virtually(scene())


def test_a_part_of_weightless_reducers_that_nobody_contributes_to_is_a_zero_update():
    async def scene() -> None:
        swarm, _ = killing({"b": 0}, {"a": 0, "b": 5, "c": 0}, "fp32", bandwidth={"a": 1})
        await swarm.begin()
        for peer in ("a", "c"):
            swarm.held[peer] = await swarm.tasks[peer]
            assert not any(swarm.held[peer].digests)
            assert swarm.held[peer].faults == {}
        await swarm.settle_and_repair(["a", "c"])
        assert swarm.assert_true(["a", "c"]) == [frozenset()] * swarm.total
        await swarm.close()

    run_virtually(scene())


def test_our_own_sleep_is_nobody_elses_silence():
    """Longer than any patience this process stands still (SIGSTOP, a lid that was closed), then goes on."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        slept = False

        async def sleep(passage: FrameInTransit) -> Frame:
            nonlocal slept
            if passage.sender == "b" and passage.frame.kind is FrameKind.PART and not slept:
                slept = True
                await asyncio.sleep(0.5)  # the others wait by now
                loop._virtual.now += 30.0  # type: ignore[attr-defined]  # all their timers are overdue
            return passage.frame

        swarm = Swarm(WEIGHTS, "fp32", fault=sleep)
        await swarm.run()
        assert all(all(held.digests) and not held.partial for held in swarm.held.values())
        await swarm.close()

    run_virtually(scene())


def dripping(peer: str, seconds: float) -> Callable[[FrameInTransit], Awaitable[Frame]]:
    async def fault(passage: FrameInTransit) -> Frame:
        if passage.sender == peer and passage.frame.kind is FrameKind.PART:
            await asyncio.sleep(seconds)
        return passage.frame

    return fault


def test_one_that_drips_is_given_up_at_half_time():
    async def scene() -> None:
        timeout = timedelta(seconds=STALL_SECONDS * 4)
        swarm = Swarm(WEIGHTS | {"d": 1}, "fp32", {"a": 1}, dripping("b", STALL_SECONDS * 0.9))
        await swarm.begin(timeout=timeout)
        await swarm.finish()
        assert all(all(swarm.held[peer].digests) for peer in ("a", "c", "d"))
        assert swarm.held["a"].partial == ("b",)
        assert timeout.total_seconds() / 2 <= swarm.seconds <= timeout.total_seconds()
        await swarm.close()

    run_virtually(scene())


def test_where_all_are_slow_alike_nobody_is_given_up():
    async def scene() -> None:
        async def slow(passage: FrameInTransit) -> Frame:
            if passage.frame.kind is FrameKind.PART and passage.receiver == "a":
                await asyncio.sleep(STALL_SECONDS * 0.5)
            return passage.frame

        swarm = Swarm(WEIGHTS | {"d": 1}, "fp32", {"a": 1}, slow)
        await swarm.begin(timeout=timedelta(seconds=STALL_SECONDS * 6))
        await swarm.finish()
        assert all(all(held.digests) and not held.partial for held in swarm.held.values())
        await swarm.close()

    run_virtually(scene())


def test_out_of_time_says_what_there_is_and_tells_the_others():
    async def scene() -> None:
        timeout = timedelta(seconds=STALL_SECONDS)
        swarm = Swarm({"a": 1, "b": 1}, "fp32", {"a": 1}, dripping("b", STALL_SECONDS * 0.4))
        await swarm.begin(timeout=timeout)
        await swarm.finish()
        assert swarm.seconds <= timeout.total_seconds()
        for held in swarm.held.values():
            assert [bool(digest) for digest in held.digests] == [True] * 2 + [False] * (swarm.total - 2)
        assert swarm.held["a"].partial == ()
        before = dict(swarm.held)
        await swarm.settle_and_repair(["a", "b"])
        swarm.assert_true(["a", "b"])
        assert before == swarm.held
        await swarm.close()

    run_virtually(scene())


def test_a_reducer_out_of_time_says_so_instead_of_leaving_others_to_wait():
    async def scene() -> None:
        async def slow(passage: FrameInTransit) -> Frame:
            if passage.frame.kind is FrameKind.PART and passage.receiver == "a":
                await asyncio.sleep(STALL_SECONDS * 0.4)
            return passage.frame

        swarm = Swarm({"a": 1, "b": 1, "c": 1}, "fp32", {"a": 1}, slow)
        await swarm.begin(["a"], timeout=STALL)
        await swarm.begin(["b", "c"])
        await swarm.tasks["a"]
        async with asyncio.timeout(0.1):
            held = await swarm.tasks["c"]
        assert held.digests == (await swarm.tasks["a"]).digests
        assert not all(held.digests)
        await swarm.close()

    run_virtually(scene())


def test_the_parts_that_were_reported_do_not_change_afterwards():
    """The time is up while sums are under way: what comes later is in no average."""

    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "int8", fault=dripping("b", STALL_SECONDS * 0.7))
        await swarm.begin(timeout=timedelta(seconds=STALL_SECONDS))
        await swarm.finish()
        await asyncio.sleep(10 * STALL_SECONDS)
        for peer, held in swarm.held.items():
            assert swarm.exchanges[peer]._average.digests == held.digests
        await swarm.settle_and_repair(list(WEIGHTS))
        swarm.assert_true(list(WEIGHTS))
        await swarm.close()

    run_virtually(scene())


async def test_a_contributor_that_waits_for_room_goes_on_when_its_inlet_is_closed():
    inlet = ContributorQueue("b", 5)
    for _ in range(2):
        await inlet.put(torch.ones(1))
    blocked = asyncio.create_task(inlet.put(torch.ones(1)))
    await asyncio.sleep(0)
    assert not blocked.done()
    assert inlet.close()
    await asyncio.wait_for(blocked, 60)
    assert [value is None for value in [await inlet.next() for _ in range(4)]] == [False, False, True, True]


async def test_a_cancelled_put_is_over_when_it_says_so():
    """Nothing writes to the vector behind the back of who gave up waiting."""
    begun, may_end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert may_end.wait(60)

    with ThreadPoolExecutor(1) as executor:
        average = Average(start_message({"a": 1}, "fp32"), into(torch.zeros(1)), executor)
        task = asyncio.create_task(average.compute(work))
        await asyncio.to_thread(begun.wait, 60)
        for _ in range(2):  # the exchange, and whoever it is part of
            task.cancel()
            await asyncio.wait([task], timeout=0.05)
            assert not task.done()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_cancelled_exchange_leaves_nothing_behind():
    async def scene() -> None:
        swarm, _ = freezing({"b": 5}, WEIGHTS, "fp32")
        await swarm.begin()
        await asyncio.sleep(STALL_SECONDS / 2)
        for peer in ("a", "c"):
            swarm.tasks[peer].cancel()
            swarm.servers[peer].end(ROUND)
        exchanges = [weakref.ref(swarm.exchanges.pop(peer)) for peer in ("a", "c")]
        await asyncio.wait([swarm.tasks.pop(peer) for peer in ("a", "c")])
        await asyncio.sleep(TIMEOUT.total_seconds())
        gc.collect()
        assert [exchange() for exchange in exchanges] == [None, None]
        await swarm.close()

    run_virtually(scene())


def test_who_took_the_average_is_let_go_without_the_garbage_collector():
    """It holds gigabytes, and tracebacks of ended streams make cycles that nothing collects for long."""

    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "fp32")
        await swarm.run()
        average = weakref.ref(swarm.averages.pop("a"))
        exchange = swarm.exchanges.pop("a")
        assert average() is not None
        gc.disable()
        try:
            exchange.drop_sink()
            assert average() is None
        finally:
            gc.enable()
        assert exchange.bytes_sent
        await swarm.close()

    run_virtually(scene())


def test_what_a_given_up_contributor_had_sent_and_all_encoded_parts_are_released():
    async def scene() -> None:
        swarm, _ = freezing({"b": 4}, WEIGHTS, "fp32")
        await swarm.begin()
        for peer in ("a", "c"):
            await swarm.tasks[peer]
            inlets = swarm.exchanges[peer]._reducer._queues
            assert all(inlet._waiting.qsize() == 0 for inlet in inlets.values())
            average = swarm.exchanges[peer]._average
            assert average.body(0) is not None
            swarm.servers[peer].end(ROUND)
            assert average.body(0) is None
        await swarm.close()

    run_virtually(scene())
