"""A trainer reads the corpus from members through its daemon's socket, and is never kept waiting in vain."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
import pytest_asyncio
from support.corpus_swarm import CorpusSwarm, ranges_of
from support.memory_network import FrameInTransit

from atoll.core.clock import SystemClock
from atoll.core.frames import Frame
from atoll.core.run_spec import DataSection
from atoll.node.data.blocks import BLOCK_BYTES
from atoll.node.data.card import CARD_NAME, MAX_CARD_BYTES
from atoll.node.data.mirrors import BlockAbsent, MirrorFailed
from atoll.node.data.open_corpus import CacheFolder, open_corpus
from atoll.node.data.peer_mirror import PeerMirror
from atoll.node.data.peer_socket import ANSWER_START, MAX_REQUEST_BYTES, REQUEST_LENGTH, PeerSocket

WEB = "web/000000.tokens"


def never() -> bool:
    return False


@pytest_asyncio.fixture
async def swarm(tmp_path: Path) -> AsyncIterator[CorpusSwarm]:
    swarm = CorpusSwarm(tmp_path)
    yield swarm
    await swarm.hub.close()


@pytest_asyncio.fixture
async def daemon(swarm: CorpusSwarm) -> AsyncIterator[PeerSocket]:
    """The socket of a daemon that has joined; "seed" serves the corpus."""
    swarm.serve("seed", swarm.files(swarm.corpus))
    daemon = PeerSocket(swarm.root / "corpus.sock")
    daemon.client = swarm.client()
    await daemon.start()
    yield daemon
    await daemon.close()
    if daemon.client is not None:
        await daemon.client.close()


async def test_a_trainer_opens_and_reads_a_corpus_that_only_members_have(
    swarm: CorpusSwarm, daemon: PeerSocket, tmp_path: Path
) -> None:
    section = DataSection(source="corpus", corpus=swarm.digest, sequence_length=512)

    def train() -> list[bytes]:
        cache = CacheFolder(tmp_path / "trainer")
        opened = open_corpus(section, None, cache, SystemClock(), peers=PeerMirror(daemon.path))
        try:
            return [opened.reader.read(0, number, 0, opened.card.sources[0].shards[number].tokens) for number in (0, 1)]
        finally:
            opened.fetcher.close()

    found = await asyncio.to_thread(train)
    assert found == [swarm.truth[WEB], swarm.truth["web/000001.tokens"]]
    cached = swarm.files(cache=tmp_path / "trainer" / swarm.digest)  # and gives it to others
    for path, start, stop in ranges_of({path: data for path, data in swarm.truth.items() if path.startswith("web")}):
        assert cached.read(path, start, stop) == swarm.truth[path][start:stop]


async def test_the_socket_is_private_and_goes_with_the_daemon(daemon: PeerSocket) -> None:
    assert stat.S_IMODE(daemon.path.stat().st_mode) == 0o600
    await daemon.close()
    assert not daemon.path.exists()
    with pytest.raises(MirrorFailed, match="daemon does not answer"):
        await asyncio.to_thread(PeerMirror(daemon.path).read, WEB, 0, 1, never)


async def test_a_deep_directory_is_no_obstacle(swarm: CorpusSwarm, tmp_path: Path) -> None:
    deep = tmp_path / "/".join(["a" * 50] * 4)
    deep.mkdir(parents=True)
    daemon = PeerSocket(deep / "corpus.sock")
    await daemon.start()
    with closing(PeerMirror(daemon.path)) as mirror, pytest.raises(BlockAbsent, match="not joined"):
        await asyncio.to_thread(mirror.read, WEB, 0, 1, never)
    await daemon.close()


async def test_it_connects_again_after_the_daemon_restarted(swarm: CorpusSwarm, daemon: PeerSocket) -> None:
    mirror = PeerMirror(daemon.path)
    card = await asyncio.to_thread(mirror.read_whole, CARD_NAME, MAX_CARD_BYTES, never)
    assert card == swarm.truth[CARD_NAME]
    await daemon.close()
    await daemon.start()
    assert await asyncio.to_thread(mirror.read, WEB, 0, BLOCK_BYTES, never) == swarm.truth[WEB][:BLOCK_BYTES]
    mirror.close()
    with pytest.raises(MirrorFailed, match="closed"):
        await asyncio.to_thread(mirror.read, WEB, 0, BLOCK_BYTES, never)


async def test_what_no_member_has_fails_at_once(swarm: CorpusSwarm, daemon: PeerSocket) -> None:
    mirror = PeerMirror(daemon.path)
    await asyncio.to_thread(mirror.read_whole, CARD_NAME, MAX_CARD_BYTES, never)
    (swarm.corpus / WEB).unlink()
    with pytest.raises(BlockAbsent, match="no member gives web/0: 1 members were asked"):
        await asyncio.to_thread(mirror.read, WEB, 0, BLOCK_BYTES, never)
    mirror.close()


async def test_a_read_that_is_cancelled_or_closed_ends_and_the_daemon_stops_asking(
    swarm: CorpusSwarm, daemon: PeerSocket
) -> None:
    mirror = PeerMirror(daemon.path)
    await asyncio.to_thread(mirror.read_whole, CARD_NAME, MAX_CARD_BYTES, never)
    asked = asyncio.Event()

    async def stall(passage: FrameInTransit) -> Frame:
        if passage.sender == "seed":
            asked.set()
            await asyncio.sleep(3600)
        return passage.frame

    swarm.fault = stall
    cancelled = threading.Event()
    reading = asyncio.ensure_future(asyncio.to_thread(mirror.read, WEB, 0, BLOCK_BYTES, cancelled.is_set))
    async with asyncio.timeout(60):
        await asked.wait()
        cancelled.set()
        with pytest.raises(MirrorFailed, match="too slow"):
            await reading
        assert daemon.client is not None
        async with daemon.client._streams.slot("seed", None), daemon.client._streams.slot("seed", None) as is_free:
            assert is_free  # both streams to the seed: the daemon has given up the read
        asked.clear()
        again = asyncio.ensure_future(asyncio.to_thread(mirror.read, WEB, 0, BLOCK_BYTES, never))
        await asked.wait()
        mirror.close()
        with pytest.raises(MirrorFailed):
            await again


@pytest.mark.parametrize(
    "written",
    [
        b"",
        b"\xff\xff\xff\xff",
        REQUEST_LENGTH.pack(MAX_REQUEST_BYTES + 1) + b"x" * 1000,
        REQUEST_LENGTH.pack(2) + b"{}",
        REQUEST_LENGTH.pack(MAX_REQUEST_BYTES) + b"[" * MAX_REQUEST_BYTES,
        REQUEST_LENGTH.pack(30) + b'{"path": "x", "start": "0000"}',
        REQUEST_LENGTH.pack(40) + b'{"path": "x", "start": -1, "stop": 5    }',
        REQUEST_LENGTH.pack(40) + b'{"path": "x", "start": 0, "stop": 1e999 }',
        REQUEST_LENGTH.pack(40) + b'{"path": "x", "at_most": 99999999999999}x',
    ],
)
async def test_whatever_is_written_to_the_socket_it_serves_on(
    swarm: CorpusSwarm, daemon: PeerSocket, written: bytes
) -> None:
    def write() -> bytes:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(60)
            connection.connect(str(daemon.path))
            connection.sendall(written)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(4096)

    answer = await asyncio.to_thread(write)
    assert not answer or ANSWER_START.unpack(answer[: ANSWER_START.size])[0] in (1, 2)
    mirror = PeerMirror(daemon.path)
    assert await asyncio.to_thread(mirror.read_whole, CARD_NAME, MAX_CARD_BYTES, never) == swarm.truth[CARD_NAME]
    mirror.close()


@pytest.mark.parametrize("answer", [b"", b"\0", ANSWER_START.pack(0, 1 << 40), ANSWER_START.pack(7, 3) + b"abc"])
def test_a_daemon_that_answers_nonsense_is_an_error(tmp_path: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(answer)

        serving = threading.Thread(target=serve)
        serving.start()
        with closing(PeerMirror(tmp_path / "s")) as mirror, pytest.raises(MirrorFailed):
            mirror.read(WEB, 0, 100, never)
        serving.join()
