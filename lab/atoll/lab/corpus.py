"""Default corpus of demo and lab: the source files of the Python standard library, which every machine has."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 8 * 1024 * 1024
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "config"}


def write_python_corpus(path: Path, max_bytes: int = MAX_BYTES) -> int:
    """Concatenate the library's sources in a fixed order into `path`; return the number of bytes written."""
    texts = list(_python_texts(max_bytes))
    path.write_text("".join(texts), encoding="utf-8")
    return sum(len(text.encode()) for text in texts)


def write_python_documents(path: Path, max_bytes: int = MAX_BYTES) -> None:
    """Write the library's sources as JSON lines, one document each."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in _python_texts(max_bytes)), encoding="utf-8")


def _python_texts(max_bytes: int) -> Iterator[str]:
    """Yield source files until they have `max_bytes`; first `pydoc_data/topics.py`, the language reference as text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(
        (source for source in library.rglob("*.py") if not _LEFT_OUT & set(source.relative_to(library).parts)),
        key=lambda source: (source.name != "topics.py", source.relative_to(library).as_posix()),
    )
    written = 0
    for source in sources:
        text = source.read_text(encoding="utf-8", errors="ignore").replace("\0", "")
        written += len(text.encode())
        yield text
        if written >= max_bytes:
            break
