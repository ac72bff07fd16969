"""Readers of input files: each yields the texts or rows of one piece of an input, UTF-8, in bounded memory.

`row_values.py` makes documents of rows. Lines that violate the format are errors, or only counted with `strict=False`.
"""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO, Protocol

from atoll.core.errors import ConfigError, CorpusError
from atoll.node.data.byte_streams import PATH_REMEDY, format_of, is_compressed, opened, unreadable
from atoll.node.data.row_values import Bad, Row, plain_name, refuse
from atoll.node.data.source_report import SourceReport, iconv
from atoll.node.model.tokenizer import HF_REMEDY

LONG_TEXT_BYTES = 1 << 20  # a longer text file is a `LongText`
MAX_LINE_BYTES = 1 << 28  # of JSONL: one document
_CHUNK_BYTES = 1 << 18
_ROWS = 256  # read at once; rows of training text usually have some kilobytes
_FIELD_REMEDY = "check [data] field in the run spec"


@dataclass(frozen=True)
class Piece:
    """A part of one file, or of a data set: bytes of a JSONL file, row groups of Parquet, rows of a data set."""

    path: str
    start: int
    stop: int
    size_bytes: int


@dataclass(frozen=True)
class LongText:
    """A text file of more than `LONG_TEXT_BYTES` as one document. The whole file was checked to be UTF-8."""

    path: str

    def chunks(self) -> Iterator[bytes]:
        """Yield the text in parts of at most 256 KiB, each whole UTF-8 characters. Raises `CorpusError`."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        with opened(self.path) as file:
            for block in _blocks(file):
                try:
                    text = decoder.decode(block)
                except UnicodeDecodeError as error:
                    raise CorpusError(f"{self.path} changed while it was read", "start again") from error
                if text:
                    yield text.encode()


Document = bytes | LongText


class Rows(Protocol):
    """The part of the interface of `datasets.load_dataset`'s result that is used here."""

    column_names: list[str]

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> dict[str, list[Any]]: ...

    def select_columns(self, names: list[str]) -> Rows: ...


# --- text -----------------------------------------------------------------------------------------------


def read_text(piece: Piece, several: bool, report: SourceReport) -> Iterator[Document]:
    """Yield the file as one document. If the input has several files, one that is not text is counted and left out."""
    report.files += 1
    with opened(piece.path) as file:
        data = file.read(LONG_TEXT_BYTES + 1)
        is_long = len(data) > LONG_TEXT_BYTES
        why = _why_not_text(data, file)
    if why and several:
        report.skip_file(piece.path, why)
    elif why:
        raise CorpusError(
            f"{piece.path} is not text: {why}",
            f"convert it to UTF-8 ({iconv(why)}), or set [data] source to the file's format",
        )
    elif data:
        report.documents += 1
        yield LongText(piece.path) if is_long else data


def _why_not_text(head: bytes, rest: BinaryIO) -> str:
    """Return why a file is not UTF-8 text without NUL bytes; empty if it is."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is UTF-16, not UTF-8"
    if name := format_of(head):
        return f"it is {name} data"
    decoder, done, block = codecs.getincrementaldecoder("utf-8")(), 0, head
    while True:
        if b"\0" in block:
            return f"it contains the byte 0, as binary files do (at byte {done + block.index(0):,})"
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            return f"it contains bytes that are not UTF-8 (at byte {done - pending + error.start:,})"
        if not block:
            return ""
        done += len(block)
        block = rest.read(_CHUNK_BYTES)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_CHUNK_BYTES):
        yield block


# --- JSON Lines -----------------------------------------------------------------------------------------


def read_jsonl(piece: Piece, fields: Sequence[str], report: SourceReport, strict: bool) -> Iterator[Row]:
    """Yield the values of the lines that start in [start, stop) of the file's uncompressed bytes."""
    if not piece.start:
        report.files += 1
    for offset, number, line in _lines(piece):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            refuse(report, strict, partial(_bad_line, piece.path, offset, number, line))
        elif not (missing := [field for field in fields if field not in row]):
            yield Row(tuple(row[field] for field in fields), partial(_place, piece.path, offset, number))
        elif strict:
            keys = ", ".join(repr(key) for key in list(row)[:5]) or "none"
            raise CorpusError(
                f"{_place(piece.path, offset, number)} has no text under {missing[0]!r}; its keys are: {keys}",
                _FIELD_REMEDY,
            )
        else:
            report.skipped_rows += 1


def _lines(piece: Piece) -> Iterator[tuple[int, int, bytes]]:
    """Yield the offset, the number counted from the piece's start, and the bytes of each line that is not blank."""
    with opened(piece.path) as file:
        offset, number = piece.start, 0
        if piece.start:
            file.seek(piece.start - 1)
            if file.read(1) != b"\n":  # the line belongs to the previous piece
                while line := file.readline(_CHUNK_BYTES):
                    offset += len(line)
                    if line.endswith(b"\n"):
                        break
        while (is_compressed(piece.path) or offset < piece.stop) and (line := file.readline(MAX_LINE_BYTES + 1)):
            if len(line) > MAX_LINE_BYTES:
                raise CorpusError(
                    f"{_place(piece.path, offset, number + 1)} is longer than {MAX_LINE_BYTES >> 20} MiB",
                    "split the document, or set [data] source to the file's format",
                )
            for part in line.splitlines() if b"\r" in line else (line,):
                number += 1
                if part.strip():
                    yield offset, number if not piece.start else 0, part
            offset += len(line)


