"""The corpus as one array of tokens, cut into samples of `sequence_length` + 1 tokens.

Documents are packed back to back; sample i covers tokens [i·T, i·T + T], so that inputs and targets are one token
apart and nothing is padded. The last `validation_samples` windows are held out. Small corpora stand in memory,
large ones in an unlinked file behind `np.memmap`. `digest` names tokens, tokenizer and cut: a node with another
corpus would train something else under the same sample numbers, and is refused by comparing digests.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import CorpusError
from atoll.core.run_spec import RunSpec
from atoll.node.model.tokenizer import Tokenizer, load_tokenizer
from atoll.node.training.text_sources import SourceReport, documents

IN_MEMORY_BYTES = 256 * 1024**2
_HASHED_TOKENS = 1 << 24  # at once

OnProgress = Callable[[int], object]  # is told whenever some work is done, with how many tokens there are so far


@dataclass(frozen=True)
class Corpus:
    """Tokens and how they are cut."""

    tokens: NDArray[Any]  # 1-D, unsigned, as narrow as the vocabulary allows
    tokenizer: Tokenizer
    sequence_length: int
    validation_samples: int
    digest: str  # hex SHA-256
    report: SourceReport

    @property
    def training_samples(self) -> int:
        """Windows that are trained on: `0 … training_samples - 1`."""
        return (len(self.tokens) - 1) // self.sequence_length - self.validation_samples

    def windows(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Windows by number, [B, T+1]."""
        length = self.sequence_length
        rows = [self.tokens[index * length : index * length + length + 1] for index in indices]
        return np.stack(rows).astype(np.int64)

    def validation_windows(self) -> range:
        """The numbers of the held-out windows."""
        return range(self.training_samples, self.training_samples + self.validation_samples)


def no_progress_callback(_: int) -> None:
    """Nobody asks how many tokens there are so far."""


def load_corpus(
    spec: RunSpec,
    path: str | None = None,
    tokenizer: Tokenizer | None = None,
    on_progress: OnProgress = no_progress_callback,
) -> Corpus:
    """Read, tokenise and cut the corpus; `path` overrides the spec's. Raises `CorpusError`, `ConfigError`.

    `tokenizer`: the run's, when it was loaded already.
    """
    section, report = spec.data, SourceReport()
    where = path or section.path
    tokenizer = tokenizer or load_tokenizer(section.tokenizer)
    tokens = pack(documents(section, where, report), tokenizer, on_progress=on_progress)
    windows = max(0, (len(tokens) - 1) // section.sequence_length)
    if windows <= section.validation_samples:
        raise CorpusError(
            f"the training text at {where} is empty"
            if not len(tokens)
            else f"the training text at {where} is too small: {len(tokens):,} tokens make {windows} samples of "
            f"{section.sequence_length}, and {section.validation_samples} of them are held out",
            "give more text, or lower [data] validation_samples or sequence_length",
        )
    digest = _digest(tokens, spec, tokenizer, on_progress)
    return Corpus(tokens, tokenizer, section.sequence_length, section.validation_samples, digest, report)


def pack(
    texts: Iterable[bytes],
    tokenizer: Tokenizer,
    in_memory_bytes: int = IN_MEMORY_BYTES,
    on_progress: OnProgress = no_progress_callback,
) -> NDArray[Any]:
    """All documents as one token array, each followed by the tokenizer's separator; empty ones left out."""
    dtype = token_dtype(tokenizer.vocabulary)
    separator = np.asarray(tokenizer.separator, dtype=dtype).tobytes()
    parts: list[bytes] = []
    size = 0
    file = None
    for text in texts:
        if not text:
            continue
        parts += (tokenizer.encode(text).astype(dtype, copy=False).tobytes(), separator)
        size += len(parts[-2]) + len(separator)
        if file is None and size > in_memory_bytes:
            file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the map over it)
        if file is not None:
            file.writelines(parts)
            parts.clear()
        on_progress(size // dtype.itemsize)
    if file is None:
        return np.frombuffer(b"".join(parts), dtype=dtype)
    with file:  # unlinked from the start; the map keeps its space alive
        file.flush()
        return np.memmap(file, dtype=dtype, mode="r")


def token_dtype(vocabulary: int) -> np.dtype[Any]:
    """The narrowest little-endian unsigned integer that holds every token."""
    return np.dtype("u1" if vocabulary <= 1 << 8 else "<u2" if vocabulary <= 1 << 16 else "<u4")


def _digest(tokens: NDArray[Any], spec: RunSpec, tokenizer: Tokenizer, on_progress: OnProgress) -> str:
    named = {
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.vocabulary,
        "sequence_length": spec.data.sequence_length,
        "validation_samples": spec.data.validation_samples,
    }
    digest = hashlib.sha256(json.dumps(named, sort_keys=True).encode() + b"\n")
    for start in range(0, len(tokens), _HASHED_TOKENS):
        digest.update(np.ascontiguousarray(tokens[start : start + _HASHED_TOKENS]).view(np.uint8).data)
        on_progress(len(tokens))
    return digest.hexdigest()
