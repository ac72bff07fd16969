"""Verify a corpus: every hash, every end of a document, every token below the vocabulary, on all cores."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.node.data.blocks import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    DIGEST_BYTES,
    BlockMismatch,
    block_digests_range,
    check_block_digests,
    check_chunk_digests,
    chunk_digests_range,
    digests_size,
    wrong_blocks,
)
from atoll.node.data.card import (
    TOKENIZER_DIRECTORY,
    CorpusCard,
    Shard,
    ShardName,
    TokenizerFile,
    count_marks,
    start_bit,
)
from atoll.node.system.worker_pool import StartPool, WorkerPool, usable_cores

OnVerified = Callable[[int, int], object]  # called with bytes verified and bytes of all shards


class Wrong(Exception):
    """A file of a corpus that is not as the card says."""

    def __init__(self, file: str, why: str) -> None:
        super().__init__(f"{file} {why}")


@dataclass(frozen=True)
class _VerifyShard:
    """Verify the three files of a shard; the result describes the fault, or is empty."""

    directory: Path
    name: ShardName
    shard: Shard
    card: CorpusCard  # without its sources

    def __call__(self) -> str:
        try:
            starts = self._tokens(self._digests())
            ends = self._documents()
            if self.card.starts:
                self._starts(starts, ends)
        except Wrong as wrong:
            return str(wrong)
        return ""

    @property
    def _size(self) -> int:
        return self.card.shard_bytes(self.shard)

    def _digests(self) -> bytes:
        name = self.name.path("digests")
        data = _read(self.directory, name, digests_size(self._size))
        start, stop = chunk_digests_range(self._size)
        try:
            check_chunk_digests(self._size, self.shard.root, data[start:stop])
        except BlockMismatch:
            raise Wrong(name, "does not have the root that the card demands") from None
        return data

    def _tokens(self, digests: bytes) -> NDArray[np.int64]:
        """Verify the tokens; return the positions where a bit of the tokens marks the start of a document."""
        name = self.name.path("tokens")
        _check_size(self.directory, name, self._size)
        checksum, marked, starts, position = hashlib.sha256(), 0, list[NDArray[np.int64]](), 0
        with (self.directory / name).open("rb") as file:
            for number in range(-(-self._size // CHUNK_BYTES)):
                chunk = file.read(CHUNK_BYTES)
                checksum.update(chunk)
                stored = self._chunk(name, number, chunk, digests)
                marked += count_marks(stored) if self.card.marks else 0
                if self.card.starts:
                    starts.append(position + np.flatnonzero(stored & stored.dtype.type(start_bit(stored.dtype))))
                position += len(stored)
        if checksum.hexdigest() != self.shard.sha256:
            raise Wrong(name, "has another SHA-256 than the card demands, but the right blocks: the card is forged")
        if self.card.marks and self.shard.tokens - marked != self.shard.targets:
            raise Wrong(name, f"has {self.shard.tokens - marked:,} targets, and the card says {self.shard.targets:,}")
        return np.concatenate(starts) if starts else np.zeros(0, np.int64)

    def _chunk(self, name: str, number: int, chunk: bytes, digests: bytes) -> NDArray[Any]:
        """Verify a chunk; return its stored tokens."""
        start, stop = block_digests_range(self._size, number)
        blocks = digests[start:stop]
        try:
            check_block_digests(digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES], blocks)
        except BlockMismatch:
            raise Wrong(self.name.path("digests"), f"has wrong digests of the blocks in chunk {number}") from None
        first = number * (CHUNK_BYTES // BLOCK_BYTES)
        if wrong := wrong_blocks(chunk, 0, blocks):
            raise Wrong(name, f"is damaged in block {first + wrong[0]} (of {BLOCK_BYTES >> 10} KiB)")
        stored = np.frombuffer(chunk, dtype=self.card.dtype)
        tokens = stored & stored.dtype.type(self.card.token_mask)
        if (largest := int(tokens.max())) >= self.card.tokenizer.vocabulary:
            block, vocabulary = first + tokens[: tokens.argmax()].nbytes // BLOCK_BYTES, self.card.tokenizer.vocabulary
            raise Wrong(name, f"has the token {largest} in block {block}, and the vocabulary has {vocabulary}")
        return stored

    def _documents(self) -> NDArray[np.int64]:
        """Verify and return the ends of documents."""
        name = self.name.path("documents")
        data = _read(self.directory, name, 8 * self.shard.documents)
        if hashlib.sha256(data).hexdigest() != self.shard.documents_sha256:
            raise Wrong(name, "has another SHA-256 than the card demands")
        ends = np.frombuffer(data, dtype="<u8")
        if len(ends) and (ends[0] < 1 or ends[-1] > self.shard.tokens or bool((ends[1:] <= ends[:-1]).any())):
            raise Wrong(name, "has ends of documents that are not in order, or not in the shard")
        return ends.astype(np.int64)

    def _starts(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Compare the starts that are marked in the tokens with the ends of documents.

        Only in the first shard of a source must the first token start a document.
        """
        if not self.name.number and not starts[:1].tolist() == [0]:
            raise Wrong(self.name.path("tokens"), "does not tell that a document starts with its first token")
        if not np.array_equal(starts[starts > 0], ends[ends < self.shard.tokens]):
            raise Wrong(self.name.path("tokens"), "has starts of documents where no document ends before")


