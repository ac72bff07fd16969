"""Reads of a corpus, block by block: from memory, else from the cache on disk, else from a mirror; each one verified.

No byte leaves this module whose hash does not follow from the corpus card. Digests are fetched like blocks: those of
all chunks of a shard against its root, those of a chunk's blocks against the chunk's digest.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from atoll.node.data.block_cache import DATA_OFFSET, BlockCache, chunk_file, shard_file
from atoll.node.data.blocks import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DIGEST_BYTES,
    BlockMismatch,
    block_digests_range,
    check_block_digests,
    check_chunk_digests,
    chunk_digests_range,
    chunk_size,
    count_blocks,
    wrong_blocks,
)
from atoll.node.data.card import CorpusCard, Shard, ShardName
from atoll.node.data.data_report import BlockCounts
from atoll.node.data.fetcher import Fetcher

CHUNKS_IN_MEMORY = 1024  # 64 MiB
_SHARDS_IN_MEMORY = 1024  # whose chunk digests are kept


@dataclass
class _Chunk:
    """A chunk in memory: its bytes, of which only some may be known."""

    digests: bytes  # of its blocks; empty until they are fetched
    data: bytearray
    known: bytearray  # one byte a block
    digests_cached: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class BlockReader:
    """Verified reads of a corpus. May be used by several threads at once."""

    def __init__(self, card: CorpusCard, fetcher: Fetcher, cache: BlockCache | None) -> None:
        self._card, self._fetcher = card, fetcher
        self._cache = None if fetcher.all_local else cache
        self._chunks: OrderedDict[tuple[ShardName, int], _Chunk] = OrderedDict()
        self._shards: OrderedDict[ShardName, bytes] = OrderedDict()
        self._cached_shards = set[ShardName]()  # shards of `_shards` whose digests are in the cache
        self._lock = threading.Lock()
        self._blocks: Counter[str] = Counter()

    @property
    def blocks(self) -> BlockCounts:
        """Number of blocks read, by the place they came from."""
        with self._lock:
            return BlockCounts(*(self._blocks[place] for place in BlockCounts._fields))

    def _count(self, place: str, blocks: int) -> None:
        with self._lock:
            self._blocks[place] += blocks

    def read(self, source: int, shard: int, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of a shard. Raises `Unreachable` if no mirror gives the missing blocks."""
        found = bytearray()
        for number, first, last in _pieces(start, stop):
            chunk = self._ready(source, shard, number, first // BLOCK_BYTES, -(-last // BLOCK_BYTES))
            found += chunk.data[first:last]
        return bytes(found)

    def pin(self, places: Iterable[tuple[int, int, int, int]]) -> None:
        """Keep the blocks of these ranges in the cache once they are fetched: source, shard, first and last byte."""
        if self._cache is None:
            return
        files: dict[str, int] = {}
        for source, shard, start, stop in places:
            name, facts = ShardName(self._card.sources[source].name, shard), self._card.sources[source].shards[shard]
            first, last = chunk_digests_range(self._card.shard_bytes(facts))
            files[shard_file(name)] = last - first
            files |= {chunk_file(name, number): DATA_OFFSET + CHUNK_BYTES for number, _, _ in _pieces(start, stop)}
        self._cache.pin(files)

    def ensure(self, source: int, shard: int, chunk: int, first: int, last: int) -> None:
        """Make blocks `first` to `last` (exclusive) of a chunk available for a later `read`. Raises `Unreachable`."""
        self._ready(source, shard, chunk, first, last)

    def _ready(self, source: int, shard: int, number: int, first: int, last: int) -> _Chunk:
        name, facts = ShardName(self._card.sources[source].name, shard), self._card.sources[source].shards[shard]
        size = self._card.shard_bytes(facts)
        chunk = self._chunk(name, number, chunk_size(size, number))
        last = min(last, len(chunk.known))
        with chunk.lock:
            if all(chunk.known[first:last]):
                return chunk
            file = chunk_file(name, number)
            if self._cache is not None:
                self._recall(chunk, file, name, facts, number, first, last)
            if all(chunk.known[first:last]):
                return chunk
            with self._only_process(file):
                if self._cache is not None:  # another process of this node may have fetched it since
                    self._recall(chunk, file, name, facts, number, first, last)
                if not chunk.digests:
                    self._fetch_digests(chunk, name, facts, number)
                for begin, end in _missing(chunk.known, first, last):
                    self._fetch(chunk, file, name, number, begin, end)
        return chunk

    def _only_process(self, file: str) -> AbstractContextManager[None]:
        if self._cache is None or self._fetcher.prefers_local:
            return nullcontext()
        return self._cache.only_process(file)

    def _chunk(self, name: ShardName, number: int, size: int) -> _Chunk:
        with self._lock:
            chunk = self._chunks.get((name, number))
            if chunk is None:
                chunk = self._chunks[name, number] = _Chunk(b"", bytearray(size), bytearray(count_blocks(size)))
            self._chunks.move_to_end((name, number))
            while len(self._chunks) > CHUNKS_IN_MEMORY:
                self._chunks.popitem(last=False)
        return chunk

    def _recall(
        self, chunk: _Chunk, file: str, name: ShardName, shard: Shard, number: int, first: int, last: int
    ) -> None:
        """Take the blocks that the cache on disk has and whose hash is right."""
        assert self._cache is not None
        if not chunk.digests:
            chunk_digests = self._recall_chunk_digests(name, shard)
            found = self._cache.read(file, 0, len(chunk.known) * DIGEST_BYTES)
            if chunk_digests is None or not _matches(chunk_digests, number, found):
                return
            chunk.digests = found
        begin, end = first * BLOCK_BYTES, min(last * BLOCK_BYTES, len(chunk.data))
        data = self._cache.read(file, DATA_OFFSET + begin, DATA_OFFSET + end)
        if len(data) == end - begin:
            right = {block for block in range(first, last) if not chunk.known[block]}
            right -= set(wrong_blocks(data, first, chunk.digests))
            self._count("cache", len(right))
            for block in sorted(right):
                self._keep(chunk, block, data[(block - first) * BLOCK_BYTES : (block + 1 - first) * BLOCK_BYTES])

    def _recall_chunk_digests(self, name: ShardName, shard: Shard) -> bytes | None:
        with self._lock:
            if name in self._shards:
                return self._shards[name]
        assert self._cache is not None
        size = self._card.shard_bytes(shard)
        found = self._cache.read(shard_file(name), *chunk_digests_range(size))
        try:
            check_chunk_digests(size, shard.root, found)
        except BlockMismatch:
            return None
        self._keep_chunk_digests(name, found)
        with self._lock:
            self._cached_shards.add(name)
        return found

    def _keep_chunk_digests(self, name: ShardName, digests: bytes) -> None:
        with self._lock:
            self._shards[name] = digests
            while len(self._shards) > _SHARDS_IN_MEMORY:
                self._cached_shards.discard(self._shards.popitem(last=False)[0])

    def _fetch_digests(self, chunk: _Chunk, name: ShardName, shard: Shard, number: int) -> None:
        size, path = self._card.shard_bytes(shard), name.path("digests")
        with self._lock:
            chunk_digests = self._shards.get(name)
        if chunk_digests is None:
            chunk_digests = self._fetcher.read(
                path, *chunk_digests_range(size), lambda data: check_chunk_digests(size, shard.root, data)
            )
            self._keep_chunk_digests(name, chunk_digests)
        wanted = chunk_digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        chunk.digests = self._fetcher.read(
            path, *block_digests_range(size, number), lambda data: check_block_digests(wanted, data)
        )

    def _fetch(self, chunk: _Chunk, file: str, name: ShardName, number: int, first: int, last: int) -> None:
        start, stop = first * BLOCK_BYTES, min(last * BLOCK_BYTES, len(chunk.data))
        offset = number * CHUNK_BYTES

        def check(data: bytes) -> None:
            if wrong := wrong_blocks(data, first, chunk.digests):
                raise BlockMismatch(f"block {wrong[0]} of chunk {number} of {name.path('tokens')}")

        fetched = self._fetcher.fetch(name.path("tokens"), offset + start, offset + stop, check)
        data = fetched.data
        for block in range(first, last):
            self._keep(chunk, block, data[(block - first) * BLOCK_BYTES : (block + 1 - first) * BLOCK_BYTES])
        self._count(fetched.kind, last - first)
        if self._cache is not None and fetched.kind != "directory":  # the cache is no copy of the owner's directory
            self._cache_digests(self._cache, chunk, file, name)
            self._cache.write(file, DATA_OFFSET + start, data)

    def _cache_digests(self, cache: BlockCache, chunk: _Chunk, file: str, name: ShardName) -> None:
        """Write a chunk's digests next to its bytes, again if the cache has deleted them."""
        with self._lock:
            chunk_digests = self._shards.get(name)
            shard_is_new = name not in self._cached_shards
            self._cached_shards.add(name)
        if chunk_digests is not None and (shard_is_new or not cache.holds(shard_file(name))):
            cache.write(shard_file(name), 0, chunk_digests)
        if not chunk.digests_cached or not cache.holds(file):
            chunk.digests_cached = True
            cache.write(file, 0, chunk.digests)

    @staticmethod
    def _keep(chunk: _Chunk, block: int, data: bytes) -> None:
        chunk.data[block * BLOCK_BYTES : block * BLOCK_BYTES + len(data)] = data
        chunk.known[block] = 1


def _pieces(start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Cut a range of a shard at its chunks: number of the chunk, first and last byte in it (exclusive)."""
    while start < stop:
        chunk, first = divmod(start, CHUNK_BYTES)
        last = min(CHUNK_BYTES, first + stop - start)
        yield chunk, first, last
        start += last - first


def _missing(known: bytearray, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Runs of unknown blocks."""
    begin = first
    while (begin := known.find(0, begin, last)) >= 0:
        end = known.find(1, begin, last)
        end = last if end < 0 else end
        yield begin, end
        begin = end


def _matches(chunk_digests: bytes, number: int, block_digests: bytes) -> bool:
    try:
        check_block_digests(chunk_digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES], block_digests)
    except BlockMismatch:
        return False
    return True
