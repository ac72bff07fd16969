"""Hashes of shards: any block can be verified alone, and no changed byte passes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.node.data import blocks
from atoll.node.data.blocks import BlockMismatch

SIZES = st.integers(min_value=1, max_value=3 * blocks.CHUNK_BYTES)


def shard(size: int) -> bytes:
    return bytes(range(251)) * (size // 251) + bytes(range(size % 251))


def chunks(data: bytes) -> list[bytes]:
    return [data[at : at + blocks.CHUNK_BYTES] for at in range(0, len(data), blocks.CHUNK_BYTES)]


@settings(max_examples=30, deadline=None)
@given(SIZES, st.data())
def test_each_block_can_be_verified_from_root_digests_and_its_own_bytes(size: int, data: st.DataObject) -> None:
    content = shard(size)
    root, digests = blocks.hash_shard(chunks(content))
    assert len(digests) == blocks.digests_size(size)
    start, stop = blocks.chunk_digests_range(size)
    of_chunks = digests[start:stop]
    blocks.check_chunk_digests(size, root, of_chunks)
    chunk = data.draw(st.integers(0, blocks.count_chunks(size) - 1))
    start, stop = blocks.block_digests_range(size, chunk)
    of_blocks = digests[start:stop]
    blocks.check_block_digests(of_chunks[chunk * 16 : chunk * 16 + 16], of_blocks)
    bytes_of_chunk = chunks(content)[chunk]
    first = data.draw(st.integers(0, blocks.count_blocks(len(bytes_of_chunk)) - 1))
    piece = bytearray(bytes_of_chunk[first * blocks.BLOCK_BYTES :])
    assert not blocks.wrong_blocks(piece, first, of_blocks)
    at = data.draw(st.integers(0, len(piece) - 1))
    piece[at] ^= 1 << data.draw(st.integers(0, 7))
    assert list(blocks.wrong_blocks(piece, first, of_blocks)) == [first + at // blocks.BLOCK_BYTES]


def test_digests_that_were_changed_cut_or_swapped_do_not_have_the_root() -> None:
    size = 3 * blocks.CHUNK_BYTES - 5
    root, digests = blocks.hash_shard(chunks(shard(size)))
    good = digests[: 3 * 16]
    for bad in (good[:-16], good + good[:16], good[16:32] + good[:16] + good[32:], b"\1" + good[1:], b""):
        with pytest.raises(BlockMismatch):
            blocks.check_chunk_digests(size, root, bad)
    with pytest.raises(BlockMismatch):
        blocks.check_chunk_digests(size - 1, root, good)
    with pytest.raises(BlockMismatch):
        blocks.check_block_digests(good[:16], digests[slice(*blocks.block_digests_range(size, 1))])


def test_digests_of_chunks_do_not_pass_for_a_block() -> None:
    """Without a prefix for each level, a mirror could send inner nodes of the tree as text."""
    _, digests = blocks.hash_shard([shard(blocks.CHUNK_BYTES)])
    of_blocks = digests[16:]
    assert blocks.hash_block(of_blocks) != blocks.hash_chunk(of_blocks)
    assert blocks.hash_chunk(of_blocks) != bytes.fromhex(blocks.hash_root(blocks.CHUNK_BYTES, of_blocks))[:16]


def test_only_the_last_chunk_may_be_short() -> None:
    with pytest.raises(ValueError, match="last chunk"):
        blocks.hash_shard([b"short", b"another"])