@dataclass(frozen=True)
class _VerifyTokenizerFile:
    """Verify a file of the tokenizer."""

    directory: Path
    file: TokenizerFile
    shard: None = field(default=None)

    def __call__(self) -> str:
        name = f"{TOKENIZER_DIRECTORY}/{self.file.name}"
        try:
            if hashlib.sha256(_read(self.directory, name, self.file.size)).hexdigest() != self.file.sha256:
                raise Wrong(name, "has another SHA-256 than the card demands")
        except Wrong as wrong:
            return str(wrong)
        return ""


def verify_corpus(
    directory: Path,
    card: CorpusCard,
    workers: int | None = None,
    on_verified: OnVerified = lambda *_: None,
    start_pool: StartPool = WorkerPool,
) -> list[str]:
    """Return the faults of a corpus's files, in the card's order: one sentence for each faulty file or shard."""
    without_sources = card.model_copy(update={"sources": ()})
    tasks: list[_VerifyShard | _VerifyTokenizerFile] = [
        _VerifyTokenizerFile(directory, file) for file in card.tokenizer.files
    ]
    tasks += [
        _VerifyShard(
            directory,
            ShardName(source.name, number),
            shard,
            without_sources,
        )
        for source in card.sources
        for number, shard in enumerate(source.shards)
    ]
    places = {id(task): place for place, task in enumerate(tasks)}
    found: dict[int, str] = {}
    done, everything = 0, card.tokens * card.token_bytes
    with start_pool(min(workers or usable_cores(), len(tasks)), "run the command again") as pool:
        on_verified(0, everything)
        for task, wrong in pool.run(tasks):
            if wrong:
                found[places[id(task)]] = wrong
            shard = getattr(task, "shard", None)
            done += card.shard_bytes(shard) if shard is not None else 0
            on_verified(done, everything)
    return [found[place] for place in sorted(found)]


def _read(directory: Path, name: str, size: int) -> bytes:
    _check_size(directory, name, size)
    try:
        return (directory / name).read_bytes()
    except OSError as error:
        raise Wrong(name, f"cannot be read: {error.strerror or error}") from error


def _check_size(directory: Path, name: str, size: int) -> None:
    try:
        found = os.stat(directory / name).st_size
    except FileNotFoundError as error:
        raise Wrong(name, "is missing") from error
    except OSError as error:
        raise Wrong(name, f"cannot be read: {error.strerror or error}") from error
    if found != size:
        raise Wrong(name, f"has {found:,} bytes, and the card demands {size:,}")
