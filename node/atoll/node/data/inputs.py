"""The training text as units: pieces of the input of about equal size, each read by one process in bounded memory.

`plan_units` lists the units of a source, and `read_unit` yields the documents of one. A unit is a group of small files,
one text file, a byte range of a JSONL file, row groups of a Parquet file, or a range of rows of a Hugging Face data
set. Directories and globs are read in the order of their sorted relative paths, so that every node with the same files
sees the same documents. A document is UTF-8 `bytes`, or a `LongText` that is read in parts.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from atoll.core.errors import CorpusError
from atoll.core.run_spec import DataSection
from atoll.node.data.byte_streams import OTHER_SUFFIXES, PATH_REMEDY, READ_SUFFIXES, is_compressed, unreadable
from atoll.node.data.readers import (
    Document,
    LongText,
    Piece,
    Rows,
    load_rows,
    open_parquet,
    read_jsonl,
    read_parquet,
    read_rows,
    read_text,
)
from atoll.node.data.row_values import Conversation, Pair, Row, conversation_of, pair_of, text_of
from atoll.node.data.source_report import SourceReport
from atoll.node.data.token_files import TOKEN_SOURCES

__all__ = ["Document", "InputSpec", "LongText", "Plan", "SourceReport", "Unit", "input_spec", "plan_units", "read_unit"]

SUFFIXES = {
    "text": frozenset({".txt", ".text", ".md", ".rst", ".py", ".tex"}),
    "jsonl": frozenset({".jsonl", ".ndjson"}),
    "parquet": frozenset({".parquet"}),
}
UNIT_BYTES = 16 << 20
# installed packages are not part of the source text
_PRUNED = frozenset({"__pycache__", "site-packages", "node_modules"})


@dataclass(frozen=True)
class InputSpec:
    """Where training text is, and in which format."""

    source: str  # text | jsonl | parquet | huggingface
    path: str
    field: str = "text"
    subset: str | None = None
    split: str = "train"
    messages: str = ""  # conversations instead of text
    pair: tuple[str, ...] = ()  # prompt and completion instead of text

    @property
    def fields(self) -> tuple[str, ...]:
        """The columns or keys of a row that make a document."""
        return self.pair or (self.messages or self.field,)

    @property
    def has_answers(self) -> bool:
        """True for conversations, and for prompts with completions."""
        return bool(self.pair or self.messages)


@dataclass(frozen=True)
class Unit:
    """A piece of the input that one process reads."""

    number: int
    name: str  # for messages
    size_bytes: int  # input bytes on disk, for progress
    spec: InputSpec
    pieces: tuple[Piece, ...]
    several: bool  # the input has several files: a file that is not text is then left out


@dataclass(frozen=True)
class Plan:
    """All units of an input, in order, and a report of input that was left out."""

    units: tuple[Unit, ...]
    where: str  # for messages
    files: tuple[str, ...]  # read by the units, in order; empty for a Hugging Face data set
    fingerprint: str = ""  # of a Hugging Face data set, computed by its library
    report: SourceReport = field(default_factory=SourceReport)

    @property
    def size_bytes(self) -> int:
        """Input bytes on disk."""
        return sum(unit.size_bytes for unit in self.units)


def input_spec(section: DataSection, path: str | None = None) -> InputSpec:
    """Return the input that a run spec names; `path` overrides the spec's."""
    return InputSpec(section.source, path or section.path, section.field, section.subset, section.split)


