"""Missing parts come from whoever has the settled bytes; liars, the dead and the frozen cost another question."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from support.exchange_swarm import ROUND, STALL, TIMEOUT, Swarm
from support.memory_network import FrameInTransit
from support.virtual_time import run_virtually

from atoll.core.errors import AtollError, PeerMisbehaved, RoundAbandoned
from atoll.core.frames import Frame, FrameKind
from atoll.core.round_id import RoundId
from atoll.node.exchange.exchange_streams import PROTOCOL
from atoll.node.exchange.repair import MAX_PARTS_PER_REQUEST, SourcesOfPart
from atoll.v1 import dataplane_pb2 as dp

WEIGHTS = {"a": 1, "b": 2, "c": 3, "d": 4}
ALL = list(WEIGHTS)


class Trouble:
    """While `on`, frames of some peers are changed, dropped or held; part frames are counted by sender."""

    def __init__(self) -> None:
        self.lie: dict[str, bytes] = {}  # sender → the body of all its parts
        self.frozen: set[str] = set()
        self.parts: Counter[str] = Counter()

    async def __call__(self, passage: FrameInTransit) -> Frame:
        frame = passage.frame
        if passage.sender in self.frozen:
            await asyncio.Event().wait()
        if frame.kind is not FrameKind.PART:
            return frame
        self.parts[passage.sender] += 1
        if passage.sender in self.lie:
            return Frame(frame.kind, frame.header, self.lie[passage.sender])
        return frame


async def averaged(trouble: Trouble, codec: str = "fp32") -> Swarm:
    """A swarm whose exchange went well; from then on `trouble` may begin."""
    swarm = Swarm(WEIGHTS, codec, fault=trouble)
    await swarm.run()
    swarm.settled = swarm.held["a"].digests
    trouble.parts.clear()
    return swarm


async def lose(swarm: Swarm, peer: str, indices: list[int]) -> None:
    await swarm.exchanges[peer]._average.zero(indices)


def held_by(holders: dict[int, list[str]]) -> SourcesOfPart:
    return lambda part: holders.get(part, [])


def everyone_holds(swarm: Swarm, peers: list[str]) -> SourcesOfPart:
    return held_by(dict.fromkeys(range(swarm.total), peers))


def test_questions_are_shared_among_holders_and_only_what_is_missing_is_asked_for():
    async def scene() -> None:
        trouble = Trouble()
        swarm = await averaged(trouble)
        missing = [0, 1, 2, 5, 6, 8]
        await lose(swarm, "a", missing)
        assert [not digest for digest in swarm.exchanges["a"]._average.digests] == [
            index in missing for index in range(swarm.total)
        ]
        before = swarm.exchanges["a"].bytes_sent
        assert await swarm.exchanges["a"].repair(swarm.settled, everyone_holds(swarm, ["b", "c", "a", "d"]), TIMEOUT)
        assert trouble.parts == {"b": 2, "c": 2, "d": 2}
        assert swarm.exchanges["a"].bytes_sent > before
        swarm.assert_true(ALL)
        assert not await swarm.exchanges["b"].repair(
            swarm.settled, everyone_holds(swarm, ["a"]), TIMEOUT
        )  # lacks nothing
        assert trouble.parts["a"] == 0
        for peer in ALL:  # nobody has a part: it is zero, though it was missing before, too
            await lose(swarm, peer, [3])
            swarm.averages[peer].fill_(float("nan"))
            nowhere = [b"" if index == 3 else digest for index, digest in enumerate(swarm.settled)]
            assert await swarm.exchanges[peer].repair(nowhere, held_by({}), TIMEOUT)
            part = next(
                part for share in swarm.layout.reducer_shares for part in share.parts if share.first + part.index == 3
            )
            assert not swarm.averages[peer][part.start : part.end].any()
        await swarm.close()

    run_virtually(scene())


@pytest.mark.parametrize(
    "body", [b"\1" * 2048, b"\xff" * 2048, b"\0", b"\0" * 100_000], ids=["wrong", "nan", "short", "long"]
)
def test_poisoned_holders_cost_a_question_each_and_are_named(body: bytes):
    async def scene() -> None:
        trouble = Trouble()
        swarm = await averaged(trouble)
        await lose(swarm, "a", [0, 3, 4])
        trouble.lie = {"b": body, "c": body}
        await swarm.exchanges["a"].repair(swarm.settled, everyone_holds(swarm, ["b", "c", "d"]), TIMEOUT)
        swarm.assert_true(ALL)
        assert sorted(swarm.exchanges["a"].faults) == ["b", "c"]
        assert trouble.parts["b"] + trouble.parts["c"] <= 4  # once each; what was sent ahead is not counted twice
        await swarm.close()

    run_virtually(scene())


def test_dead_and_frozen_holders_and_those_that_hold_nothing_are_passed_over():
    async def scene() -> None:
        trouble = Trouble()
        swarm = await averaged(trouble)
        await lose(swarm, "a", list(range(swarm.total)))
        await lose(swarm, "d", [1])
        await swarm.hub.cut("b")
        trouble.frozen = {"c"}
        began = asyncio.get_running_loop().time()
        with pytest.raises(RoundAbandoned, match=f"part 1 of {swarm.total} cannot be repaired"):
            await swarm.exchanges["a"].repair(swarm.settled, everyone_holds(swarm, ["b", "c", "d"]), TIMEOUT)
        held = swarm.exchanges["a"]._average.digests
        assert [index for index, digest in enumerate(held) if not digest] == [1]
        assert asyncio.get_running_loop().time() - began <= 2 * STALL.total_seconds()
        assert swarm.exchanges["a"].faults == {}
        await swarm.close()

    run_virtually(scene())


def test_repair_ends_in_time_even_with_little_of_it():
    async def scene() -> None:
        trouble = Trouble()
        swarm = await averaged(trouble)
        await lose(swarm, "a", [2])
        trouble.frozen = {"b", "c"}
        short = timedelta(seconds=1)  # less than a stall: a frozen holder must not use up all of it
        await swarm.exchanges["a"].repair(swarm.settled, everyone_holds(swarm, ["b", "c", "d"]), short)
        swarm.assert_true(ALL)
        await lose(swarm, "a", [2])
        began = asyncio.get_running_loop().time()
        with pytest.raises(RoundAbandoned, match="part 2 of"):
            await swarm.exchanges["a"].repair(swarm.settled, everyone_holds(swarm, ["b", "c"]), short)
        assert asyncio.get_running_loop().time() - began <= 1.0
        await swarm.close()

    run_virtually(scene())


def test_what_was_settled_otherwise_is_replaced_and_what_nobody_has_is_zeroed():
    async def scene() -> None:
        trouble = Trouble()
        swarm = await averaged(trouble, "int8")
        first = swarm.layout.reducer_shares[0].parts[0]
        other = swarm.codec.encode(torch.full((first.elements,), 0.25))
        for peer in ("c", "d"):
            await swarm.exchanges[peer]._average.put(0, other)
        settled = (hashlib.sha256(other).digest(), *swarm.settled[1:-1], b"")
        for peer in ALL:
            await swarm.exchanges[peer].repair(settled, held_by({0: ["c", "d"]}), TIMEOUT)
            assert torch.equal(swarm.averages[peer], swarm.averages["a"])
        last = swarm.layout.reducer_shares[-1].parts[-1]
        assert torch.equal(swarm.averages["a"][: first.end], swarm.codec.decode(other, first.elements))
        assert not swarm.averages["a"][last.start :].any()
        assert swarm.exchanges["a"]._average.digests == settled
        await swarm.close()

    run_virtually(scene())


def test_a_part_without_holders_cannot_be_repaired():
    async def scene() -> None:
        swarm = await averaged(Trouble())
        await lose(swarm, "a", [4])
        for holders in ({}, {4: []}, {4: ["a"]}, {4: ["nobody"]}):
            with pytest.raises(RoundAbandoned, match="part 4 of"):
                await swarm.exchanges["a"].repair(swarm.settled, held_by(holders), TIMEOUT)
        await swarm.close()

    run_virtually(scene())


async def ask(swarm: Swarm, asker: str, indices: list[int], round_id: RoundId = ROUND):
    stream = await swarm.networks[asker].open("a", PROTOCOL, TIMEOUT)
    header = dp.ExchangeHeader(round=round_id.to_proto(), repair=indices)
    await stream.send(FrameKind.MESSAGE, header.SerializeToString())
    return stream


def test_what_may_be_asked_is_bounded():
    async def scene() -> None:
        trouble = Trouble()
        swarm = await averaged(trouble)
        swarm.networks["x"] = swarm.hub.join("x")
        questions: list[tuple[str, list[int], type[AtollError]]] = [
            ("b", [swarm.total], PeerMisbehaved),
            ("b", [2**32 - 1], PeerMisbehaved),
            ("b", [1, 1], PeerMisbehaved),
            ("b", [0] * (MAX_PARTS_PER_REQUEST + 1), PeerMisbehaved),
            ("b", list(range(MAX_PARTS_PER_REQUEST + 1)), PeerMisbehaved),
            ("x", [0], PeerMisbehaved),
        ]
        for asker, indices, error in questions:
            stream = await ask(swarm, asker, indices)
            with pytest.raises(error):
                await stream.receive(TIMEOUT)
        assert sorted(swarm.exchanges["a"].faults) == ["b", "x"]
        assert trouble.parts["a"] == 0
        with pytest.raises(RoundAbandoned, match="not kept"):
            await (await ask(swarm, "b", [0], replace(ROUND, attempt=1))).receive(TIMEOUT)
        await swarm.close()

    run_virtually(scene())


def test_two_questions_of_a_peer_at_once_and_none_after_the_end():
    async def scene() -> None:
        swarm = await averaged(Trouble())
        many = list(range(swarm.total))  # more frames than a stream buffers: nobody reads them yet
        first, second, third = [await ask(swarm, "b", many) for _ in range(3)]
        with pytest.raises(PeerMisbehaved, match="at once"):
            await third.receive(TIMEOUT)
        other = await ask(swarm, "c", [0])
        assert (await other.receive(TIMEOUT)).body  # others are not in its way
        for index in many:
            header = dp.PartHeader.FromString((await first.receive(TIMEOUT)).header)
            assert header.index == index
        fourth = await ask(swarm, "b", [0])
        assert (await fourth.receive(TIMEOUT)).body
        swarm.servers["a"].end(ROUND)
        with pytest.raises(AtollError):
            await asyncio.gather(*(second.receive(TIMEOUT) for _ in many))
        with pytest.raises(RoundAbandoned, match="not kept"):
            await (await ask(swarm, "b", [0])).receive(TIMEOUT)
        await swarm.close()

    run_virtually(scene())


def test_a_running_exchange_answers_and_says_what_it_does_not_hold():
    async def scene() -> None:
        swarm = Swarm(WEIGHTS, "fp32")
        await swarm.begin(["a", "b", "c"])  # d is missing: sums wait for it
        await asyncio.sleep(STALL.total_seconds() / 2)
        stream = await ask(swarm, "b", [0])
        frame = await stream.receive(TIMEOUT)
        assert (frame.kind, frame.body) == (FrameKind.PART, b"")
        await swarm.finish()
        assert (await (await ask(swarm, "b", [0])).receive(TIMEOUT)).body
        await swarm.close()

    run_virtually(scene())


def test_more_parts_than_one_question_holds(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("atoll.node.exchange.repair.MAX_PARTS_PER_REQUEST", 3)

    async def scene() -> None:
        trouble = Trouble()
        swarm = await averaged(trouble)
        await lose(swarm, "a", list(range(swarm.total)))
        await swarm.exchanges["a"].repair(swarm.settled, everyone_holds(swarm, ["b"]), TIMEOUT)
        swarm.assert_true(ALL)
        assert trouble.parts["b"] == swarm.total
        await swarm.close()

    run_virtually(scene())
