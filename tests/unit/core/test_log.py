"""Logs: a line that cannot be written is dropped and the program goes on; JSON lines are formatted for people."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core import log

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


def test_logging_survives_a_full_disk_and_a_closed_pipe(tmp_path) -> None:
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


def lines_of(program: str) -> list[str]:
    """What it logs, as JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return done.stderr.splitlines()


def test_json_lines_are_formatted_as_a_terminal_shows_them() -> None:
    program = """
from atoll.core import log
log.configure("info", "json", node="ann")
log.get("trainer").info("corpus_loaded", tokens=5, where="a b")
try:
    {}["nothing"]
except KeyError:
    log.get("trainer").exception("failed")
"""
    read = log.json_line_formatter(colors=False)
    plain, failed = map(read, lines_of(program))
    stamp, *words = plain.split()
    assert len(stamp) == len("12:00:00")
    assert words == ["[info", "]", "corpus_loaded", "component=trainer", "node=ann", "tokens=5", "where='a", "b'"]
    first, *trace = failed.splitlines()
    assert "failed" in first
    assert trace[0].endswith(":6 in <module>")
    assert trace[-1] == "KeyError: 'nothing'"


def test_log_text_cannot_move_the_cursor() -> None:
    line = {
        "\x1b[2J": 1,
        "event": "\x1b[2J",
        "timestamp": "2026-01-01T00:00:00Z",
        "level": "info",
        "told": "a\rb\x1b]0;c\x07",
    }
    shown = log.json_line_formatter(colors=False)(json.dumps(line))
    assert all(it.isprintable() for it in shown)


@pytest.mark.parametrize(
    "line",
    [
        {"timestamp": "2026-01-01T00:00:00Z", "level": 5},
        {"timestamp": "2026-01-01T00:00:00Z", "level": None},
        {"timestamp": "2026-01-01T00:00:00Z", "stack": 7},
        {"timestamp": "2026-01-01T00:00:00Z", "exception": ["a"]},
        {"timestamp": "0001-01-01T00:00:00+14:00"},
    ],
)
def test_a_line_with_a_foreign_form_raises_nothing(line: dict[str, object]) -> None:
    assert isinstance(log.json_line_formatter(colors=False)(json.dumps(line)), str)


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_other_lines_are_unchanged_but_for_what_controls_a_terminal(line: str) -> None:
    shown = log.json_line_formatter(colors=False)(line)
    assert len(shown) == len(line)
    for before, after in zip(line, shown, strict=True):
        kept = before.isprintable() or before in "\n\t"
        assert after == (before if kept else "\N{REPLACEMENT CHARACTER}")
