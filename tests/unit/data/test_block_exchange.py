"""Members give each other parts of the corpus: right ones, within bounds, and from those that have them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import pytest
import pytest_asyncio
from support.corpus_swarm import RUN, CorpusSwarm, ranges_of
from support.memory_network import FrameInTransit

from atoll.core.errors import AtollError, Busy, NotFound, PeerMisbehaved, Unreachable
from atoll.core.frames import Frame, FrameKind
from atoll.node.data import block_client, block_files, block_server, block_streams, corpus_table
from atoll.node.data.block_client import BlockClient
from atoll.node.data.block_server import PROTOCOL
from atoll.node.data.blocks import BLOCK_BYTES
from atoll.node.data.card import CARD_NAME, MAX_CARD_BYTES
from atoll.node.data.corpus_table import MAX_RANGE_BYTES
from atoll.v1 import dataplane_pb2 as dp

SOON = timedelta(seconds=60)
WEB = "web/000000.tokens"


@pytest_asyncio.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[CorpusSwarm]:
    swarm = CorpusSwarm(tmp_path)
    yield swarm
    await swarm.hub.close()


async def read_card(swarm: CorpusSwarm, client: BlockClient) -> None:
    assert await client.read_whole(CARD_NAME, MAX_CARD_BYTES) == swarm.truth[CARD_NAME]


async def test_a_member_with_an_empty_disk_reads_all_from_a_seed(swarm: CorpusSwarm) -> None:
    server = swarm.serve("seed", swarm.files(swarm.corpus))
    client = swarm.client()
    assert await client.read(WEB, 0, BLOCK_BYTES) == swarm.truth[WEB][:BLOCK_BYTES]  # with the card and the digests
    await read_card(swarm, client)
    read = 0
    for path, start, stop in ranges_of(swarm.truth):
        assert await client.read(path, start, stop) == swarm.truth[path][start:stop]
        read += stop - start
    assert client.bytes_received >= read
    assert server.bytes_sent >= client.bytes_received
    await client.close()


async def test_what_is_no_range_of_the_corpus_is_not_asked(swarm: CorpusSwarm) -> None:
    swarm.serve("seed", swarm.files(swarm.corpus))
    client = swarm.client()
    await read_card(swarm, client)
    streams = len(swarm.networks["me"].streams)
    for path, start, stop in [(WEB, 1, 2), ("../x", 0, 1), (WEB, 0, 1 << 40), ("tokenizer/vocab.txt", 0, 5)]:
        with pytest.raises(NotFound):
            await client.read(path, start, stop)
    with pytest.raises(NotFound):
        await client.read_whole("web/000000.digests", 1 << 20)
    assert len(swarm.networks["me"].streams) == streams
    await client.close()


async def test_a_block_comes_from_the_member_that_has_it(swarm: CorpusSwarm) -> None:
    some = swarm.cache_with("a", (0, 0, 0, 5 * BLOCK_BYTES))
    others = swarm.cache_with("b", (0, 0, 9 * BLOCK_BYTES, 10 * BLOCK_BYTES))
    swarm.serve("ann", swarm.files(cache=some))
    swarm.serve("bob", swarm.files(cache=others))
    client = swarm.client()
    await read_card(swarm, client)
    assert await client.read(WEB, BLOCK_BYTES, 3 * BLOCK_BYTES) == swarm.truth[WEB][BLOCK_BYTES : 3 * BLOCK_BYTES]
    assert await client.read(WEB, 9 * BLOCK_BYTES, 10 * BLOCK_BYTES)
    with pytest.raises(NotFound, match="2 members were asked"):
        await client.read(WEB, 5 * BLOCK_BYTES, 6 * BLOCK_BYTES)
    with pytest.raises(NotFound, match="no member is left"):  # both said just now that they lack it
        await client.read(WEB, 5 * BLOCK_BYTES, 6 * BLOCK_BYTES)
    await client.close()


async def test_a_member_that_lies_is_found_out_and_another_is_asked(swarm: CorpusSwarm) -> None:
    async def lie(passage: FrameInTransit) -> Frame:
        frame = passage.frame
        if passage.sender != "liar" or frame.kind is not FrameKind.BODY:
            return frame
        return Frame(frame.kind, frame.header, bytes([frame.body[0] ^ 1]) + bytes(frame.body[1:]))

    swarm.serve("liar", swarm.files(swarm.corpus))
    client = swarm.client()
    await read_card(swarm, client)
    swarm.fault = lie
    with pytest.raises(Unreachable, match="liar sends wrong bytes"):
        await client.read(WEB, 0, BLOCK_BYTES)
    swarm.serve("honest", swarm.files(swarm.corpus))
    for path, start, stop in ranges_of(swarm.truth):
        assert await client.read(path, start, stop) == swarm.truth[path][start:stop]
    await client.close()


async def test_a_paused_member_gives_nothing(swarm: CorpusSwarm) -> None:
    shares = True
    swarm.serve("ann", swarm.files(swarm.corpus), lambda: shares)
    client = swarm.client()
    await read_card(swarm, client)
    shares = False
    with pytest.raises(Unreachable, match="paused"):
        await client.read(WEB, 0, BLOCK_BYTES)
    await client.close()


async def test_a_member_that_ends_is_left_for_another(swarm: CorpusSwarm) -> None:
    swarm.serve("ann", swarm.files(swarm.corpus))
    client = swarm.client()
    await read_card(swarm, client)
    await swarm.hub.cut("ann")
    swarm.serve("bob", swarm.files(swarm.corpus))
    assert await client.read(WEB, 0, BLOCK_BYTES) == swarm.truth[WEB][:BLOCK_BYTES]
    await client.close()


async def test_a_read_asks_few_members_however_many_there_are(swarm: CorpusSwarm) -> None:
    empty = swarm.files(cache=swarm.cache_with("none"))
    for number in range(300):
        swarm.serve(f"m{number}", empty)
    client = swarm.client(files=swarm.files(cache=swarm.cache_with("mine", (0, 0, 0, 1))))
    streams = len(swarm.networks["me"].streams)
    with pytest.raises(NotFound, match="4 members were asked"):
        await client.read(WEB, 5 * BLOCK_BYTES, 6 * BLOCK_BYTES)
    assert len(swarm.networks["me"].streams) == streams + 4
    await client.close()


async def test_many_reads_at_once_use_few_streams(swarm: CorpusSwarm) -> None:
    swarm.serve("seed", swarm.files(swarm.corpus))
    client = swarm.client()
    await read_card(swarm, client)
    ranges = list(ranges_of(swarm.truth, blocks=1))
    found = await asyncio.gather(*(client.read(*wanted) for wanted in ranges))
    assert found == [swarm.truth[path][start:stop] for path, start, stop in ranges]
    assert len(swarm.networks["me"].streams) <= 4
    await client.close()


async def test_a_silent_member_holds_up_few_reads(swarm: CorpusSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two reads learn that it is silent; the others go on to the next member, and later ones do not ask it."""
    monkeypatch.setattr(block_streams, "_ANSWER_TIMEOUT", timedelta(seconds=6))
    monkeypatch.setattr(block_client, "_SLOT_SECONDS", 0.05)
    silent: list[str] = []

    async def stop(passage: FrameInTransit) -> Frame:
        if passage.sender == "ann" and passage.frame.kind is FrameKind.MESSAGE:
            silent.append("ann")
            await asyncio.sleep(3600)
        return passage.frame

    swarm.serve("ann", swarm.files(swarm.corpus))
    client = swarm.client()
    await read_card(swarm, client)
    for _ in range(20):
        client._choice.gave("ann", "web/0", 0.001)  # the favourite
    swarm.fault = stop
    swarm.serve("bob", swarm.files(swarm.corpus))
    ranges = [wanted for wanted in ranges_of(swarm.truth, blocks=1) if wanted[0] == WEB]
    found = await asyncio.gather(*(client.read(*wanted) for wanted in ranges))
    assert found == [swarm.truth[path][start:stop] for path, start, stop in ranges]
    assert len(ranges) > 100
    assert 1 <= len(silent) <= 2 * block_streams.STREAMS_TO_PEER
    await client.close()


