"""Process that checks a run's requirements: `python -m atoll.node.preflight.checker`, started by `start_checker.py`.

It reads one line of JSON, a `Request`, from standard input. It writes lines of JSON to standard output: `progress`,
then `found` or `error`. Its parent kills it when it ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict

from atoll.core import log
from atoll.core.errors import AtollError
from atoll.node.preflight.run_checks import Request, check_run

_PROGRESS_SECONDS = 1.0


class _Progress:
    """Writes lines, progress at most once a second; may be used by several threads."""

    def __init__(self) -> None:
        self._output = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # output that libraries print must not mix with the answer
        self._lock = threading.Lock()
        self._told = 0.0

    def tell(self, what: str, count: int) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._told < _PROGRESS_SECONDS:
                return
            self._told = now
        self.write({"progress": {"what": what, "count": count}})

    def write(self, message: dict[str, object]) -> None:
        with self._lock:
            self._output.write(json.dumps(message) + "\n")
            self._output.flush()


def main() -> None:
    """Check one request."""
    log.configure(output="json")
    progress = _Progress()
    request = Request(**json.loads(sys.stdin.readline()))
    try:
        progress.write({"found": asdict(check_run(request, progress.tell))})
    except AtollError as error:
        progress.write({"error": {"reason": error.reason, "message": str(error), "remedy": error.remedy}})


if __name__ == "__main__":
    main()
