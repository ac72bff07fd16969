"""The training corpus: one array of tokens, cut into windows of `sequence_length` + 1 tokens.

Documents are packed back to back. Window i covers tokens [i·T, i·T + T], so that inputs and targets are one token apart
and nothing is padded. The last `validation_samples` windows are held out for validation. With a cache folder, the text
is tokenised once, on all cores; later starts map the tokens (`token_cache.py`) without reading all of them
(`digest_records.py`). Without one, a small corpus is in memory, and a large one in an unlinked file. `digest`
identifies tokens, tokenizer and cut. A node with another corpus would train something else under the same sample
numbers; comparing digests excludes it.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import log
from atoll.core.data_position import SampleRange
from atoll.core.disk import Bytes
from atoll.core.errors import CorpusError
from atoll.core.run_spec import RunSpec
from atoll.node.data.byte_streams import unreadable
from atoll.node.data.digest_records import DigestRecord
from atoll.node.data.documents import check_separated, document_separator, mark_starts, starts_after
from atoll.node.data.encoders import description_of
from atoll.node.data.heartbeat import heartbeat, repeated
from atoll.node.data.inputs import (
    UNIT_BYTES,
    Document,
    InputSpec,
    Plan,
    SourceReport,
    input_spec,
    plan_units,
    read_unit,
)
from atoll.node.data.sample_order import SampleOrder
from atoll.node.data.token_cache import CachedTokens, TokenCache
from atoll.node.data.token_files import TOKEN_SOURCES, bad_token, first_bad_token, map_tokens
from atoll.node.data.tokenise import OnProgress, no_progress_callback, token_dtype, token_parts
from atoll.node.data.unit_workers import tokenised_units
from atoll.node.model.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

IN_MEMORY_BYTES = 256 * 1024**2
CACHE_VERSION = 1  # of the tokens: raise it when equal text is tokenised differently
WORKERS_FROM_BYTES = 64 << 20  # of input; smaller input is tokenised in this process
BYTE_WORKERS_FROM_BYTES = 1 << 30  # the same for the byte tokenizer, which is as fast as a disk
UNITS_PER_WORKER = 4  # at least, so that all workers end at about the same time
_HASHED_TOKENS = 1 << 24  # tokens hashed at once
_COPIED_BYTES = 1 << 24

_log = log.get("data")


@dataclass(frozen=True)
class Corpus:
    """The tokens of a run, and how they are cut into windows."""

    # 1-D; unsigned and as narrow as the vocabulary allows, or of the type that a file of tokens has
    tokens: NDArray[Any]
    tokenizer: Tokenizer
    sequence_length: int
    validation_samples: int
    digest: str  # hex SHA-256
    report: SourceReport
    seed: int  # of the order of samples
    separator: int | None = None  # the token that ends documents, if the run has document masks

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
        """Ignore which samples are trained next: a local corpus has all of them."""

    def close(self) -> None:
        """Do nothing: a local corpus has no threads."""

    def windows(self, indices: Sequence[int], soon: bool = False) -> NDArray[np.int64]:
        """Return windows by number, [B, T+1], with marks at starts of documents and at non-targets (`documents.py`)."""
        length = self.sequence_length
        rows = [self.tokens[index * length : index * length + length + 1] for index in indices]
        windows_BT = np.stack(rows).astype(np.int64)
        return (
            windows_BT if self.separator is None else mark_starts(windows_BT, starts_after(windows_BT, self.separator))
        )

    def validation_windows(self) -> range:
        """Return the numbers of the held-out windows."""
        return range(self.training_samples, self.training_samples + self.validation_samples)


def load_corpus(
    spec: RunSpec,
    path: str | None = None,
    tokenizer: Tokenizer | None = None,
    on_progress: OnProgress = no_progress_callback,
    cache_path: Path | None = None,
    cpu_threads: int = 1,
) -> Corpus:
    """Read, tokenise and cut the corpus, or map it from the cache; `path` overrides the spec's.

    `tokenizer` is the run's, if the caller has already loaded it. `on_progress` is called every few seconds, sometimes
    from another thread. Raises `CorpusError`, `ConfigError`, `ChildDied`; `DataDirUnusable` for the cache folder.
    """
    section = spec.data
    where = path or section.path
    tokenizer = tokenizer or load_tokenizer(section.tokenizer)
    source, separator = input_spec(section, path), document_separator(section, tokenizer)
    if section.source in TOKEN_SOURCES:
        tokens, documents = map_tokens(section.source, where)
        report = SourceReport(files=1, documents=documents)
        digest = _digest_once(cache_path, tokens, spec, tokenizer, on_progress, checked=where)
        if separator is not None:
            check_separated(tokens, separator, where)
        return _cut(tokens, spec, where, tokenizer, digest, report)
    with heartbeat(partial(on_progress, 0)):
        plan = plan_units(source)
        wanted = plan.size_bytes // (UNITS_PER_WORKER * cpu_threads)
        if cache_path is not None and plan.size_bytes >= WORKERS_FROM_BYTES and wanted < UNIT_BYTES:
            plan = plan_units(source, wanted)
    if cache_path is None:
        report = SourceReport()
        texts = (document for unit in plan.units for document in read_unit(unit, report))
        with repeated(on_progress) as tell:
            tokens = pack(texts, tokenizer, on_progress=tell)
        digest, _ = _digest(tokens, spec, tokenizer, on_progress)
    else:
        cached, digest = _cached(TokenCache(cache_path), spec, source, plan, tokenizer, on_progress, cpu_threads)
        tokens, report = cached.tokens, cached.report
    report = _sum_of(plan.report, report)
    if left_out := report.left_out():
        _log.warning("training_text_left_out", path=where, what=left_out)
    if not report.documents:
        raise report.nothing_read(where)
    return _cut(tokens, spec, where, tokenizer, digest, report)


def _cut(
    tokens: NDArray[Any], spec: RunSpec, where: str, tokenizer: Tokenizer, digest: str, report: SourceReport
) -> Corpus:
    section = spec.data
    windows = max(0, (len(tokens) - 1) // section.sequence_length)
    if windows <= section.validation_samples:
        raise CorpusError(
            f"the training text at {where} is too small: {len(tokens):,} tokens make {windows} samples of "
            f"{section.sequence_length} tokens, of which {section.validation_samples} are held out for validation",
            "use more text, or lower [data] validation_samples or sequence_length",
        )
    return Corpus(
        tokens,
        tokenizer,
        section.sequence_length,
        section.validation_samples,
        digest,
        report,
        spec.run.seed,
        document_separator(section, tokenizer),
    )


def _sum_of(*reports: SourceReport) -> SourceReport:
    total = SourceReport()
    for report in reports:
        total.add(report)
    return total


# --- with a cache ---------------------------------------------------------------------------------------


def _cached(
    cache: TokenCache,
    spec: RunSpec,
    source: InputSpec,
    plan: Plan,
    tokenizer: Tokenizer,
    on_progress: OnProgress,
    cpu_threads: int,
) -> tuple[CachedTokens, str]:
    """Map the tokens and return them with the corpus's digest. A file with a wrong checksum is built again."""
    key = cache_key(source, plan, tokenizer)

    def build(write: Callable[[Bytes], object], folder: Path) -> SourceReport:
        report = _tokenise_all(plan, tokenizer, write, folder, on_progress, cpu_threads)
        if cache_key(source, plan, tokenizer) != key:
            raise CorpusError(f"{source.path} changed while it was read", "start again when nothing writes there")
        return report

    dtype = token_dtype(tokenizer.vocabulary)
    for _ in range(2):
        cached = cache.open_or_build(key, dtype, build, on_progress)
        digest = _digest_once(cache.folder, cached.tokens, spec, tokenizer, on_progress, checksum=cached.checksum)
        if digest:
            return cached, digest
        _log.warning("cached_tokens_damaged", path=source.path)
        cache.forget(key)
    raise CorpusError(
        "the file of tokens reads differently from how it was written", "check this machine's disk and memory"
    )