async def test_a_busy_moment_of_the_only_seed_is_not_counted_for_each_read(swarm: CorpusSwarm) -> None:
    is_paused = False
    swarm.serve("seed", swarm.files(swarm.corpus), lambda: not is_paused)
    client = swarm.client()
    await read_card(swarm, client)
    ranges = [wanted for wanted in ranges_of(swarm.truth, blocks=1) if wanted[0] == WEB][:16]
    is_paused = True
    results = await asyncio.gather(*(client.read(*wanted) for wanted in ranges), return_exceptions=True)
    assert all(isinstance(result, Unreachable) for result in results)
    is_paused = False
    path, start, stop = ranges[0]
    assert await client.read(path, start, stop) == swarm.truth[path][start:stop]  # at once: it is asked all the same
    await client.close()


async def test_a_slow_line_gets_a_whole_file_in_several_attempts(
    swarm: CorpusSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt ends after two pieces; the next one goes on with the third."""
    monkeypatch.setattr(corpus_table, "PIECE_BYTES", 1 << 8)
    for module in (block_files, block_client, block_streams):
        monkeypatch.setattr(module, "PIECE_BYTES", 1 << 8)
    bodies = 0

    async def cut(passage: FrameInTransit) -> Frame:
        nonlocal bodies
        if passage.sender == "seed" and passage.frame.kind is FrameKind.BODY:
            bodies += 1
            if bodies % 3 == 0:
                raise Unreachable("the line was cut")
        return passage.frame

    swarm.fault = cut
    swarm.serve("seed", swarm.files(swarm.corpus))
    client = swarm.client()
    card = swarm.truth[CARD_NAME]
    pieces = -(-len(card) // (1 << 8))
    assert pieces > 3
    for _ in range(pieces):
        try:
            assert await client.read_whole(CARD_NAME, MAX_CARD_BYTES) == card
            break
        except Unreachable:
            continue
    else:
        pytest.fail("the card never came whole")
    await client.close()


async def test_a_disk_that_hangs_is_told_as_busy(swarm: CorpusSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_server, "_WAIT_SECONDS", 0.2)
    files = swarm.files(swarm.corpus)

    async def hang(*_: object) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(files, "in_thread", hang)
    swarm.serve("seed", files)
    stream = await swarm.hub.join("me").open("seed", PROTOCOL, SOON)
    request = dp.CorpusRequest(run_id=RUN, path=WEB, stop=BLOCK_BYTES)
    await stream.send(FrameKind.MESSAGE, request.SerializeToString())
    with pytest.raises(Busy, match="disk is slow"):
        await stream.receive(timedelta(seconds=60))


async def test_a_member_that_takes_answers_too_slowly_is_left(
    swarm: CorpusSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds one of the few places for as long as an honest slow line needs, and then rests."""
    monkeypatch.setattr(block_server, "_SEND_SECONDS", 6.0)
    monkeypatch.setattr(block_server, "_WAIT_SECONDS", 60.0)
    monkeypatch.setattr(block_streams, "_ANSWER_TIMEOUT", timedelta(seconds=60))
    monkeypatch.setattr(block_server, "_SLOWEST_BYTES_PER_SECOND", 1 << 20)
    monkeypatch.setattr(block_server, "SENT_AT_ONCE", 1)

    async def drip(passage: FrameInTransit) -> Frame:
        if passage.receiver == "slow" and passage.frame.kind is FrameKind.BODY:
            await asyncio.sleep(3600)
        return passage.frame

    swarm.fault = drip
    swarm.serve("seed", swarm.files(swarm.corpus))
    slow = swarm.hub.join("slow")
    request = dp.CorpusRequest(run_id=RUN, path=WEB, stop=BLOCK_BYTES).SerializeToString()
    stream = await slow.open("seed", PROTOCOL, SOON)
    await stream.send(FrameKind.MESSAGE, request)
    client = swarm.client()
    assert await client.read(WEB, 0, BLOCK_BYTES) == swarm.truth[WEB][:BLOCK_BYTES]
    again = await slow.open("seed", PROTOCOL, SOON)
    await again.send(FrameKind.MESSAGE, request)
    with pytest.raises(Busy, match="too slowly"):
        await again.receive(SOON)
    await client.close()


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (dp.CorpusRequest(run_id="other", path=WEB, stop=5), NotFound),
        (dp.CorpusRequest(run_id=RUN, path=WEB, start=0, stop=MAX_RANGE_BYTES + 1), PeerMisbehaved),
        (dp.CorpusRequest(run_id=RUN, path=WEB, start=9, stop=9), PeerMisbehaved),
        (dp.CorpusRequest(run_id=RUN, path=WEB, start=2**64 - 1, stop=2), PeerMisbehaved),
    ],
)
async def test_a_request_that_is_wrong_is_refused(
    swarm: CorpusSwarm, request_: dp.CorpusRequest, error: type[AtollError]
) -> None:
    swarm.serve("seed", swarm.files(swarm.corpus))
    stream = await swarm.hub.join("me").open("seed", PROTOCOL, SOON)
    await stream.send(FrameKind.MESSAGE, request_.SerializeToString())
    with pytest.raises(error):
        await stream.receive(SOON)


async def test_a_member_has_few_streams_and_all_have_few_answers(
    swarm: CorpusSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_server, "ANSWERS_AT_ONCE", 0)
    swarm.serve("seed", swarm.files(swarm.corpus))
    me = swarm.hub.join("me")
    streams = [await me.open("seed", PROTOCOL, SOON) for _ in range(block_server.STREAMS_PER_PEER + 1)]
    with pytest.raises(PeerMisbehaved, match="at most 4 streams"):
        await streams[-1].receive(SOON)
    await streams[0].send(
        FrameKind.MESSAGE, dp.CorpusRequest(run_id=RUN, path=WEB, stop=BLOCK_BYTES).SerializeToString()
    )
    with pytest.raises(Busy):
        await streams[0].receive(SOON)
