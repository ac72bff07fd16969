"""The parts of a run's corpus that this node has on its disk, verified when they are read.

They are in a directory with the corpus (`--data`), or in the folder where the node's trainer keeps what it fetched.
Neither is trusted: files of the cache have holes, and an owner may change a directory. Every range is checked against
the card before it is returned, so another member never gets a byte that is not the corpus's. A range of which this node
has only a part counts as absent. The cost of a read does not grow with the corpus.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from atoll.core import log
from atoll.core.errors import CorpusError
from atoll.node.data.block_cache import BLOCKS_FOLDER, DATA_OFFSET, chunk_file, shard_file
from atoll.node.data.blocks import CHUNK_BYTES, BlockMismatch, digests_size
from atoll.node.data.card import CARD_NAME, MAX_CARD_BYTES, card_digest, parse_card
from atoll.node.data.corpus_table import (
    PIECE_BYTES,
    BlockDigests,
    Blocks,
    ChunkDigests,
    CorpusRange,
    CorpusTable,
    FilePiece,
    KnownShard,
    WholeFile,
    path_and_bytes,
)
from atoll.node.data.known_digests import KnownDigests, check_blocks

_THREADS = ThreadPoolExecutor(4, "corpus-files")  # a disk that hangs must not delay the daemon's other writes
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_log = log.get("corpus")


class BlockFiles:
    """Verified reads of the files of one corpus on this machine. May be used by several threads at once."""

    def __init__(self, digest: str, directory: Path | None, cache: Path | None) -> None:
        """`directory` has the corpus or a part of it; `cache` is the folder of this corpus in the node's cache."""
        self.digest, self.directory = digest, directory
        self.digests = KnownDigests()
        self._roots = [root for root in (directory, cache) if root is not None]
        self._blocks = cache / BLOCKS_FOLDER if cache is not None else None
        self._table: CorpusTable | None = None
        # files with a wrong hash, with their size, time and inode at that check
        self._broken: dict[Path, tuple[int, int, int]] = {}
        self._pieces: dict[tuple[Path, str], list[bytes]] = {}  # hashes of the pieces of verified files
        self._lock, self._hashing = threading.Lock(), threading.Lock()

    @staticmethod
    async def in_thread(
        call: Callable[_Arguments, _Result], *arguments: _Arguments.args, **named: _Arguments.kwargs
    ) -> _Result:
        """Run one of the methods below, which read the disk, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(call, *arguments, **named))

    def table(self) -> CorpusTable | None:
        """Return the card's contents; None while this node has no intact card."""
        if self._table is not None:
            return self._table
        with self._lock:
            for root in self._roots:
                if self._table is None and (data := self._intact_card(root / CARD_NAME)) is not None:
                    self._table = CorpusTable(parse_card(data, self.digest), self.digest, len(data))
        return self._table

    def adopt_card(self, data: bytes) -> None:
        """Use a card that came from a peer. Raises `CorpusError` if it is not the run's."""
        card = parse_card(data, self.digest)
        with self._lock:
            self._table = self._table or CorpusTable(card, self.digest, len(data))

    def require_directory(self) -> str:
        """Return as text how much of the corpus the directory has. Raises `CorpusError` if it has no part of it."""
        assert self.directory is not None
        try:
            data = _read_whole(self.directory / CARD_NAME, MAX_CARD_BYTES)
        except OSError as error:
            raise CorpusError(
                f"there is no corpus in {self.directory}: {CARD_NAME} cannot be read ({error.strerror or error})",
                "give the directory that `atoll data build` made with --data",
            ) from error
        self.adopt_card(data)
        assert self._table is not None
        here = [shard for shard in self._table.all_shards() if _looks_whole(self.directory, shard)]
        if not here:
            raise CorpusError(
                f"{self.directory} has the card of the run's corpus but none of its {self._table.shards} shards",
                "copy the shards to it, or leave out --data",
            )
        size = sum(shard.size for shard in here)
        return f"{len(here)} of {self._table.shards} shards, {size / 1e9:.3g} GB"

    def read(self, path: str, start: int, stop: int) -> bytes | None:
        """Return verified bytes of a file of the corpus; None if this node lacks them, or there is no such range."""
        table = self.table()
        wanted = table.range_of(path, start, stop) if table is not None else None
        return self.read_range(wanted) if wanted is not None else None

    def read_piece(self, path: str, start: int) -> tuple[bytes, int] | None:
        """Return a verified piece of the card or of a file of the tokenizer, and the size of the whole file."""
        table = self.table()
        file = table.files.get(path) if table is not None else None
        if file is None or start % PIECE_BYTES or not 0 <= start < file.size:
            return None
        data = self._file_piece(FilePiece(file, start))
        return (data, file.size) if data is not None else None

    def read_range(self, wanted: CorpusRange) -> bytes | None:
        """Return a verified range; None if this node does not have it."""
        match wanted:
            case FilePiece():
                return self._file_piece(wanted)
            case ChunkDigests():
                return self.chunk_digests(wanted)
            case BlockDigests():
                return self.block_digests(wanted)
            case Blocks():
                return self._read_blocks(wanted)

    def chunk_digests(self, wanted: ChunkDigests) -> bytes | None:
        """Return the verified digests of a shard's chunks; None if this node does not have them."""
        found = self.digests.get(wanted)
        if found is not None:
            return found
        for data in self._found(wanted, shard_file(wanted.shard.name), 0):
            try:
                return self.digests.accept_chunk_digests(wanted, data)
            except BlockMismatch:
                continue
        return None

    def block_digests(self, wanted: BlockDigests) -> bytes | None:
        """Return the verified digests of a chunk's blocks; None if this node does not have them."""
        found = self.digests.get(wanted)
        if found is not None:
            return found
        chunk_digests = self.chunk_digests(ChunkDigests(wanted.shard))
        if chunk_digests is None:
            return None
        for data in self._found(wanted, chunk_file(wanted.shard.name, wanted.chunk), 0):
            try:
                return self.digests.accept_block_digests(wanted, chunk_digests, data)
            except BlockMismatch:
                continue
        return None

    def _read_blocks(self, wanted: Blocks) -> bytes | None:
        block_digests = self.block_digests(BlockDigests(wanted.shard, wanted.chunk))
        if block_digests is None:
            return None
        name, offset = chunk_file(wanted.shard.name, wanted.chunk), DATA_OFFSET + wanted.start % CHUNK_BYTES
        for data in self._found(wanted, name, offset):
            try:
                return check_blocks(wanted, block_digests, data)
            except BlockMismatch:
                continue
        return None

    def _found(self, wanted: CorpusRange, cache_name: str, cache_offset: int) -> Iterator[bytes]:
        """Yield the unverified bytes that the directory and the cache have for a range."""
        path, start, stop = path_and_bytes(wanted)
        places = [(self.directory / path, start)] if self.directory is not None else []
        places += [(self._blocks / cache_name, cache_offset)] if self._blocks is not None else []
        for place, offset in places:
            data = _read_range(place, offset, stop - start)
            if len(data) == stop - start:
                yield data

    # --- files that are known whole --------------------------------------------------------------------

    def _file_piece(self, wanted: FilePiece) -> bytes | None:
        for root in self._roots:
            path = root / wanted.file.path
            hashes = self._piece_hashes(path, wanted.file)
            data = _read_range(path, wanted.start, wanted.stop - wanted.start) if hashes else b""
            if hashes and hashlib.sha256(data).digest() == hashes[wanted.start // PIECE_BYTES]:
                return data
            if hashes:  # the file changed: hash all of it again at the next read
                self._pieces.pop((path, wanted.file.sha256), None)
        return None

    def _piece_hashes(self, path: Path, file: WholeFile) -> list[bytes]:
        """Return the hashes of a file's pieces; empty if the file has a wrong hash or is absent."""
        known = self._pieces.get((path, file.sha256))
        if known is not None:
            return known
        with self._hashing:
            if (state := _state_of(path)) is None or state[0] != file.size or self._broken.get(path) == state:
                return []
            whole, hashes = hashlib.sha256(), list[bytes]()
            for start in range(0, file.size, PIECE_BYTES):
                data = _read_range(path, start, min(PIECE_BYTES, file.size - start))
                whole.update(data)
                hashes.append(hashlib.sha256(data).digest())
            if whole.hexdigest() != file.sha256:
                self._broken[path] = state
                return []
            self._pieces[path, file.sha256] = hashes
            return hashes

    def _intact_card(self, path: Path) -> bytes | None:
        """Return a card with the right digest. A file with a wrong digest is read again only after it changed."""
        state = _state_of(path)
        if state is None or self._broken.get(path) == state:
            return None
        try:
            data = _read_whole(path, MAX_CARD_BYTES)
        except OSError:
            return None
        if card_digest(data) == self.digest:
            return data
        self._broken[path] = state
        _log.warning("card_differs", path=str(path))
        return None


def _looks_whole(directory: Path, shard: KnownShard) -> bool:
    sizes = {"tokens": shard.size, "digests": digests_size(shard.size)}
    for kind in ("tokens", "digests"):
        state = _state_of(directory / shard.name.path(kind))
        if state is None or state[0] != sizes[kind]:
            return False
    return True


def _state_of(path: Path) -> tuple[int, int, int] | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns, facts.st_ino


def _read_range(path: Path, start: int, size: int) -> bytes:
    """Return at most `size` bytes of a file; fewer at its end, none if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # so that opening a pipe does not block
    except OSError:
        return b""
    try:
        return os.pread(descriptor, size, start) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _read_whole(path: Path, at_most: int) -> bytes:
    with path.open("rb") as file:
        return file.read(at_most + 1)