def cache_key(source: InputSpec, plan: Plan, tokenizer: Tokenizer) -> str:
    """Hash of everything that the tokens depend on: input files, by path, size, time and inode, and the tokenizer.

    Raises `CorpusError`.
    """
    files = []
    for file in plan.files:
        try:
            found = os.stat(file)
        except OSError as error:
            raise unreadable(file, error) from error
        files.append((os.path.abspath(file), found.st_size, found.st_mtime_ns, found.st_ino))
    named = {key: value for key, value in asdict(source).items() if value or key not in ("messages", "pair")}
    parts = (CACHE_VERSION, named, plan.fingerprint, files, tokenizer.name, description_of(tokenizer))
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _tokenise_all(
    plan: Plan,
    tokenizer: Tokenizer,
    write: Callable[[Bytes], object],
    folder: Path,
    on_progress: OnProgress,
    cpu_threads: int,
) -> SourceReport:
    report = SourceReport()
    few = BYTE_WORKERS_FROM_BYTES if isinstance(tokenizer, ByteTokenizer) else WORKERS_FROM_BYTES
    if plan.size_bytes < few or cpu_threads < 2:
        documents = (document for unit in plan.units for document in read_unit(unit, report))
        with repeated(on_progress) as tell:
            for part, _ in token_parts(documents, tokenizer, tell):
                write(part.data.cast("B"))
    else:
        for path, unit_report in tokenised_units(plan.units, tokenizer, folder, cpu_threads, on_progress):
            with path.open("rb") as file:
                while block := file.read(_COPIED_BYTES):
                    write(block)
            path.unlink()
            report.add(unit_report)
    if not report.documents:
        raise _sum_of(plan.report, report).nothing_read(plan.where)
    return report


