"""Digests of files of tokens that were read whole once, so that a restarted node need not read them again.

A record holds for one state of a file: its place on disk, its size and its times. A file that was written to has
another state, and is read again. Files of an owner are recorded only when nobody has written to them for a minute: the
times of a file may not change at each write. Damage of a disk that changes no time is not noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core import log
from atoll.core.files import make_private_dir, write_atomic

QUIET_SECONDS = 60.0
RECORDS = 64  # in a folder; the newest ones are kept

_log = log.get("data")


class DigestRecord:
    """The record of one file in a folder. Tokens that are not mapped from a file have no record."""

    def __init__(self, folder: Path, tokens: NDArray[Any], what: bytes, *, own: bool) -> None:
        """`what` names the use of the tokens (tokenizer and cut); `own`: only this program writes the file.

        Raises `DataDirUnusable` for the folder.
        """
        self._path = make_private_dir(folder) / "digests"
        self._key = _state(tokens, what, 0.0 if own else QUIET_SECONDS)

    def read(self) -> str | None:
        """Return the digest, if this state of the file was read before."""
        return None if self._key is None else self._all().get(self._key)

    def write(self, digest: str) -> None:
        """Remember the digest; without room for it, the file is read again at the next start."""
        if self._key is None:
            return
        others = [(key, value) for key, value in self._all().items() if key != self._key]
        newest = dict([*others, (self._key, digest)][-RECORDS:])
        try:
            write_atomic(self._path, json.dumps(newest).encode(), mode=0o600)
        except OSError as error:
            _log.warning("digests_not_kept", path=str(self._path), reason=str(error))

    def _all(self) -> Mapping[str, str]:
        try:
            found = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            _log.warning("digests_unreadable", path=str(self._path), reason=str(error))
            return {}
        items = found.items() if isinstance(found, dict) else ()
        return {key: value for key, value in items if isinstance(value, str)}


def _state(tokens: NDArray[Any], what: bytes, quiet_seconds: float) -> str | None:
    if not isinstance(tokens, np.memmap) or not isinstance(tokens.filename, (str, os.PathLike)):
        return None
    try:
        found = os.stat(tokens.filename)
    except OSError:
        return None
    if time.time() - max(found.st_mtime, found.st_ctime) < quiet_seconds:
        return None
    state = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
    cut = (tokens.dtype.str, len(tokens), tokens.offset)  # another file may have equal tokens at another offset or type
    return hashlib.sha256(repr((state, cut, what)).encode()).hexdigest()
