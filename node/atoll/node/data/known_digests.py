"""Verified digests of shards and chunks in bounded memory, and checks of digests and blocks from a file or a peer."""

from __future__ import annotations

import threading
from collections import OrderedDict

from atoll.node.data.blocks import (
    BLOCK_BYTES,
    DIGEST_BYTES,
    BlockMismatch,
    check_block_digests,
    check_chunk_digests,
    wrong_blocks,
)
from atoll.node.data.corpus_table import BlockDigests, Blocks, ChunkDigests

MAX_BYTES = 64 << 20
_ENTRY_BYTES = 512  # memory of an entry in addition to its digests


class KnownDigests:
    """Digests that follow from the card. May be used by several threads at once."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._known: OrderedDict[ChunkDigests | BlockDigests, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, wanted: ChunkDigests | BlockDigests) -> bytes | None:
        """Return digests that were verified recently; None if they are not in memory."""
        with self._lock:
            if wanted in self._known:
                self._known.move_to_end(wanted)
            return self._known.get(wanted)

    def accept_chunk_digests(self, wanted: ChunkDigests, data: bytes) -> bytes:
        """Verify the digests of a shard's chunks, remember and return them. Raises `BlockMismatch`."""
        check_chunk_digests(wanted.shard.size, wanted.shard.root, data)
        return self._remember(wanted, data)

    def accept_block_digests(self, wanted: BlockDigests, chunk_digests: bytes, data: bytes) -> bytes:
        """Verify the digests of a chunk's blocks, remember and return them. Raises `BlockMismatch`."""
        check_block_digests(chunk_digests[wanted.chunk * DIGEST_BYTES : (wanted.chunk + 1) * DIGEST_BYTES], data)
        return self._remember(wanted, data)

    def _remember(self, wanted: ChunkDigests | BlockDigests, data: bytes) -> bytes:
        with self._lock:
            self._forget(self._known.pop(wanted, None))
            self._known[wanted] = data
            self._bytes += len(data) + _ENTRY_BYTES
            while self._bytes > self._max_bytes and len(self._known) > 1:
                self._forget(self._known.popitem(last=False)[1])
        return data

    def _forget(self, data: bytes | None) -> None:
        if data is not None:
            self._bytes -= len(data) + _ENTRY_BYTES


def check_blocks(wanted: Blocks, block_digests: bytes, data: bytes) -> bytes:
    """Return blocks that have their digests. Raises `BlockMismatch`."""
    if len(data) != wanted.stop - wanted.start:
        raise BlockMismatch(f"{len(data)} bytes instead of {wanted.stop - wanted.start}")
    for number, at in enumerate(range(0, len(data), BLOCK_BYTES), start=wanted.first):
        if wrong_blocks(data[at : at + BLOCK_BYTES], number, block_digests):
            raise BlockMismatch(f"block {number} of chunk {wanted.chunk} of {wanted.shard.name.path('tokens')}")
    return data
