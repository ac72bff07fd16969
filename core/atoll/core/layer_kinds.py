"""The kinds of layers in a layer table: an embedding, blocks, a head."""

from __future__ import annotations

EMBEDDING, BLOCK, HEAD = "embedding", "block", "head"
MAX_BLOCK_KINDS = 14  # with the other two as many as a node's profile tells times of


def block_kind(number: int) -> str:
    """Of blocks that differ: "block" for the first kind, then "block-2", …; those beyond the most count as the last."""
    number = min(number, MAX_BLOCK_KINDS)
    return BLOCK if number == 1 else f"{BLOCK}-{number}"


def is_block(kind: str) -> bool:
    """Whether a layer of that kind stands between embedding and head."""
    return kind == BLOCK or kind.startswith(f"{BLOCK}-")
