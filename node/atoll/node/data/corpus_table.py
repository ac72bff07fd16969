"""What a card says about each file, in a compact form, and the ranges of files that members ask of one another. Pure.

A member asks another for one of four things, each of which has a bound and can be verified:

- a piece of 256 KiB of a file that is known whole: the card, or a file of the tokenizer;
- the digests of all chunks of a shard, against the root in the card: 16 KiB for 64 MiB, 4 MiB for the largest shard;
- the digests of the blocks of one chunk, against the chunk's digest;
- blocks of one chunk, against their digests.

Requests for any other path or range are refused. So a path from a peer never reaches the file system: names of files
are made from the card.
"""

from __future__ import annotations

import re
from array import array
from dataclasses import dataclass

from atoll.node.data.blocks import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DIGEST_BYTES,
    MAX_SHARD_BYTES,
    block_digests_range,
    chunk_digests_range,
    count_chunks,
)
from atoll.node.data.card import CARD_NAME, TOKENIZER_DIRECTORY, CorpusCard, ShardName

PIECE_BYTES = 1 << 18  # of a file that is known whole
MAX_RANGE_BYTES = max(PIECE_BYTES, CHUNK_BYTES, count_chunks(MAX_SHARD_BYTES) * DIGEST_BYTES)
MAX_PATH_BYTES = 128
_SHARD_PATH = re.compile(r"([a-z0-9][a-z0-9_-]{0,63})/([0-9]{6,9})\.(tokens|digests)")


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file that is known by the hash of all its bytes."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class KnownShard:
    """A shard with the facts by which its files are verified."""

    name: ShardName
    size: int  # bytes of tokens
    root: str


@dataclass(frozen=True, slots=True)
class FilePiece:
    """The bytes of a file from `start` on, at most `PIECE_BYTES`."""

    file: WholeFile
    start: int  # a multiple of `PIECE_BYTES`

    @property
    def stop(self) -> int:
        return min(self.start + PIECE_BYTES, self.file.size)


@dataclass(frozen=True, slots=True)
class ChunkDigests:
    """The digests of all chunks of a shard."""

    shard: KnownShard


@dataclass(frozen=True, slots=True)
class BlockDigests:
    """The digests of the blocks of a chunk."""

    shard: KnownShard
    chunk: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Whole blocks of a chunk, by bytes of the shard."""

    shard: KnownShard
    start: int
    stop: int

    @property
    def chunk(self) -> int:
        return self.start // CHUNK_BYTES

    @property
    def first(self) -> int:
        """Number of the first block, counted from the start of its chunk."""
        return self.start % CHUNK_BYTES // BLOCK_BYTES


CorpusRange = FilePiece | ChunkDigests | BlockDigests | Blocks


def path_and_bytes(wanted: CorpusRange) -> tuple[str, int, int]:
    """Return the file of a range, relative to the corpus, and its first and last byte (exclusive)."""
    match wanted:
        case FilePiece(file, start):
            return file.path, start, wanted.stop
        case ChunkDigests(shard):
            return shard.name.path("digests"), *chunk_digests_range(shard.size)
        case BlockDigests(shard, chunk):
            return shard.name.path("digests"), *block_digests_range(shard.size, chunk)
        case Blocks(shard, start, stop):
            return shard.name.path("tokens"), start, stop


class CorpusTable:
    """The parts of a card that verify its files, in about 40 bytes a shard: a parsed card is much larger."""

    def __init__(self, card: CorpusCard, digest: str, card_bytes: int) -> None:
        self.token_bytes = card.token_bytes
        files = [WholeFile(CARD_NAME, card_bytes, digest)]
        files += [WholeFile(f"{TOKENIZER_DIRECTORY}/{f.name}", f.size, f.sha256) for f in card.tokenizer.files]
        self.files = {file.path: file for file in files}
        self._sizes = {
            source.name: array("Q", (card.shard_bytes(shard) for shard in source.shards)) for source in card.sources
        }
        self._roots = {
            source.name: b"".join(bytes.fromhex(shard.root) for shard in source.shards) for source in card.sources
        }

    @property
    def shards(self) -> int:
        """The number of shards."""
        return sum(map(len, self._sizes.values()))

    def all_shards(self) -> list[KnownShard]:
        """All shards, in the order of the card."""
        return [self._shard(source, number) for source, sizes in self._sizes.items() for number in range(len(sizes))]

    def range_of(self, path: str, start: int, stop: int) -> CorpusRange | None:
        """Return the range for these bytes of a file; None if no reader of a corpus would ask for them."""
        if not 0 <= start < stop or len(path) > MAX_PATH_BYTES:
            return None
        if (file := self.files.get(path)) is not None:
            piece = FilePiece(file, start)
            return piece if start % PIECE_BYTES == 0 and start < file.size and stop == piece.stop else None
        found = _SHARD_PATH.fullmatch(path)
        if found is None or int(found[2]) >= len(self._sizes.get(found[1], ())):
            return None
        shard = self._shard(found[1], int(found[2]))
        if found[3] == "tokens":
            return _blocks(shard, start, stop) if shard.name.path("tokens") == path else None
        return _digests(shard, start, stop) if shard.name.path("digests") == path else None

    def _shard(self, source: str, number: int) -> KnownShard:
        root = self._roots[source][32 * number : 32 * (number + 1)].hex()
        return KnownShard(ShardName(source, number), self._sizes[source][number], root)


def _blocks(shard: KnownShard, start: int, stop: int) -> Blocks | None:
    whole = start % BLOCK_BYTES == 0 and (stop % BLOCK_BYTES == 0 or stop == shard.size)
    one_chunk = stop <= min(shard.size, (start // CHUNK_BYTES + 1) * CHUNK_BYTES)
    return Blocks(shard, start, stop) if whole and one_chunk else None


def _digests(shard: KnownShard, start: int, stop: int) -> ChunkDigests | BlockDigests | None:
    if (start, stop) == chunk_digests_range(shard.size):
        return ChunkDigests(shard)
    chunk = (start // DIGEST_BYTES - count_chunks(shard.size)) // (CHUNK_BYTES // BLOCK_BYTES)
    if 0 <= chunk < count_chunks(shard.size) and (start, stop) == block_digests_range(shard.size, chunk):
        return BlockDigests(shard, chunk)
    return None
