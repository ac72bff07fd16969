"""Reads of the run's corpus from other members, verified here: a member that sends wrong bytes is known at once.

`block_server` is the other side. `peer_choice` says whom to ask; a few members are asked one after the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, NotFound, PeerMisbehaved
from atoll.node.data.block_files import BlockFiles
from atoll.node.data.block_streams import BlockStreams
from atoll.node.data.blocks import BlockMismatch
from atoll.node.data.card import CARD_NAME, MAX_CARD_BYTES, MAX_TOKENIZER_BYTES
from atoll.node.data.corpus_table import (
    PIECE_BYTES,
    BlockDigests,
    Blocks,
    ChunkDigests,
    CorpusTable,
    FilePiece,
    WholeFile,
    path_and_bytes,
)
from atoll.node.data.known_digests import check_blocks
from atoll.node.data.peer_choice import PeerChoice
from atoll.node.wire.transport import Network

READS_AT_ONCE = 16
READ_SECONDS = 60.0  # for all members that one read asks
RANGE_SECONDS = 40.0  # for one of them
WHOLE_FILE_SECONDS = 100.0  # likewise for a whole file; a fetcher waits for 120 s
FILE_SECONDS = 60.0
_SLOW_SECONDS = 5.0  # a member that had more time than this when its read was given up counts as failed

_log = log.get("corpus")


@dataclass(frozen=True)
class KnownMembers:
    """The members that may be asked."""

    seeds: Sequence[str]
    others: Sequence[str]


class BlockClient:
    """Reads from members. Every byte that it returns follows from the card."""

    def __init__(
        self,
        network: Network,
        run_id: str,
        files: BlockFiles,
        members: Callable[[], KnownMembers],
        clock: Clock,
        rng: random.Random | None = None,
    ) -> None:
        self.bytes_received = 0  # verified
        self._me, self._files, self._members, self._clock = network.peer_id, files, members, clock
        self._streams = BlockStreams(network, run_id)
        self._choice = PeerChoice(rng or random.Random())
        self._reading = asyncio.Semaphore(READS_AT_ONCE)
        self._finding_card = asyncio.Lock()
        self._reading_whole = asyncio.Semaphore(1)  # of up to 256 MiB in memory

    async def close(self) -> None:
        """Close all streams."""
        await self._streams.close()

    async def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of a file of the corpus. Raises `NotFound` if no member that is asked gives them."""
        table = await self._table()
        if start == 0 and (file := table.files.get(path)) is not None and stop == file.size:
            return await self.read_whole(path, file.size)
        wanted = table.range_of(path, start, stop)
        if wanted is None or isinstance(wanted, FilePiece):
            raise NotFound(f"the corpus has no bytes {start} to {stop} of {path[:80]}")
        try:
            async with self._reading, asyncio.timeout(READ_SECONDS):
                return await self._read(wanted)
        except TimeoutError as error:
            raise NotFound(f"no member gives {path} in time") from error

    async def read_whole(self, path: str, at_most: int) -> bytes:
        """Return the card, or a file of the tokenizer, from one member. Raises `NotFound`."""
        if path == CARD_NAME:
            file = WholeFile(path, min(at_most, MAX_CARD_BYTES), self._files.digest)
        else:
            table = await asyncio.to_thread(self._files.table)
            known = table.files.get(path) if table is not None else None
            if known is None or known.size > min(at_most, MAX_TOKENIZER_BYTES):
                raise NotFound(f"the corpus has no file {path[:80]}")
            file = known
        try:
            async with self._reading_whole, asyncio.timeout(WHOLE_FILE_SECONDS):
                return await self._read_whole(file)
        except TimeoutError as error:
            raise NotFound(f"no member gives {path} in time") from error

    async def _table(self) -> CorpusTable:
        """Return what the card says. A trainer that has the card may have failed to keep it on the disk."""
        async with self._finding_card:
            table = await asyncio.to_thread(self._files.table)
            if table is None:
                await self.read_whole(CARD_NAME, MAX_CARD_BYTES)
                table = await asyncio.to_thread(self._files.table)
        assert table is not None
        return table

    async def _read_whole(self, file: WholeFile) -> bytes:
        async def fetch(peer: str) -> bytes | None:
            data, size = bytearray(), 1
            while len(data) < size:
                answer = await self._streams.ask(peer, file.path, len(data), 0)
                if answer is None:
                    return None
                piece, size = answer
                if size > file.size or len(piece) != min(PIECE_BYTES, size - len(data)):
                    raise PeerMisbehaved(f"peer {peer} sent {file.path} in pieces of another size")
                data += piece
            return bytes(data)

        def check(data: bytes) -> bytes:
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise BlockMismatch(f"{file.path} has another digest")
            if file.path == CARD_NAME:
                self._files.adopt_card(data)
            return data

        return await self._ask(file.path, file.path, fetch, check, FILE_SECONDS)

    async def _read(self, wanted: ChunkDigests | BlockDigests | Blocks) -> bytes:
        """Read a range, and before it the digests that verify it, if they are not here."""
        path, start, stop = path_and_bytes(wanted)
        check: Callable[[bytes], bytes]
        match wanted:
            case ChunkDigests():
                check = partial(self._files.digests.accept_chunk_digests, wanted)
            case BlockDigests(shard):
                above = await self._digests(ChunkDigests(shard))
                check = partial(self._files.digests.accept_block_digests, wanted, above)
            case Blocks(shard):
                digests = await self._digests(BlockDigests(shard, wanted.chunk))
                check = partial(check_blocks, wanted, digests)

        async def fetch(peer: str) -> bytes | None:
            answer = await self._streams.ask(peer, path, start, stop)
            return answer[0] if answer is not None else None

        name = wanted.shard.name
        return await self._ask(f"{name.source}/{name.number}", (path, start, stop), fetch, check, RANGE_SECONDS)

    async def _digests(self, wanted: ChunkDigests | BlockDigests) -> bytes:
        """Return verified digests: from memory or the disk, else from a member."""
        here = await asyncio.to_thread(self._files.read_range, wanted)
        return here if here is not None else await self._read(wanted)

    async def _ask(
        self,
        shard: str,
        what: object,
        fetch: Callable[[str], Awaitable[bytes | None]],
        check: Callable[[bytes], bytes],
        seconds: float,
    ) -> bytes:
        """Ask members, each for at most `seconds`, until one gives bytes that pass `check`. Raises `NotFound`."""
        known, problems = self._members(), list[str]()
        peers = self._choice.order(shard, what, known.others, known.seeds, self._me, self._clock.monotonic())
        for peer in peers:
            began = self._clock.monotonic()
            try:
                async with asyncio.timeout(seconds):
                    data = await fetch(peer)
                if data is None:
                    self._choice.lacked(peer, shard, what, self._clock.monotonic())
                    continue
                data = await asyncio.to_thread(check, data)
            except BlockMismatch as error:
                self._choice.failed(peer, self._clock.monotonic(), lied=True)
                _log.warning("member_lies", peer=peer, problem=str(error))
                problems.append(f"{peer} sends wrong bytes")
            except (AtollError, TimeoutError) as error:
                self._choice.failed(peer, self._clock.monotonic())
                problems.append(str(error) or f"{peer} is slow")
            except asyncio.CancelledError:
                if self._clock.monotonic() - began > _SLOW_SECONDS:
                    self._choice.failed(peer, self._clock.monotonic())
                raise
            else:
                self._choice.gave(peer, shard, self._clock.monotonic() - began)
                self.bytes_received += len(data)
                return data
        asked = f"{len(peers)} members were asked" if peers else "no member is left to ask"
        raise NotFound("; ".join([f"no member gives {shard}: {asked}", *problems]))
