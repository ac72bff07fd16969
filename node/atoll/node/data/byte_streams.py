"""Opening of input files: plain, gzip or Zstandard, always as a stream in bounded memory.

The name's suffix decides (`.gz`, `.zst`). Zstandard is read with pyarrow, which the extra `hf` installs. A compressed
file that is cut short is an error: its author wrote more than it still contains.
"""

from __future__ import annotations

import gzip
import io
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from atoll.core.errors import ConfigError, CorpusError
from atoll.node.model.tokenizer import HF_REMEDY

READ_SUFFIXES = {".gz": "gzip", ".zst": "Zstandard"}
OTHER_SUFFIXES = {".bz2": "bzip2", ".xz": "xz", ".zip": "zip", ".lz4": "LZ4", ".7z": "7-Zip", ".br": "Brotli"}
PATH_REMEDY = "check the path; if it is [data] path of a run spec, --data names your copy"
_BUFFER_BYTES = 1 << 18
_MAGIC = {
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"PAR1": "Parquet",
}


def is_compressed(path: str) -> bool:
    """Whether the name says that the file is gzip or Zstandard."""
    return os.path.splitext(path)[1].lower() in READ_SUFFIXES


def format_of(head: bytes) -> str:
    """Return the name of the compressed or binary format that a file's first bytes show; empty if none is known."""
    return next((name for magic, name in _MAGIC.items() if head.startswith(magic)), "")


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading as a stream of its uncompressed bytes.

    Raises `CorpusError` also for errors while the caller reads; `ConfigError` without the library.
    """
    suffix = os.path.splitext(path)[1].lower()
    kind = READ_SUFFIXES.get(suffix, "")
    try:
        with _open(path, kind) as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _damaged(path, kind, error) from error
    except OSError as error:
        if kind and error.errno is None:  # from the decompressor, not from the system
            raise _damaged(path, kind, error) from error
        raise unreadable(path, error) from error


def unreadable(path: str, error: OSError) -> CorpusError:
    """Convert a file system error of an input file."""
    return CorpusError(f"cannot read {path}: {error.strerror or error}", PATH_REMEDY)


def _open(path: str, kind: str) -> BinaryIO:
    if kind and not os.path.getsize(path):
        raise EOFError("it is empty")
    if kind == "gzip":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if kind == "Zstandard":
        try:
            import pyarrow
        except ImportError as error:
            raise ConfigError(f"{path} needs the pyarrow library, which reads .zst files", HF_REMEDY) from error
        stream = pyarrow.CompressedInputStream(pyarrow.OSFile(path), "zstd")
        return cast(BinaryIO, io.BufferedReader(stream, _BUFFER_BYTES))
    return open(path, "rb", buffering=_BUFFER_BYTES)


def _damaged(path: str, kind: str, error: Exception) -> CorpusError:
    return CorpusError(
        f"{path} cannot be read to its end as {kind}: it is cut short or damaged ({error})",
        f"copy or download the file again, and test it: {'gzip' if kind == 'gzip' else 'zstd'} -t FILE",
    )
