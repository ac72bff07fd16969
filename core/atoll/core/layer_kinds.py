"""Layer kinds in a layer table: embedding, blocks, head. Layers of one kind cost the same."""

from __future__ import annotations

EMBEDDING, BLOCK, HEAD = "embedding", "block", "head"
MAX_BLOCK_KINDS = 14  # with embedding and head, this is the number of layer times that a node's profile can have


def block_kind(number: int) -> str:
    """Return the kind of the `number`th distinct block: "block", "block-2", …, at most "block-14"."""
    number = min(number, MAX_BLOCK_KINDS)
    return BLOCK if number == 1 else f"{BLOCK}-{number}"


def is_block(kind: str) -> bool:
    """Return whether a layer of that kind is a block, which is neither embedding nor head."""
    return kind == BLOCK or kind.startswith(f"{BLOCK}-")
