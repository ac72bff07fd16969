"""Rounds whose checkpoints this node keeps because forks begin with them, stored on disk.

The list is on disk so that a node that starts while the coordinator is down still keeps them. The file is JSON and a
line with its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from atoll.core import log
from atoll.core.files import write_atomic

MAX_KEPT_ROUNDS = 4  # the coordinator names no more
_FILE = "kept-rounds"

_log = log.get("checkpoint")


class KeptRounds:
    """The rounds that the coordinator named last."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / _FILE
        self.rounds = self._load()
        self._saved = self.rounds

    def replace(self, rounds: tuple[int, ...]) -> None:
        """Keep the first `MAX_KEPT_ROUNDS` of these rounds, and write them if they changed.

        Raises `DataDirUnusable`.
        """
        self.rounds = rounds[:MAX_KEPT_ROUNDS]  # valid for this process even if the write fails
        if self.rounds == self._saved:
            return
        body = json.dumps(self.rounds).encode()
        write_atomic(self._path, body + b"\n" + hashlib.sha256(body).hexdigest().encode())
        self._saved = self.rounds

    def _load(self) -> tuple[int, ...]:
        try:
            body, _, checksum = self._path.read_bytes().rpartition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != checksum:
                raise ValueError("the file does not match its checksum")
            return tuple(map(int, json.loads(body)))[:MAX_KEPT_ROUNDS]
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
            _log.warning("kept rounds cannot be read; the coordinator sends them again", reason=str(error))
            return ()
