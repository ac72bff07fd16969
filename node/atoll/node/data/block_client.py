"""Reads of the run's corpus from other members, verified here: a member that sends wrong bytes is detected at once.

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
from atoll.core.errors import AtollError, Busy, DeadlineExceeded, NotFound, PeerMisbehaved, Unreachable
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
RANGE_SECONDS = 40.0  # for each member that is asked
WHOLE_FILE_SECONDS = 100.0  # for a whole file; a fetcher waits for 120 s, then asks again for the rest
_SLOT_SECONDS = 2.0  # for a free stream to a member, before the next one is asked
_SLOW_SECONDS = 5.0  # a member that took longer than this before its read was cancelled counts as failed

_log = log.get("corpus")


@dataclass(frozen=True)
class KnownMembers:
    """The members that may be asked."""

    seeds: Sequence[str]
    others: Sequence[str]


class BlockClient:
    """Reads from members. All returned bytes are verified against the card."""

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
        self._begun: tuple[str, str, bytearray] | None = None  # peer, path and first bytes of a whole file

    async def close(self) -> None:
        """Close all streams."""
        await self._streams.close()

    async def read(self, path: str, start: int, stop: int) -> bytes:
        """Return bytes of a file of the corpus.

        Raises `NotFound` if all members that were asked answer that they do not have the bytes, else `Unreachable`.
        """
        try:
            async with asyncio.timeout(READ_SECONDS):
                table = await self._table()
        except TimeoutError as error:
            raise DeadlineExceeded("no member gives the corpus card in time") from error
        if start == 0 and (file := table.files.get(path)) is not None and stop == file.size:
            return await self.read_whole(path, file.size)
        wanted = table.range_of(path, start, stop)
        if wanted is None or isinstance(wanted, FilePiece):
            raise NotFound(f"the corpus has no bytes {start} to {stop} of {path[:80]}")
        try:
            async with asyncio.timeout(READ_SECONDS), self._reading:
                return await self._read(wanted)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no member gives {path} in time") from error

    async def read_whole(self, path: str, at_most: int) -> bytes:
        """Return the card, or a file of the tokenizer, from one member. Raises as `read` does."""
        if path == CARD_NAME:
            file = WholeFile(path, min(at_most, MAX_CARD_BYTES), self._files.digest)
        else:
            table = await self._files.in_thread(self._files.table)
            known = table.files.get(path) if table is not None else None
            if known is None or known.size > min(at_most, MAX_TOKENIZER_BYTES):
                raise NotFound(f"the corpus has no file {path[:80]}")
            file = known
        try:
            async with asyncio.timeout(WHOLE_FILE_SECONDS), self._reading_whole:
                return await self._read_whole(file)
        except TimeoutError as error:
            raise DeadlineExceeded(f"no member gives {path} in time") from error

    async def _table(self) -> CorpusTable:
        """Return the card's contents; fetch the card if the trainer could not keep it on the disk."""
        async with self._finding_card:
            table = await self._files.in_thread(self._files.table)
            if table is None:
                await self.read_whole(CARD_NAME, MAX_CARD_BYTES)
                table = await self._files.in_thread(self._files.table)
        assert table is not None
        return table

    async def _read_whole(self, file: WholeFile) -> bytes:
        async def fetch(peer: str) -> bytes | None:
            """Continue after the bytes that this member sent before: a connection may be too slow for one attempt."""
            begun = self._begun
            data = begun[2] if begun is not None and begun[:2] == (peer, file.path) else bytearray()
            size = len(data) + 1
            while len(data) < size:
                answer = await self._streams.ask(peer, file.path, len(data), 0)
                if answer is None:
                    self._begun = None
                    return None
                piece, size = answer
                if size > file.size or len(piece) != min(PIECE_BYTES, size - len(data)):
                    self._begun = None
                    raise PeerMisbehaved(f"peer {peer} sent {file.path} in pieces of another size")
                data += piece
                if self._begun is None or self._begun[1] != file.path or len(data) >= len(self._begun[2]):
                    self._begun = peer, file.path, data
            return bytes(data)

        def check(data: bytes) -> bytes:
            self._begun = None
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise BlockMismatch(f"{file.path} has another digest")
            if file.path == CARD_NAME:
                self._files.adopt_card(data)
            return data

        first = self._begun[0] if self._begun is not None and self._begun[1] == file.path else None
        return await self._ask(file.path, file.path, fetch, check, RANGE_SECONDS, first)

    async def _read(self, wanted: ChunkDigests | BlockDigests | Blocks) -> bytes:
        """Read a range; before that, read the digests that verify it if this node does not have them."""
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
        here = await self._files.in_thread(self._files.read_range, wanted)
        return here if here is not None else await self._read(wanted)

    async def _ask(
        self,
        shard: str,
        what: object,
        fetch: Callable[[str], Awaitable[bytes | None]],
        check: Callable[[bytes], bytes],
        seconds: float,
        first: str | None = None,
    ) -> bytes:
        """Ask members, each for at most `seconds`, until one gives bytes that pass `check`. Raises as `read` does.

        `first` is asked before the others, if it may be asked.
        """
        known, problems, now = self._members(), list[str](), self._clock.monotonic
        peers = self._choice.order(shard, what, known.others, known.seeds, self._me, now())
        if first is not None and self._choice.may_ask(first, what, now()):
            peers = [first, *(peer for peer in peers if peer != first)]
        # all of them are in their rest period, and one is asked nevertheless
        rest = {peer for peer in peers if not self._choice.may_ask(peer, what, now())}
        for number, peer in enumerate(peers, 1):
            async with self._streams.slot(peer, _SLOT_SECONDS if number < len(peers) else None) as is_free:
                if not is_free or (peer not in rest and not self._choice.may_ask(peer, what, now())):
                    problems.append(f"{peer} is asked for other text")
                    continue
                began = now()
                try:
                    async with asyncio.timeout(seconds):
                        data = await fetch(peer)
                    if data is None:
                        self._choice.lacked(peer, what, now() - began, now())
                        continue
                    data = await self._files.in_thread(check, data)
                except BlockMismatch as error:
                    self._choice.failed(peer, began, now(), lied=True)
                    _log.warning("member_lies", peer=peer, problem=str(error))
                    problems.append(f"{peer} sends wrong bytes")
                except Busy as error:
                    self._choice.busy(peer, now())
                    problems.append(str(error))
                except (AtollError, TimeoutError) as error:
                    self._choice.failed(peer, began, now())
                    problems.append(str(error) or f"{peer} is slow")
                except asyncio.CancelledError:
                    if now() - began > _SLOW_SECONDS:
                        self._choice.failed(peer, began, now())
                    raise
                else:
                    self._choice.gave(peer, shard, now() - began)
                    self.bytes_received += len(data)
                    return data
        if problems:
            raise Unreachable("; ".join([f"no member gives {shard}", *problems]))
        asked = f"{len(peers)} members were asked" if peers else "no member is left to ask"
        raise NotFound(f"no member gives {shard}: {asked}")
