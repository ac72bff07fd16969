"""Hashes that verify a part of a shard without the rest of the shard. Pure.

A shard is a file of tokens. It is cut into chunks of 64 KiB, and these into blocks of 8 KiB; the last ones may be
shorter. The digest of a block is SHA-256 over its bytes, the digest of a chunk SHA-256 over the digests of its blocks,
the root SHA-256 over the shard's size and the digests of its chunks: a Merkle tree with two inner levels (Merkle 1987,
"A Digital Signature Based on a Conventional Encryption Function"). Each hash has a prefix that names its level, so that
no inner node passes for a block. Digests of blocks and chunks are cut to 16 bytes: a mirror needs about 2^100 tries for
other bytes with the digest of any block of a terabyte.

The corpus card has the root. A file beside the shard has all digests: first those of the chunks, then those of the
blocks, in order. To verify one block a reader needs the digests of all chunks (16 KiB for 64 MiB, once for a shard) and
those of the blocks in its chunk (128 bytes).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

BLOCK_BYTES = 1 << 13
CHUNK_BYTES = 1 << 16
DIGEST_BYTES = 16
MAX_SHARD_BYTES = 1 << 34

ByteRange = tuple[int, int]  # half-open


class BlockMismatch(Exception):
    """Bytes whose hash differs from the one that the corpus card demands. Never leaves `data`."""


def count_chunks(size: int) -> int:
    """Return how many chunks a shard of `size` bytes has."""
    return -(-size // CHUNK_BYTES)


def count_blocks(size: int) -> int:
    """Return how many blocks a shard of `size` bytes has."""
    return -(-size // BLOCK_BYTES)


def chunk_size(size: int, chunk: int) -> int:
    """Return the bytes of one chunk of a shard of `size` bytes."""
    return min(CHUNK_BYTES, size - chunk * CHUNK_BYTES)


def chunk_digests_range(size: int) -> ByteRange:
    """Return the byte range of the digests of all chunks in the file of digests."""
    return 0, count_chunks(size) * DIGEST_BYTES


def block_digests_range(size: int, chunk: int) -> ByteRange:
    """Return the byte range of the digests of a chunk's blocks in the file of digests."""
    start = count_chunks(size) * DIGEST_BYTES + chunk * (CHUNK_BYTES // BLOCK_BYTES) * DIGEST_BYTES
    return start, start + count_blocks(chunk_size(size, chunk)) * DIGEST_BYTES


def digests_size(size: int) -> int:
    """Return the size of the file of digests for a shard of `size` bytes."""
    return (count_chunks(size) + count_blocks(size)) * DIGEST_BYTES


def hash_block(block: bytes | memoryview) -> bytes:
    """Return the digest of one block."""
    digest = hashlib.sha256(b"atoll block\0")
    digest.update(block)
    return digest.digest()[:DIGEST_BYTES]


def hash_blocks(data: bytes | memoryview) -> bytes:
    """Return the digests of all blocks of `data`, concatenated. `data` starts at a block boundary."""
    view = memoryview(data)
    return b"".join(hash_block(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES))


def hash_chunk(block_digests: bytes) -> bytes:
    """Return the digest of a chunk from the digests of its blocks."""
    return hashlib.sha256(b"atoll chunk\0" + block_digests).digest()[:DIGEST_BYTES]


def hash_root(size: int, chunk_digests: bytes) -> str:
    """Return the root of a shard of `size` bytes, hexadecimal."""
    return hashlib.sha256(b"atoll shard\0" + size.to_bytes(8, "little") + chunk_digests).hexdigest()


def hash_shard(chunks: Iterable[bytes | memoryview]) -> tuple[str, bytes]:
    """Return the root of a shard, and its file of digests. All `chunks` but the last have `CHUNK_BYTES`."""
    size, chunk_digests, block_digests = 0, list[bytes](), list[bytes]()
    for chunk in chunks:
        if size % CHUNK_BYTES or len(chunk) > CHUNK_BYTES:
            raise ValueError("only the last chunk of a shard may have another size")
        size += len(chunk)
        block_digests.append(hash_blocks(chunk))
        chunk_digests.append(hash_chunk(block_digests[-1]))
    together = b"".join(chunk_digests)
    return hash_root(size, together), together + b"".join(block_digests)


def check_chunk_digests(size: int, root: str, chunk_digests: bytes) -> None:
    """Raise `BlockMismatch` if the digests of a shard's chunks do not have this root."""
    start, stop = chunk_digests_range(size)
    if len(chunk_digests) != stop - start or hash_root(size, chunk_digests) != root:
        raise BlockMismatch("the digests of a shard do not match the corpus card")


def check_block_digests(chunk_digest: bytes, block_digests: bytes) -> None:
    """Raise `BlockMismatch` if the digests of a chunk's blocks do not have the chunk's digest."""
    if hash_chunk(block_digests) != chunk_digest:
        raise BlockMismatch("the digests of a chunk do not match those of its shard")


def wrong_blocks(data: bytes | memoryview, first: int, block_digests: bytes) -> Sequence[int]:
    """Return the numbers of blocks whose digest is wrong.

    `data` has whole blocks of the chunk from number `first` on; only the chunk's last block may be shorter.
    """
    found, view = list[int](), memoryview(data)
    for number, start in enumerate(range(0, len(view), BLOCK_BYTES), start=first):
        expected = block_digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]
        if hash_block(view[start : start + BLOCK_BYTES]) != expected:
            found.append(number)
    return found
