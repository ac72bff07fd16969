"""Files that hold tokens instead of text: `.npy`, and Megatron's `.bin` with its `.idx`. They are mapped, not copied.

The index of Megatron (`megatron.core.datasets.indexed_dataset` in NVIDIA's documentation) is little-endian: 9 bytes
`MMIDIDX\\0\\0`, u64 version 1, u8 code of the token type, u64 number of sequences S, u64 number of document bounds D;
then S lengths (i32, in tokens), S positions (i64, in bytes of the `.bin`), and D numbers of sequences (i64) at which
documents begin, the last of which is S.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import CorpusError
from atoll.node.data.byte_streams import PATH_REMEDY, unreadable

TOKEN_SOURCES = ("npy", "megatron")
_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}  # by code
_REMEDY = "write the file again with the program that made it"


def map_tokens(source: str, path: str) -> tuple[NDArray[Any], int]:
    """Map the tokens of one file, 1-D of any integer type, and count its documents (1 if the file does not say).

    `path` is the file, or a directory that holds one. For `megatron` it is the `.bin`, the `.idx` or their common name.
    Raises `CorpusError`.
    """
    try:
        tokens, documents = (_npy if source == "npy" else _megatron)(_one_file(source, path))
    except OSError as error:
        raise unreadable(path, error) from error
    if tokens.dtype.kind not in "iu":
        raise CorpusError(f"{path} holds {tokens.dtype.name}, not whole numbers", "write tokens as integers")
    return tokens, documents


def first_bad_token(tokens: NDArray[Any], vocabulary: int) -> int | None:
    """Return the position of the first token that is negative or beyond the vocabulary."""
    if len(tokens) and (int(tokens.max()) >= vocabulary or int(tokens.min()) < 0):
        return int(np.argmax((tokens >= vocabulary) | (tokens < 0)))
    return None


def bad_token(path: str, position: int, token: int, tokenizer: str, vocabulary: int) -> CorpusError:
    """Build the error for a token that the tokenizer does not have."""
    return CorpusError(
        f"token {position:,} of {path} is {token}, but tokenizer {tokenizer!r} has {vocabulary} tokens",
        "set [data] tokenizer to the tokenizer that made this file",
    )


def _one_file(source: str, path: str) -> Path:
    root, suffix = Path(path).expanduser(), ".npy" if source == "npy" else ".idx"
    if root.is_dir():
        found = sorted(file for file in root.iterdir() if file.suffix == suffix and not file.name.startswith("."))
        if len(found) > 1:
            raise CorpusError(
                f"{path} holds {len(found)} {suffix} files; a corpus of tokens is one file", "name one, or join them"
            )
        if found:
            return found[0]
    file = root
    if source == "megatron":
        file = root.with_suffix(".idx") if root.suffix in (".bin", ".idx") else Path(f"{root}.idx")
    if not file.is_file():
        raise CorpusError(f"no tokens at {path}: there is no file {file}", PATH_REMEDY)
    return file


def _npy(file: Path) -> tuple[NDArray[Any], int]:
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise CorpusError(f"{file} cannot be read as .npy: {str(error).splitlines()[0]}", _REMEDY) from error
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1:
        raise CorpusError(f"{file} is not an array with one dimension", "write all tokens in a row (array.ravel())")
    return tokens, 1


def _megatron(index: Path) -> tuple[NDArray[Any], int]:
    data = index.with_suffix(".bin")
    with index.open("rb") as file:
        header = file.read(_HEADER.size).ljust(_HEADER.size, b"\xff")
    magic, version, code, sequences, bounds = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _TYPES:
        raise CorpusError(f"{index} is not a Megatron index of version 1", _REMEDY)
    size = _HEADER.size + sequences * 12 + bounds * 8
    # a longer index is valid: modes of multimodal data follow
    if index.stat().st_size < size or not sequences or not bounds:
        raise CorpusError(f"{index} is cut short, or names no sequence", _REMEDY)
    kind = np.dtype(_TYPES[code])
    rest = np.memmap(index, dtype=np.uint8, mode="r", offset=_HEADER.size)
    lengths = rest[: sequences * 4].view("<i4")
    positions = rest[sequences * 4 : sequences * 12].view("<i8")
    ends = np.cumsum(lengths, dtype=np.int64)
    if (lengths < 0).any() or positions[0] or (positions[1:] != ends[:-1] * kind.itemsize).any():
        raise CorpusError(f"the sequences of {index} do not follow each other in {data.name}", _REMEDY)
    found = data.stat().st_size
    if found != int(ends[-1]) * kind.itemsize or not found:
        raise CorpusError(f"{data} has {found:,} bytes; its index says {int(ends[-1]) * kind.itemsize:,}", _REMEDY)
    return np.memmap(data, dtype=kind, mode="r"), max(1, bounds - 1)
