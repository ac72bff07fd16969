"""Whatever a stranger writes to `/atoll/hello/1`, or answers there: a refusal, in time, and the gate stays shut."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.byte_stream import RecordingWriter, reader_of
from support.certificates import certificate_of
from support.mutation import CASES, Mutator, cases, on_wire, seeds
from support.virtual_time import run_virtually

from atoll.core import protocol
from atoll.core.clock import ManualClock
from atoll.core.errors import AtollError
from atoll.core.frames import PREFIX, Frame, FrameKind, unpack_prefix
from atoll.core.identity import Identity
from atoll.core.membership import EMPTY_DENY_LIST, MembershipVerifier
from atoll.node.swarm.hello import DIALLED_FIRST_WAIT, HELLO_TIMEOUT, Introductions
from atoll.node.wire.gate import Gate
from atoll.node.wire.traffic import Traffic
from atoll.v1 import common_pb2 as pb
from atoll.v1 import dataplane_pb2 as dp

OPERATOR, OWN, PEER, OTHER = (Identity.generate() for _ in range(4))
CLOCK = ManualClock()


def certificate(identity: Identity, operator: Identity = OPERATOR) -> pb.Signed:
    return certificate_of(identity, operator, CLOCK.unix())


def gate_of(identity: Identity) -> Gate:
    authority = MembershipVerifier(OPERATOR.public_key, "reef")
    return Gate(authority, certificate(identity), identity.peer_id, EMPTY_DENY_LIST, CLOCK)


GOOD = gate_of(PEER).hello()
FORGERIES = [
    GOOD,
    dp.Hello(protocol=GOOD.protocol, membership=certificate(OTHER)),
    dp.Hello(protocol=GOOD.protocol, membership=certificate(PEER, operator=PEER)),
    dp.Hello(protocol=pb.ProtocolVersion(major=2**32 - 1), membership=GOOD.membership),
]


def said(seed: int) -> bytes:
    """What a stranger may send instead of its hello."""
    mutator = Mutator(seed)
    hello = mutator.rng.choice([*FORGERIES, GOOD, GOOD])
    inside = pb.Signed()
    inside.CopyFrom(hello.membership)
    if mutator.rng.random() < 0.3:  # a card of its own making inside a signature that is none
        inside.payload = mutator.message(pb.Membership.FromString(inside.payload))
        hello = dp.Hello(protocol=hello.protocol, membership=inside)
    return mutator.wire(mutator.frame(Frame(FrameKind.MESSAGE, hello.SerializeToString()), dp.Hello))


def is_honest(data: bytes) -> bool:
    """Whether the gate may open: the peer's own certificate in a version that we speak."""
    try:
        prefix = unpack_prefix(data[: PREFIX.size])
        header = data[PREFIX.size : PREFIX.size + prefix.header_bytes]
        hello = dp.Hello.FromString(header)
        card = pb.Membership.FromString(hello.membership.payload)
    except Exception:
        return False
    return (
        card.peer_id == PEER.peer_id and hello.protocol.major == protocol.MAJOR and certificate_holds(hello.membership)
    )


def certificate_holds(sealed: pb.Signed) -> bool:
    return (sealed.payload, sealed.signature) == (GOOD.membership.payload, GOOD.membership.signature)


@pytest.mark.parametrize("examples", CASES)
def test_whatever_a_stranger_says_first(examples: int) -> None:
    @cases(examples)
    @given(seeds, st.booleans())
    def dial(seed: int, hangs_up: bool) -> None:
        async def scene() -> None:
            gate, data = gate_of(OWN), said(seed)
            introductions = Introductions(gate, never, Traffic(CLOCK), CLOCK)
            writer = RecordingWriter()
            await introductions.answer(PEER.peer_id, reader_of(data, ends=hangs_up), writer)  # type: ignore[arg-type]
            assert asyncio.get_running_loop().time() <= HELLO_TIMEOUT.total_seconds() + 2
            assert introductions.crashes == 0
            assert writer.closed
            if gate.is_admitted(PEER.peer_id):
                assert is_honest(data)
            elif writer.written:  # it was told why
                assert unpack_prefix(bytes(writer.written[:16])).kind is FrameKind.REFUSAL
            honest = RecordingWriter()
            good = on_wire(Frame(FrameKind.MESSAGE, GOOD.SerializeToString()))
            await introductions.answer(PEER.peer_id, reader_of(good), honest)  # type: ignore[arg-type]
            assert gate.is_admitted(PEER.peer_id)

        run_virtually(scene())

    dial()


@pytest.mark.parametrize("examples", CASES)
def test_whatever_is_answered_to_our_hello(examples: int) -> None:
    @cases(examples)
    @given(seeds, st.booleans())
    def answer(seed: int, hangs_up: bool) -> None:
        async def scene() -> None:
            gate, data = gate_of(OWN), said(seed)

            async def connect(peer_id: str, protocol: str, timeout: timedelta) -> object:
                return reader_of(data, ends=hangs_up), RecordingWriter()

            introductions = Introductions(gate, connect, Traffic(CLOCK), CLOCK)  # type: ignore[arg-type]
            try:
                await introductions.ensure_admitted(PEER.peer_id)
                assert is_honest(data)
            except AtollError:
                assert not gate.is_admitted(PEER.peer_id)
            assert asyncio.get_running_loop().time() <= (HELLO_TIMEOUT + DIALLED_FIRST_WAIT).total_seconds()

        run_virtually(scene())

    answer()


async def never(peer_id: str, protocol: str, timeout: timedelta) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    raise AssertionError("nobody is dialled here")