def _place(path: str, offset: int, number: int) -> str:
    """Return the name of a line for messages; count the lines before it if its number is unknown (0)."""
    if not number:
        number, left = 1, offset
        with opened(path) as file:
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                number += block.count(b"\n")
                left -= len(block)
    return f"line {number} of {path}"


def _bad_line(path: str, offset: int, number: int, line: bytes) -> Bad:
    """Describe why a line is no JSON object: part of an array, compressed, not UTF-8, cut, or another value."""
    with opened(path) as file:
        head = file.read(4096)
    if name := format_of(head):
        fits = {"gzip": ".gz", "Zstandard": ".zst"}.get(name, "")
        remedy = f"rename it to end in {fits}" if fits else "decompress it, or set [data] source to its format"
        return Bad(path, f"is {name} data, not lines of JSON, and its name does not say so", remedy)
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return Bad(path, "is UTF-16, not UTF-8", "convert it: iconv -f UTF-16 -t UTF-8")
    if head.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        return Bad(
            path,
            "is a JSON array; JSON Lines has one object a line, without brackets around them",
            f"convert it: jq -c '.[]' {os.path.basename(path)} > converted.jsonl",
        )
    place = _place(path, offset, number)
    try:
        value = json.loads(line)
    except UnicodeDecodeError as error:
        return Bad(place, f"is not UTF-8 (at byte {error.start:,} of the line)", "convert the file to UTF-8")
    except RecursionError:
        return Bad(place, "is nested too deeply", "remove that line")
    except ValueError as error:
        return Bad(
            place,
            f"is not a whole JSON object: the line is cut or damaged ({error})",
            "repair or remove that line; if it is the last one, copy or download the file again",
        )
    return Bad(place, f"is {plain_name(value)}, not a JSON object", "write one JSON object a line")


# --- Parquet and Hugging Face data sets ------------------------------------------------------------------


def open_parquet(path: str, fields: Sequence[str]) -> Any:
    """Open a Parquet file that has the columns. Raises `CorpusError`, `ConfigError`."""
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ConfigError("Parquet files need the pyarrow library", HF_REMEDY) from error
    try:
        table = ParquetFile(path, buffer_size=1 << 20)
    except OSError as error:
        if error.errno is not None:
            raise unreadable(path, error) from error
        raise _bad_parquet(path, error) from error
    except ArrowException as error:
        raise _bad_parquet(path, error) from error
    for field in fields:
        if field not in table.schema_arrow.names:
            raise CorpusError(f"{path} has no column {field!r}", _FIELD_REMEDY)
    return table


def _bad_parquet(path: str, error: Exception) -> CorpusError:
    return CorpusError(f"{path} cannot be read as Parquet: {error}", PATH_REMEDY)


def read_parquet(piece: Piece, fields: Sequence[str], report: SourceReport) -> Iterator[Row]:
    """Yield the columns' values of the row groups [start, stop)."""
    if not piece.start:
        report.files += 1
    with open_parquet(piece.path, fields) as table:
        from pyarrow import ArrowException

        groups = range(piece.start, min(piece.stop, table.num_row_groups))
        try:
            for batch in table.iter_batches(_ROWS, list(groups), list(fields)):
                columns = [batch.column(field).to_pylist() for field in fields]
                yield from (Row(values, lambda: f"a row of {piece.path}") for values in zip(*columns, strict=True))
        except (ArrowException, OSError) as error:
            raise _bad_parquet(piece.path, error) from error


_loaded: dict[tuple[str, str | None, str], Rows] = {}  # the data set that this process loaded last


def load_rows(name: str, subset: str | None, split: str, fields: Sequence[str], again: bool) -> Rows:
    """Load a Hugging Face data set and return the columns. Raises `CorpusError`, `ConfigError`."""
    key = name, subset, split
    if again or key not in _loaded:
        _loaded.clear()
        _loaded[key] = _load(name, subset, split)
    rows = _loaded[key]
    for field in fields:
        if field not in (rows.column_names or ()):
            raise CorpusError(f"data set {name!r} has no column {field!r}", _FIELD_REMEDY)
    return rows.select_columns(list(fields))


def _load(name: str, subset: str | None, split: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(f"data set {name!r} needs the datasets library", HF_REMEDY) from error
    try:
        return load_dataset(name, subset, split=split)
    except MemoryError:
        raise
    except Exception as error:  # the readers raise unrelated exception classes
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).splitlines() or [repr(cause)])[0]
        raise CorpusError(
            f"data set {name!r} cannot be loaded: {reason}",
            "check [data] path, subset and split in the run spec, that this machine can download it, "
            "and that its files are whole and have the same columns",
        ) from error


def read_rows(rows: Rows, piece: Piece, fields: Sequence[str], report: SourceReport) -> Iterator[Row]:
    """Yield the values of the rows [start, stop) of a data set. Raises `CorpusError`."""
    if not piece.start:
        report.files += 1
    for first in range(piece.start, piece.stop, _ROWS):
        try:
            found = rows[first : min(first + _ROWS, piece.stop)]
        except (OSError, ValueError) as error:  # all errors that pyarrow raises for cut or missing files
            raise CorpusError(
                f"data set {piece.path!r} cannot be read after row {first:,}: {error}",
                "delete its copy in the cache of the datasets library, so that it is downloaded again",
            ) from error
        columns = [found[field] for field in fields]
        yield from (Row(values, lambda: f"a row of {piece.path}") for values in zip(*columns, strict=True))
