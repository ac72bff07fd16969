"""The driver of mutation tests finds what tests do not see, and takes nothing for killed that survives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants.generate import lines_of, mutants_of
from mutants.install import changed

from atoll.core.quorum import Electorate

ROOT = Path(__file__).parents[3]
QUORUM, PROMISES = "core/atoll/core/quorum.py", "node/atoll/node/rounds/promises.py"

PROGRAM = """
import sys, pytest
from mutants.runner import MutantRunner
runner = MutantRunner(sys.argv[1], only=sys.argv[2])
pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[3:]], plugins=[runner])
print("verdicts:", *sorted({str(verdict) for _, verdict in runner.verdicts}))
"""


def verdicts(path: str, only: str, *tests: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, only, *tests],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": "tests:.", "PATH": "/usr/bin:/bin"},
        check=True,
        timeout=600,
    )
    return ran.stdout.strip().splitlines()[-1]


def test_functions_properties_and_constants_are_mutated_and_messages_are_not():
    names = [mutant.name for mutant in mutants_of(QUORUM)]
    assert "MAX_SEATS: MAX_SEATS = 7 → MAX_SEATS = 8" in names
    assert any(name.startswith("Electorate.decides:") and "> len" in name and ">= len" in name for name in names)
    assert any(name.startswith("LastVote.payload:") for name in names)  # a cached property
    assert not any("somebody who is present" in name for name in names)  # a message
    assert any(mutant.where == "Promises.in_doubt" for mutant in mutants_of(PROMISES))
    assert all(mutant.line in lines_of(QUORUM).get(mutant.where, [mutant.line]) for mutant in mutants_of(QUORUM))


def test_a_change_takes_the_place_of_the_loaded_code_for_a_while():
    electorate = Electorate(frozenset("abc"))
    with changed(QUORUM, "Electorate.decides", "2 * len(self.members.intersection(votes))", "9"):
        assert electorate.decides([])
    assert not electorate.decides([])
    with pytest.raises(AssertionError, match="any more"), changed(QUORUM, "Electorate.decides", "no such text", ""):
        pass


@pytest.mark.timeout(900)  # it starts pytest
@pytest.mark.parametrize(
    ("path", "only", "test", "verdict"),
    [
        (QUORUM, "MAX_SEATS: ", "tests/unit/core/test_quorum.py", "killed"),
        (QUORUM, "MAX_SEATS: ", "tests/unit/core/test_fragments.py", "survived"),
        (QUORUM, "must_propose", "tests/unit/core/test_fragments.py", "unreached"),
    ],
)
def test_a_mutant_is_killed_only_by_a_test_that_sees_it(path: str, only: str, test: str, verdict: str):
    assert verdicts(path, only, test) == f"verdicts: {verdict}"
