"""Striped streams between running hosts without a direct path."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from support.eventually import eventually
from support.loopback_hosts import SOON, Lab, echo

from atoll.core.errors import Banned, DeadlineExceeded, HelloRequired, PeerMisbehaved, Unreachable
from atoll.core.frames import PREFIX, Frame, FrameKind
from atoll.core.membership import DenyList
from atoll.node.direct.protocol import BULK_PROTOCOLS
from atoll.node.swarm import stripes
from atoll.node.swarm.host import SwarmHost
from atoll.node.swarm.stream_acceptor import MAX_STREAMS_PER_PROTOCOL
from atoll.node.swarm.stripes import PROTOCOL, STRIPES
from atoll.node.wire.transport import Stream
from atoll.v1 import dataplane_pb2 as dp

AVERAGE = "/atoll/average/1"
BODY = bytes(range(256)) * 4096 * 7  # 7 MiB


async def two(lab: Lab) -> tuple[SwarmHost, SwarmHost]:
    seed = await lab.start("seed", relay_service=True, direct=None)
    seed.handle(AVERAGE, echo)
    await seed.ready()
    return seed, await lab.start("node", seeds=seed.multiaddrs(), direct=None)


async def test_frames_of_every_size_pass_both_ways_and_count_once(lab: Lab) -> None:
    seed, node = await two(lab)
    stream = await node.open(seed.peer_id, AVERAGE, SOON)
    for body in (b"", b"x", BODY[: 64 * 1024 - PREFIX.size], BODY):
        await stream.send(FrameKind.PART, b"header", body)
        frame = await stream.receive(SOON)
        assert (frame.kind, frame.header, bytes(frame.body)) == (FrameKind.PART, b"header", body)
    sent = 4 * (PREFIX.size + len(b"header")) + 64 * 1024 - PREFIX.size + 1 + len(BODY)
    assert (
        node.bytes_sent(AVERAGE) == stream.bytes_sent == sent == seed.bytes_sent(AVERAGE) - PREFIX.size
    )  # the seed also sent the accept
    assert node.bytes_sent(PROTOCOL) > 0
    assert seed.gate.open_streams(node.peer_id) == node.gate.open_streams(seed.peer_id) == 1
    await stream.close()
    await eventually(lambda: not seed.gate.open_streams(node.peer_id))
    assert node.gate.open_streams(seed.peer_id) == 0


async def test_concurrent_streams_do_not_mix_and_the_limit_is_refused_with_its_reason(lab: Lab) -> None:
    seed, node = await two(lab)
    opened = await asyncio.gather(*(node.open(seed.peer_id, AVERAGE, SOON) for _ in range(MAX_STREAMS_PER_PROTOCOL)))

    async def talk(stream: Stream, number: int) -> Frame:
        await stream.send(FrameKind.PART, bytes([number]), BODY[number : number + (1 << 20)])
        return await stream.receive(SOON)

    answers = await asyncio.gather(*(talk(stream, number) for number, stream in enumerate(opened)))
    for number, frame in enumerate(answers):
        assert (frame.header, bytes(frame.body)) == (bytes([number]), BODY[number : number + (1 << 20)])
    with pytest.raises(PeerMisbehaved, match="at most"):
        await node.open(seed.peer_id, AVERAGE, SOON)
    await asyncio.gather(*(stream.close() for stream in opened))


async def test_an_unserved_protocol_is_refused_with_its_name(lab: Lab) -> None:
    seed, node = await two(lab)
    with pytest.raises(Unreachable, match="not served"):
        await node.open(seed.peer_id, "/atoll/state/1", SOON)


async def test_the_allowed_number_of_streams_opens_at_once(lab: Lab) -> None:
    seed, node = await two(lab)
    for protocol in BULK_PROTOCOLS - {AVERAGE}:
        seed.handle(protocol, echo)
    await seed.ready()
    wanted = [protocol for protocol in sorted(BULK_PROTOCOLS) for _ in range(MAX_STREAMS_PER_PROTOCOL)]
    opened = await asyncio.gather(*(node.open(seed.peer_id, protocol, SOON) for protocol in wanted))
    assert seed.gate.open_streams(node.peer_id) == len(wanted)
    await asyncio.gather(*(stream.close() for stream in opened))


async def test_a_ban_cuts_a_peer_off_and_a_lost_hello_is_said_again(lab: Lab) -> None:
    seed, node = await two(lab)
    stream = await node.open(seed.peer_id, AVERAGE, SOON)
    seed.gate.evict(node.peer_id)
    with pytest.raises(Unreachable, match="ended the stream"):
        await stream.receive(SOON)
    await stream.close()
    again = await node.open(seed.peer_id, AVERAGE, SOON)
    await again.send(FrameKind.PART, b"", BODY)
    assert bytes((await again.receive(SOON)).body) == BODY
    assert 1 <= seed.streams_refused <= STRIPES  # before anything was read
    seed.gate.set_deny_list(DenyList(1, frozenset({node.peer_id})))
    with pytest.raises(Unreachable, match="ended the stream"):
        await again.receive(SOON)
    with pytest.raises(Banned):
        await node.open(seed.peer_id, AVERAGE, SOON)
    await again.close()


async def test_stripes_of_an_incomplete_stream_are_refused_with_a_reason(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, node = await two(lab)
    whole = await node.open(seed.peer_id, AVERAGE, SOON)
    stripe = dp.Stripe(conversation=bytes(16), index=0, protocol=AVERAGE).SerializeToString()

    async def reason(said: list[bytes], seconds: float) -> str:
        monkeypatch.setattr(stripes, "ASSEMBLE_TIMEOUT", timedelta(seconds=seconds))
        refused = seed.streams_refused
        stream = node._stream(seed.peer_id, AVERAGE, *await node._p2p.open_socket(seed.peer_id, PROTOCOL, SOON))
        for header in said:
            await stream.send(FrameKind.MESSAGE, header)
        with pytest.raises(DeadlineExceeded) as told:
            await stream.receive(SOON)
        await stream.close()
        assert seed.streams_refused == refused + 1
        return str(told.value)

    assert "no whole frame" in await reason([], 0.5)
    for seconds in (1, 4, 16, 50):  # in which the first stripe arrives, however busy the machine is
        found = await reason([stripe], seconds)
        if "no whole frame" not in found:
            break
    assert "1 of 4 stripes" in found
    assert seed.gate.open_streams(node.peer_id) == 1
    await whole.send(FrameKind.PART, b"", b"still here")
    assert bytes((await whole.receive(SOON)).body) == b"still here"
    await whole.close()


async def test_a_peer_that_is_evicted_while_it_opens_says_hello_and_opens_again(lab: Lab) -> None:
    """The refusal reaches all stripes, in any order of arrival."""
    seed, node = await two(lab)
    await (await node.open(seed.peer_id, AVERAGE, SOON)).close()
    waiting = seed._acceptor._assembler._open
    opened = [await node._p2p.open_socket(seed.peer_id, PROTOCOL, SOON) for _ in range(STRIPES - 1)]
    streams = [node._stream(seed.peer_id, AVERAGE, *ends) for ends in opened]
    for index, stream in zip((2, 0, 1), streams, strict=True):
        stripe = dp.Stripe(conversation=bytes(16), index=index, protocol=AVERAGE)
        await stream.send(FrameKind.MESSAGE, stripe.SerializeToString())
        await eventually(lambda index=index: index in {it for one in waiting.values() for it in one.ends})
    seed.gate.evict(node.peer_id)
    for stream in streams:
        with pytest.raises(HelloRequired):
            await stream.receive(SOON)
    await (await node.open(seed.peer_id, AVERAGE, SOON)).close()


async def test_one_stripe_that_breaks_ends_the_stream_on_both_sides(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stripes, "_END_GRACE_SECONDS", 1.0)
    seed, node = await two(lab)
    stream = await node.open(seed.peer_id, AVERAGE, SOON)
    await stream.send(FrameKind.PART, b"", b"a word")
    await stream.receive(SOON)
    stream._writer._writers[2].transport.abort()  # type: ignore[attr-defined]
    with pytest.raises(Unreachable, match="ended the stream"):
        await stream.receive(SOON)
    await eventually(lambda: not seed.gate.open_streams(node.peer_id))
    await stream.close()
