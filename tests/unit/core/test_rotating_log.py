"""The log file of a daemon: bounded, and complete."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.rotating_log import RotatingLog

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from atoll.core import log
from atoll.core.rotating_log import RotatingLog
file = RotatingLog(Path(sys.argv[1]))
if sys.argv[2] == "detached":
    file.take_stderr()
log.configure("info", "console", file=file, file_only=sys.argv[2] == "detached", node="ann")
log.get("test").info("something happened", number=1)
log.get("test").debug("too much")
import logging
logging.getLogger("other").error("a library")
os.write(2, b"from C\\n")
subprocess.run([sys.executable, "-c", "import sys; print('a child', file=sys.stderr)"])
raise RuntimeError("and then a bug")
"""


@settings(max_examples=40, deadline=None)
@given(st.lists(st.text("ab\n", max_size=40), max_size=60))
def test_the_two_files_are_bounded_and_have_the_newest_text(pieces: list[str]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "daemon.log"
        log = RotatingLog(path, most_bytes=100)
        for piece in pieces:
            log.write(piece)
        log.close()
        older = path.with_name("daemon.log.1")
        files = [file.read_text() for file in (older, path) if file.exists()]
        assert all(len(text) <= 100 for text in files)
        assert "".join(pieces).endswith("".join(files))
        if not older.exists():
            assert "".join(files) == "".join(pieces)


def test_a_log_that_cannot_be_written_is_dropped(tmp_path: Path) -> None:
    RotatingLog(tmp_path / "no" / "folder").write("text")
    full = RotatingLog(Path("/dev/full"))
    full.write("text")
    full.close()


def _ran(path: Path, how: str) -> tuple[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, path, how], capture_output=True, text=True, timeout=60)
    return path.read_text(), done.stderr


def test_a_detached_process_writes_all_of_standard_error_to_its_log(tmp_path: Path) -> None:
    text, terminal = _ran(tmp_path / "daemon.log", "detached")
    assert terminal == ""
    first = json.loads(text.splitlines()[0])
    assert (first["event"], first["number"], first["node"], first["level"]) == ("something happened", 1, "ann", "info")
    for words in ("a library", "from C", "a child", "RuntimeError: and then a bug"):
        assert text.count(words) == 1
    assert "too much" not in text


def test_a_process_on_a_terminal_writes_its_lines_to_both(tmp_path: Path) -> None:
    text, terminal = _ran(tmp_path / "daemon.log", "on a terminal")
    for words in ("something happened", "a library"):
        assert (text.count(words), terminal.count(words)) == (1, 1)
    assert (tmp_path / "daemon.log").stat().st_mode & 0o777 == 0o600


CRASH = """
import os, sys
from pathlib import Path
from atoll.core.rotating_log import RotatingLog
file = RotatingLog(Path(sys.argv[1]), most_bytes=2000)
file.take_stderr()
if sys.argv[2] == "much":
    os.write(2, b"y" * 200_000)
    file.write("x" * 1900 + "\\n")
os.write(2, b"the last words\\n")
os.abort()
"""


@pytest.mark.parametrize("how", ["little", "much"])
def test_the_last_words_of_a_crash_are_in_the_log(tmp_path: Path, how: str) -> None:
    path = tmp_path / "daemon.log"
    subprocess.run([sys.executable, "-c", CRASH, path, how], timeout=60)
    assert path.read_text().endswith("the last words\n")
    assert path.stat().st_size < 10_000


def test_a_log_that_somebody_removed_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "daemon.log"
    log = RotatingLog(path)
    log.write("before\n")
    path.unlink()
    log.write("after\n")
    log.close()
    assert path.read_text() == "after\n"


DESTRUCTORS = """
import gc, sys
from pathlib import Path
from atoll.core.rotating_log import RotatingLog
file = RotatingLog(Path(sys.argv[1]), most_bytes=200)
class Told:
    def __init__(self): self.me = self
    def __del__(self): file.write("gone\\n")
gc.set_threshold(2)
for _ in range(3000):
    Told()
    file.write("line\\n")
"""


def test_a_destructor_that_logs_within_a_line_does_not_stop_the_process(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DESTRUCTORS, tmp_path / "daemon.log"], timeout=60, check=True)
