"""A line that cannot be written is lost; the program goes on."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
from atoll.core import log
log.configure("info", sys.argv[1], node="ann")
for number in range(1000):
    log.get("test").info("something happened", number=number, text="x" * 100)
import logging
logging.getLogger("other").error("and this")
open(sys.argv[2], "w").write("went on")
"""


def test_a_full_disk_or_a_closed_pipe_behind_stderr_ends_nothing(tmp_path) -> None:
    for output in ("console", "json"):
        with open("/dev/full", "w") as full:
            witness = tmp_path / f"full-{output}"
            subprocess.run([sys.executable, "-c", PROGRAM, output, witness], stderr=full, timeout=60)
            assert witness.read_text() == "went on"
        witness = tmp_path / f"closed-{output}"
        with subprocess.Popen([sys.executable, "-c", PROGRAM, output, witness], stderr=subprocess.PIPE) as child:
            child.stderr.close()
            child.wait(60)
        assert witness.read_text() == "went on"
