"""Hello: two members that learn of each other at the same moment must not both dial."""

from __future__ import annotations

import asyncio

import pytest
from support.byte_stream import RecordingWriter, reader_of
from support.certificates import certificate_of
from support.mutation import on_wire
from support.virtual_time import run_virtually

from atoll.core.clock import ManualClock
from atoll.core.errors import Unreachable
from atoll.core.frames import Frame, FrameKind
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, MembershipVerifier
from atoll.node.swarm.hello import DIALLED_FIRST_WAIT, Introductions
from atoll.node.swarm.hello_places import MAX_AT_ONCE
from atoll.node.wire.gate import Gate
from atoll.node.wire.traffic import Traffic

OPERATOR = Identity.generate()
LOW, HIGH = sorted((Identity.generate(), Identity.generate()), key=lambda identity: identity.peer_id)


class Side:
    """Introductions that record the time of each dial and open no socket."""

    def __init__(self, identity: Identity) -> None:
        clock = ManualClock()
        authority = MembershipVerifier(OPERATOR.public_key, "reef")
        membership = certificate_of(identity, OPERATOR, clock.unix(), run_id="reef")
        self.gate = Gate(authority, membership, identity.peer_id, EMPTY_DENY_LIST, clock)
        self.introductions = Introductions(self.gate, self._dial, Traffic(clock), clock)  # type: ignore[arg-type]
        self.dialled_at: list[float] = []

    async def _dial(self, peer_id: str, protocol: str, timeout: object) -> object:
        self.dialled_at.append(asyncio.get_running_loop().time())
        raise Unreachable(f"peer {peer_id} is not there")

    async def hear(self, other: Side) -> None:
        """Receive the other peer's hello."""
        said = on_wire(Frame(FrameKind.MESSAGE, other.gate.hello().SerializeToString()))
        await self.introductions.answer(other.gate.own_peer_id, reader_of(said), RecordingWriter())  # type: ignore[arg-type]


def test_the_lower_peer_id_dials_at_once() -> None:
    async def scene() -> None:
        side, began = Side(LOW), asyncio.get_running_loop().time()
        with pytest.raises(Unreachable):
            await side.introductions.ensure_admitted(HIGH.peer_id)
        assert side.dialled_at == [began]

    run_virtually(scene())


def test_the_higher_peer_id_waits_to_be_dialled() -> None:
    async def scene() -> None:
        side = Side(HIGH)
        waiting = [asyncio.create_task(side.introductions.ensure_admitted(LOW.peer_id)) for _ in range(3)]
        await asyncio.sleep(0.4)
        await side.hear(Side(LOW))
        await asyncio.gather(*waiting)
        assert asyncio.get_running_loop().time() < 0.5
        assert not side.dialled_at
        assert side.gate.is_admitted(LOW.peer_id)

    run_virtually(scene())


def test_the_higher_peer_id_dials_if_the_other_does_not() -> None:
    async def scene() -> None:
        side, began = Side(HIGH), asyncio.get_running_loop().time()
        with pytest.raises(Unreachable):
            await side.introductions.ensure_admitted(LOW.peer_id)
        assert side.dialled_at == [began + DIALLED_FIRST_WAIT.total_seconds()]

    run_virtually(scene())


def test_a_member_on_record_takes_no_place_from_strangers() -> None:
    async def scene() -> None:
        side, other = Side(LOW), Side(HIGH)
        records = {HIGH.peer_id}
        side.introductions = Introductions(
            side.gate,
            side._dial,  # type: ignore[arg-type]
            Traffic(ManualClock()),
            ManualClock(),
            is_on_record=records.__contains__,
        )
        strangers = [asyncio.create_task(be_silent(side, f"stranger-{number}")) for number in range(MAX_AT_ONCE)]
        await asyncio.sleep(0.1)
        await side.hear(other)
        assert side.gate.is_admitted(HIGH.peer_id)
        await asyncio.sleep(0.1)
        assert not [task for task in strangers if task.done()]
        records.clear()
        side.gate.evict(HIGH.peer_id)
        await side.hear(other)
        await asyncio.sleep(0.1)
        assert [task.done() for task in strangers] == [True] + [False] * (MAX_AT_ONCE - 1)
        for task in strangers:
            task.cancel()
        await asyncio.gather(*strangers, return_exceptions=True)

    run_virtually(scene())


async def be_silent(side: Side, peer_id: str) -> None:
    reader, writer = reader_of(b"", ends=False), RecordingWriter()

    def abort() -> None:
        writer.closed = True
        reader.feed_eof()

    writer.abort = abort  # type: ignore[method-assign]
    await side.introductions.answer(peer_id, reader, writer)  # type: ignore[arg-type]
