"""Default corpus of demo and lab: the sources of the Python standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from pathlib import Path

MAX_BYTES = 8 * 1024 * 1024
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "config"}


def write_python_corpus(path: Path, max_bytes: int = MAX_BYTES) -> int:
    """Concatenate the library's sources in a fixed order into `path`; return the number of bytes written.

    `pydoc_data/topics.py`, the language reference as text, comes first.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = sorted(
        (source for source in library.rglob("*.py") if not _LEFT_OUT & set(source.relative_to(library).parts)),
        key=lambda source: (source.name != "topics.py", source.relative_to(library).as_posix()),
    )
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for source in sources:
            text = source.read_text(encoding="utf-8", errors="ignore").replace("\0", "")
            written += len(text.encode())
            file.write(text)
            if written >= max_bytes:
                break
    return written
