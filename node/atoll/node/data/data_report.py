"""Counts of the training text that a node has read, by place, for `atoll status` and metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class BlockCounts(NamedTuple):
    """Blocks by the place that they were read from. A repeated read from memory does not count."""

    cache: int = 0  # of this node, on disk
    directory: int = 0  # of the node's owner
    server: int = 0  # mirrors of the run
    members: int = 0


class MirrorReport(NamedTuple):
    """Bytes that one mirror gave, and why it fails now."""

    name: str
    kind: str
    bytes: int  # verified bytes
    problem: str  # empty while it works


NO_BLOCKS = BlockCounts()


@dataclass(frozen=True)
class DataReport:
    """Totals of one process."""

    bytes_fetched: int = 0  # over the network
    bytes_trained: int = 0  # stored bytes of the samples that training took
    blocks: BlockCounts = NO_BLOCKS
    mirrors: tuple[MirrorReport, ...] = ()
