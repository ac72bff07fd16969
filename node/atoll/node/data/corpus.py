"""The training corpus: one array of tokens, cut into windows of `sequence_length` + 1 tokens.

Documents are packed back to back. Window i covers tokens [i·T, i·T + T], so that inputs and targets are one token apart
and nothing is padded. The last `validation_samples` windows are held out for validation. A small corpus is in memory, a
large one in an unlinked file behind `np.memmap`. `digest` identifies tokens, tokenizer and cut. A node with another
corpus would train something else under the same sample numbers; comparing digests excludes it.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import log
from atoll.core.data_position import SampleRange
from atoll.core.errors import CorpusError
from atoll.core.run_spec import RunSpec
from atoll.node.data.inputs import Document, SourceReport, input_spec, plan_units, read_unit
from atoll.node.data.sample_order import SampleOrder
from atoll.node.data.tokenise import OnProgress, no_progress_callback, token_dtype, token_parts
from atoll.node.model.tokenizer import Tokenizer, load_tokenizer

IN_MEMORY_BYTES = 256 * 1024**2
_HASHED_TOKENS = 1 << 24  # tokens hashed at once


@dataclass(frozen=True)
class Corpus:
    """The tokens of a run, and how they are cut into windows."""

    tokens: NDArray[Any]  # 1-D, unsigned, as narrow as the vocabulary allows
    tokenizer: Tokenizer
    sequence_length: int
    validation_samples: int
    digest: str  # hex SHA-256
    report: SourceReport
    seed: int  # of the order of samples

    @property
    def training_samples(self) -> int:
        """Number of windows to train on: `0 … training_samples - 1`."""
        return (len(self.tokens) - 1) // self.sequence_length - self.validation_samples

    @cached_property
    def _order(self) -> SampleOrder:
        return SampleOrder(self.seed, self.training_samples)

    def window(self, sample: int) -> int:
        """Return the window of sample number `sample`."""
        return self._order.window(sample)

    def follow(self, ranges: Sequence[SampleRange]) -> None:
        """Hear what is trained next. All of it is here already."""

    def close(self) -> None:
        """End nothing: no thread reads a local corpus."""

    def windows(self, indices: Sequence[int]) -> NDArray[np.int64]:
        """Return windows by number, [B, T+1]."""
        length = self.sequence_length
        rows = [self.tokens[index * length : index * length + length + 1] for index in indices]
        return np.stack(rows).astype(np.int64)

    def validation_windows(self) -> range:
        """Return the numbers of the held-out windows."""
        return range(self.training_samples, self.training_samples + self.validation_samples)


def load_corpus(
    spec: RunSpec,
    path: str | None = None,
    tokenizer: Tokenizer | None = None,
    on_progress: OnProgress = no_progress_callback,
) -> Corpus:
    """Read, tokenise and cut the corpus; `path` overrides the spec's. Raises `CorpusError`, `ConfigError`.

    `tokenizer` is the run's, if the caller has already loaded it.
    """
    section, report = spec.data, SourceReport()
    where = path or section.path
    tokenizer = tokenizer or load_tokenizer(section.tokenizer)
    plan = plan_units(input_spec(section, path))
    report.add(plan.report)
    documents = (document for unit in plan.units for document in read_unit(unit, report))
    tokens = pack(documents, tokenizer, on_progress=on_progress)
    if not report.documents:
        raise report.nothing_read(where)
    if left_out := report.left_out():
        log.get("data").warning("training_text_left_out", what=left_out, path=where)
    windows = max(0, (len(tokens) - 1) // section.sequence_length)
    if windows <= section.validation_samples:
        raise CorpusError(
            f"the training text at {where} is too small: {len(tokens):,} tokens make {windows} samples of "
            f"{section.sequence_length} tokens, of which {section.validation_samples} are held out for validation",
            "use more text, or lower [data] validation_samples or sequence_length",
        )
    digest = _digest(tokens, spec, tokenizer, on_progress)
    return Corpus(tokens, tokenizer, section.sequence_length, section.validation_samples, digest, report, spec.run.seed)


def pack(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    in_memory_bytes: int = IN_MEMORY_BYTES,
    on_progress: OnProgress = no_progress_callback,
) -> NDArray[Any]:
    """Pack all documents into one token array, each followed by the separator; empty documents are left out."""
    dtype = token_dtype(tokenizer.vocabulary)
    parts: list[bytes] = []
    size = 0
    file = None
    for part, _ in token_parts(documents, tokenizer, on_progress):
        parts.append(part.tobytes())
        size += len(parts[-1])
        if file is None and size > in_memory_bytes:
            file = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the map over it)
        if file is not None:
            file.writelines(parts)
            parts.clear()
    if file is None:
        return np.frombuffer(b"".join(parts), dtype=dtype)
    with file:  # unlinked from the start; the map keeps its space alive
        file.flush()
        return np.memmap(file, dtype=dtype, mode="r")


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