def plan_units(spec: InputSpec, unit_bytes: int = UNIT_BYTES) -> Plan:
    """Divide the input into units of about `unit_bytes`. Equal files give equal plans.

    Raises `CorpusError`, `ConfigError`.
    """
    report = SourceReport()
    if spec.source in TOKEN_SOURCES:
        raise CorpusError(f"{spec.path} holds tokens, not text", "set [data] source to the format of the text")
    if spec.source == "huggingface":
        rows = load_rows(spec.path, spec.subset, spec.split, spec.fields, again=True)
        return Plan(_row_units(spec, rows, unit_bytes), spec.path, (), str(getattr(rows, "_fingerprint", "")), report)
    files, several = find_files(spec.source, spec.path, report)
    try:
        sizes = [os.path.getsize(file) for file in files]
    except OSError as error:
        raise unreadable(str(error.filename or spec.path), error) from error
    pieces = [piece for file, size in zip(files, sizes, strict=True) for piece in _pieces(spec, file, size, unit_bytes)]
    return Plan(_group(spec, pieces, several, unit_bytes), spec.path, tuple(files), "", report)


def read_unit(unit: Unit, report: SourceReport, strict: bool = True) -> Iterator[Document]:
    """Yield the unit's documents in order, none of them empty, and count in `report`.

    A `strict` reader raises `CorpusError` for a line or row that violates the format; otherwise it is counted. Raises
    `CorpusError` also for files that cannot be read to their end, and `ConfigError` without the library.
    """
    if unit.spec.source == "text":
        for piece in unit.pieces:
            yield from read_text(piece, unit.several, report)
        return
    for row in _rows(unit, report, strict):
        yield from text_of(row, unit.spec.field, report, strict)


def read_examples(unit: Unit, report: SourceReport, strict: bool = True) -> Iterator[Pair | Conversation]:
    """Yield the conversations, or prompts with completions, of a unit. Raises the errors of `read_unit`."""
    spec = unit.spec
    for row in _rows(unit, report, strict):
        if spec.messages:
            yield from conversation_of(row, spec.messages, report, strict)
        else:
            yield from pair_of(row, spec.pair, report, strict)


def _rows(unit: Unit, report: SourceReport, strict: bool) -> Iterator[Row]:
    spec = unit.spec
    if spec.source == "huggingface":
        rows = load_rows(spec.path, spec.subset, spec.split, spec.fields, again=False)
    for piece in unit.pieces:
        match spec.source:
            case "jsonl":
                yield from read_jsonl(piece, spec.fields, report, strict)
            case "parquet":
                yield from read_parquet(piece, spec.fields, report)
            case _:
                yield from read_rows(rows, piece, spec.fields, report)


# --- units ----------------------------------------------------------------------------------------------


def _pieces(spec: InputSpec, file: str, size: int, unit_bytes: int) -> Iterator[Piece]:
    """Divide a file if its format allows it."""
    if spec.source == "parquet":
        yield from _row_groups(spec, file, size, unit_bytes)
    elif spec.source == "jsonl" and size > unit_bytes and not is_compressed(file):
        for start in range(0, size, unit_bytes):
            stop = min(size, start + unit_bytes)
            yield Piece(file, start, stop, stop - start)
    else:
        yield Piece(file, 0, size, size)


def _row_groups(spec: InputSpec, file: str, size: int, unit_bytes: int) -> Iterator[Piece]:
    with open_parquet(file, spec.fields) as table:
        metadata = table.metadata
        groups = metadata.num_row_groups
        sizes = [metadata.row_group(group).total_byte_size for group in range(groups)]
    per_byte = size / max(1, sum(sizes))  # bytes on disk for each byte of a row group
    start, taken = 0, 0.0
    for group, group_bytes in enumerate(sizes):
        taken += group_bytes * per_byte
        if taken >= unit_bytes or group == groups - 1:
            yield Piece(file, start, group + 1, int(taken))
            start, taken = group + 1, 0.0
    if not groups:
        yield Piece(file, 0, 0, size)