# --- without a cache ------------------------------------------------------------------------------------


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
    try:
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
    except OSError as error:  # errors of reading were converted by the readers
        raise CorpusError(
            f"cannot write tokens to {tempfile.gettempdir()}: {error.strerror or error}",
            "free space there, or set TMPDIR to a folder with more",
        ) from error


def _digest_once(
    folder: Path | None,
    tokens: NDArray[Any],
    spec: RunSpec,
    tokenizer: Tokenizer,
    on_progress: OnProgress,
    checksum: int | None = None,
    checked: str = "",
) -> str:
    """Return the corpus's digest: from a record in `folder` if this file was read before, or by reading all of it.

    `checksum`: the CRC-32 that the tokens should have, if it is known. Returns an empty string if the tokens have
    another checksum.
    """
    record = None if folder is None else DigestRecord(folder, tokens, _named(spec, tokenizer), own=checksum is not None)
    if record is not None and (recorded := record.read()) is not None:
        return recorded
    digest, found = _digest(tokens, spec, tokenizer, on_progress, checked)
    if checksum is not None and found != checksum:
        return ""
    if record is not None:
        record.write(digest)
    return digest


def _named(spec: RunSpec, tokenizer: Tokenizer) -> bytes:
    named = {
        "tokenizer": tokenizer.name,
        "vocabulary": tokenizer.vocabulary,
        "sequence_length": spec.data.sequence_length,
        "validation_samples": spec.data.validation_samples,
    }
    return json.dumps(named, sort_keys=True).encode()


def _digest(
    tokens: NDArray[Any], spec: RunSpec, tokenizer: Tokenizer, on_progress: OnProgress, checked: str = ""
) -> tuple[str, int]:
    """Return the corpus's digest, and the CRC-32 of the tokens.

    Equal tokens give equal digests, whatever the type of the array. Raises `CorpusError` for a token beyond the
    vocabulary in the file `checked`.
    """
    digest = hashlib.sha256(_named(spec, tokenizer) + b"\n")
    checksum, dtype = 0, token_dtype(tokenizer.vocabulary)
    for start in range(0, len(tokens), _HASHED_TOKENS):
        block = tokens[start : start + _HASHED_TOKENS]
        if checked and (bad := first_bad_token(block, tokenizer.vocabulary)) is not None:
            raise bad_token(checked, start + bad, int(block[bad]), tokenizer.name, tokenizer.vocabulary)
        data = np.ascontiguousarray(block, dtype=dtype).view(np.uint8).data
        digest.update(data)
        checksum = zlib.crc32(data, checksum)
        on_progress(len(tokens))
    return digest.hexdigest(), checksum
