"""Shards from spill files: the documents of a group of units in their final order, cut every `shard_tokens` tokens.

A shard ends after `shard_tokens` tokens, wherever that is: a document that does not fit continues at the start of the
next shard of its group. It counts for the shard that has its last token. The last shard of a group may be shorter, and
no document continues in the next group. Each shard is written by one task, which reads only the documents in it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.disk import OS_DISK, Disk
from atoll.core.errors import DataDirUnusable
from atoll.node.data.blocks import CHUNK_BYTES, hash_shard
from atoll.node.data.card import Shard, ShardName, count_marks, start_bit
from atoll.node.data.durable_files import new_file, write_file
from atoll.node.data.shuffle import permutation
from atoll.node.data.spill import Spill, document_lengths

_BLOCK_DOCUMENTS = 1 << 14  # converted at once: Python's integers take much more memory than NumPy's


@dataclass(frozen=True)
class Group:
    """Units whose documents are shuffled together."""

    source: str
    number: int
    spills: tuple[Spill, ...]
    seed: int | None  # None: the order of the input
    dtype: np.dtype[Any]
    shard_tokens: int
    marks: bool = False  # some tokens are input only; a bit marks the first token of each document

    @property
    def tokens(self) -> int:
        return sum(spill.tokens for spill in self.spills)

    @property
    def documents(self) -> int:
        return sum(spill.documents for spill in self.spills)

    @property
    def shards(self) -> int:
        """Number of shards that the group fills."""
        return -(-self.tokens // self.shard_tokens)


@dataclass(frozen=True)
class Layout:
    """Where the documents of a group come from and go to. Pure arrays, one number for each document in final order."""

    spill: NDArray[np.int64]  # number of the spill file
    start: NDArray[np.int64]  # first token in that file
    length: NDArray[np.int64]
    end: NDArray[np.int64]  # in the group's tokens, after the last token


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one spill file."""

    spill: int
    start: int
    tokens: int


def lay_out(group: Group) -> Layout:
    """Return the final order of a group's documents. Raises `OSError`."""
    lengths = [document_lengths(spill, group.dtype) for spill in group.spills]
    counts = [len(of_one) for of_one in lengths]
    length = np.concatenate(lengths) if lengths else np.zeros(0, np.int64)
    start = np.concatenate([np.cumsum(of_one) - of_one for of_one in lengths]) if lengths else length
    spill = np.repeat(np.arange(len(counts)), counts)
    if group.seed is not None:
        order = permutation(len(length), group.seed, group.source, group.number)
        spill, start, length = spill[order], start[order], length[order]
    return Layout(spill, start, length, np.cumsum(length))


def runs_of(layout: Layout, first: int, stop: int) -> Iterator[Run]:
    """Yield the positions of a group's tokens [first, stop) in spill files; adjacent tokens are one run."""
    position, run = first, Run(-1, 0, 0)
    for spill, start, length, end in _documents(layout, first, stop):
        take = min(end, stop) - position
        start += position - (end - length)
        if spill == run.spill and start == run.start + run.tokens:
            run = Run(spill, run.start, run.tokens + take)
        else:
            if run.tokens:
                yield run
            run = Run(spill, start, take)
        position += take
    if run.tokens:
        yield run


def _documents(layout: Layout, first: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield spill, start, length and end of each document that has tokens in [first, stop)."""
    start = int(np.searchsorted(layout.end, first, side="right"))
    end = min(len(layout.end), int(np.searchsorted(layout.end, stop, side="left")) + 1)
    columns = (layout.spill, layout.start, layout.length, layout.end)
    for block in range(start, end, _BLOCK_DOCUMENTS):
        rows = slice(block, min(end, block + _BLOCK_DOCUMENTS))
        yield from zip(*(column[rows].tolist() for column in columns), strict=True)


def write_shard(group: Group, number: int, first_shard: int, directory: Path, disk: Disk = OS_DISK) -> Shard:
    """Write shard `number` of a group, whose first shard has the number `first_shard` in its source.

    Raises `DataDirUnusable`.
    """
    try:
        layout = lay_out(group)
    except OSError as error:
        raise _unreadable(Path(error.filename or group.spills[0].path.parent), error) from error
    first = number * group.shard_tokens
    stop = min(group.tokens, first + group.shard_tokens)
    name = ShardName(group.source, first_shard + number)
    ends = layout.end[
        np.searchsorted(layout.end, first, side="right") : np.searchsorted(layout.end, stop, side="right")
    ]
    documents = (ends - first).astype("<u8").tobytes()
    checksum, marked = hashlib.sha256(), 0
    with ExitStack() as files:
        file = files.enter_context(new_file(directory / name.path("tokens"), disk))

        def written() -> Iterator[memoryview]:
            nonlocal marked
            position = first
            for chunk in _chunks(group, runs_of(layout, first, stop)):
                stored = np.frombuffer(chunk, group.dtype)
                if group.marks:
                    _mark_starts(stored, layout, position)
                    marked += count_marks(stored)
                file.write(chunk)
                checksum.update(chunk)
                position += len(stored)
                yield chunk

        root, digests = hash_shard(written())
    write_file(directory / name.path("digests"), digests, disk)
    write_file(directory / name.path("documents"), documents, disk)
    return Shard(
        tokens=stop - first,
        documents=len(ends),
        sha256=checksum.hexdigest(),
        root=root,
        documents_sha256=hashlib.sha256(documents).hexdigest(),
        targets=stop - first - marked if group.marks else None,
    )


def _mark_starts(stored: NDArray[Any], layout: Layout, position: int) -> None:
    """Set the start bit of the first token of each document, in place. `position`: in the group, of the first token."""
    ends = layout.end[np.searchsorted(layout.end, position) : np.searchsorted(layout.end, position + len(stored))]
    stored[ends - position] |= stored.dtype.type(start_bit(stored.dtype))
    if position == 0:
        stored[0] |= stored.dtype.type(start_bit(stored.dtype))


def _chunks(group: Group, runs: Iterator[Run]) -> Iterator[memoryview]:
    """Yield the bytes of runs in parts of `CHUNK_BYTES`. The next part overwrites the buffer of the last one."""
    chunk = memoryview(bytearray(CHUNK_BYTES))
    filled = 0
    with ExitStack() as files:
        opened = dict[int, int]()
        for run in runs:
            path = group.spills[run.spill].path
            try:
                if run.spill not in opened:
                    opened[run.spill] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    files.callback(os.close, opened[run.spill])
                offset, left = run.start * group.dtype.itemsize, run.tokens * group.dtype.itemsize
                while left:
                    wanted = min(left, CHUNK_BYTES - filled)
                    got = os.preadv(opened[run.spill], [chunk[filled : filled + wanted]], offset)
                    if not got:
                        raise OSError(errno.EIO, "it is cut short")
                    filled, offset, left = filled + got, offset + got, left - got
                    if filled == CHUNK_BYTES:
                        yield chunk
                        filled = 0
            except OSError as error:
                raise _unreadable(path, error) from error
    if filled:
        yield chunk[:filled]


def _unreadable(path: Path, error: OSError) -> DataDirUnusable:
    return DataDirUnusable(
        f"cannot read {path}, which this build wrote: {error.strerror or error}",
        "begin again with --restart",
    )