def _row_units(spec: InputSpec, rows: Rows, unit_bytes: int) -> tuple[Unit, ...]:
    count = len(rows)
    size = int(getattr(getattr(rows, "data", None), "nbytes", 0)) or count
    step = max(1, unit_bytes * count // max(1, size))
    pieces = [
        Piece(spec.path, start, min(count, start + step), size * min(step, count - start) // count)
        for start in range(0, count, step)
    ]
    return _group(spec, pieces, False, 1)


def _group(spec: InputSpec, pieces: list[Piece], several: bool, unit_bytes: int) -> tuple[Unit, ...]:
    """Join neighbouring small pieces into units of about `unit_bytes`."""
    groups: list[list[Piece]] = []
    size = 0
    for piece in pieces:
        if not groups or size + piece.size_bytes > unit_bytes:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece.size_bytes
    return tuple(
        Unit(number, _name(group), sum(piece.size_bytes for piece in group), spec, tuple(group), several)
        for number, group in enumerate(groups)
    )


def _name(pieces: list[Piece]) -> str:
    first = pieces[0]
    part = f" from {first.start:,}" if first.start else ""
    return f"{first.path}{part}" + (f" and {len(pieces) - 1} more" if len(pieces) > 1 else "")


# --- files ----------------------------------------------------------------------------------------------


def find_files(source: str, path: str, report: SourceReport) -> tuple[list[str], bool]:
    """List the files of `path` (a file, a directory or a glob), sorted, and whether it may name several.

    Files that have the right name but a format that Atoll does not read are counted. Raises `CorpusError`.
    """
    root = Path(path).expanduser()
    try:
        if root.is_file():
            return [str(root)], False
        if root.is_dir():
            which = f" with suffix {', '.join(sorted(SUFFIXES[source]))}"
            return _checked(_walk(root, source, report), path, which, report)
        matches = [match for match in sorted(glob.glob(str(root), recursive=True)) if os.path.isfile(match)]
        return _checked([str(Path(match)) for match in matches], path, "", report)
    except OSError as error:
        raise unreadable(path, error) from error


def _checked(files: list[str], path: str, which: str, report: SourceReport) -> tuple[list[str], bool]:
    if not files and report.skipped_files:
        raise report.nothing_read(path)
    if not files:
        raise CorpusError(f"no training text at {path}: there is no file{which}", PATH_REMEDY)
    return files, True


def _walk(root: Path, source: str, report: SourceReport) -> list[str]:
    """List files with `os.walk`, which does not read pruned directories, unlike `rglob` (10× faster on a standard
    library).
    """
    found: list[tuple[tuple[str, ...], str]] = []
    skipped: list[tuple[tuple[str, ...], str, str]] = []

    def unreadable_folder(error: OSError) -> None:
        path = str(error.filename)
        skipped.append((Path(path).relative_to(root).parts, path, f"cannot be read: {error.strerror or error}"))

    for directory, names, files in os.walk(root, onerror=unreadable_folder):
        names[:] = [name for name in names if name not in _PRUNED and not name.startswith(".")]
        relative = Path(directory).relative_to(root).parts
        beside = set(files)
        for name in files:
            why = _why_left_out(name, source, beside)
            if why is None:
                found.append(((*relative, name), str(Path(directory, name))))
            elif why:
                skipped.append(((*relative, name), str(Path(directory, name)), why))
    for _, file, why in sorted(skipped):
        report.files += 1
        report.skip_file(file, why)
    return [file for _, file in sorted(found)]


def _why_left_out(name: str, source: str, beside: set[str]) -> str | None:
    """Return why a file of a directory is not read: None if it is read, empty if it is no text of this source."""
    stem, suffix = os.path.splitext(name)
    suffix = suffix.lower()
    if name.startswith("."):
        return ""
    if suffix in SUFFIXES[source]:
        return None
    if source == "parquet" or os.path.splitext(stem)[1].lower() not in SUFFIXES[source]:
        return "it is one JSON value, not JSON Lines" if source == "jsonl" and suffix == ".json" else ""
    if suffix in OTHER_SUFFIXES:
        return f"Atoll does not read {OTHER_SUFFIXES[suffix]} files"
    if suffix in READ_SUFFIXES:
        return f"{stem} is beside it" if stem in beside else None
    return ""
