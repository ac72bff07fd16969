"""`make mutants`: mutation tests of the modules that decide rounds.

For each module: how many mutants there are, how many the tests kill, and which survive that nobody accepted. Ends
with 1 when a pure module has a kill rate below the least one, or when an accepted survivor does not survive any more.
A mutant that runs out of time counts as killed. The kill rate leaves out accepted survivors (accepted.toml).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from benchmarks.common import Report

from mutants.install import ROOT
from mutants.runner import MutantRunner, Verdict

LEAST_RATE = 0.95
ACCEPTED = Path(__file__).with_name("accepted.toml")
ROUNDS = "tests/unit/rounds"
SCHEDULES = f"{ROUNDS}/test_few_schedules.py"
SIMULATED = (SCHEDULES, f"{ROUNDS}/test_witnesses.py", f"{ROUNDS}/test_machine.py")


@dataclass(frozen=True)
class Target:
    """A module, and the tests that it is judged by."""

    path: str
    tests: tuple[str, ...]
    without: str = ""  # tests whose names hold this are left out: they take too long
    pure: bool = True  # the least rate applies; others are simulated only, which takes an hour

    @property
    def name(self) -> str:
        """As it is called on the command line."""
        return Path(self.path).stem


def _rounds(name: str, *tests: str, without: str = "", pure: bool = True) -> Target:
    simulated = (SCHEDULES,) if pure else SIMULATED
    return Target(f"node/atoll/node/rounds/{name}.py", (*tests, *simulated), without, pure)


TARGETS = (
    Target("core/atoll/core/quorum.py", ("tests/unit/core/test_quorum.py", SCHEDULES)),
    _rounds("promises", f"{ROUNDS}/test_promises.py", f"{ROUNDS}/test_marks.py", without="others_go_on"),
    _rounds("earlier_attempts", f"{ROUNDS}/test_earlier_attempts.py"),
    _rounds("settlement", f"{ROUNDS}/test_settlement.py", without="thousand"),
    _rounds("snapshot_ledger", f"{ROUNDS}/test_snapshot_ledger.py"),
    _rounds("member_answers", f"{ROUNDS}/test_member_answers.py"),
    _rounds(
        "decide",
        f"{ROUNDS}/test_starts.py",
        f"{ROUNDS}/test_results.py",
        f"{ROUNDS}/test_positions.py",
        f"{ROUNDS}/test_nobodys_parts.py",
        f"{ROUNDS}/test_samples.py",
    ),
    Target(
        "coordinator/atoll/coordinator/rounds/coordinator_seat.py",
        tuple(f"tests/unit/coordinator/test_{name}.py" for name in ("seat_rules", "coordinator_seat", "rate_limits")),
    ),
    _rounds("follower", pure=False),
    _rounds("opener", pure=False),
    _rounds("machine", pure=False),
)


def main() -> int:
    """Run the chosen modules; the status for the shell."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    names = [target.name for target in TARGETS]
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(names)}; default: the pure ones")
    parser.add_argument("--sample", type=int, help="so many mutants of each module, chosen by a fixed seed")
    parser.add_argument("--only", default="", help="mutants whose name holds this text")
    parser.add_argument("--quick", action="store_true", help="without simulated runs: more mutants survive")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/mutants.json")
    options = parser.parse_args()
    if unknown := set(options.modules) - set(names):
        parser.error(f"no such module: {', '.join(sorted(unknown))}")
    os.chdir(ROOT)
    report, short = Report("mutants"), 0
    for target in TARGETS:
        if target.name in options.modules or (target.pure and not options.modules):
            short += not _judge(target, report, options)
    report.finish("Survivors that were accepted are in tests/mutants/accepted.toml.", keep=options.write)
    return 1 if short else 0


def _judge(target: Target, report: Report, options: argparse.Namespace) -> bool:
    began = time.monotonic()
    runner = MutantRunner(target.path, options.sample, options.only)
    tests = [path for path in target.tests if not options.quick or path not in SIMULATED]
    chosen = ["-m", "not soak", *(["-k", f"not {target.without}"] if target.without else []), *tests]
    status = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen], plugins=[runner])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit(f"{target.path}: pytest ended with {status}")
    accepted = {entry["mutant"] for entry in _accepted(target)}
    lived = [mutant for mutant, verdict in runner.verdicts if verdict in (Verdict.SURVIVED, Verdict.UNREACHED)]
    counts = {verdict: sum(each is verdict for _, each in runner.verdicts) for verdict in Verdict}
    excused = sum(mutant.name in accepted for mutant in lived)
    killed = counts[Verdict.KILLED] + counts[Verdict.TIMED_OUT]
    due = len(runner.verdicts) - excused
    rate = killed / due if due else 1.0
    report.cell(
        module=target.path,
        generated=len(runner.verdicts),
        killed=killed,
        timed_out=counts[Verdict.TIMED_OUT],
        survived=len(lived),
        accepted=excused,
        kill_rate=rate,
        seconds=time.monotonic() - began,
    )
    stale = set() if options.sample is not None or options.only else accepted - {mutant.name for mutant in lived}
    for name in sorted(stale):
        print(f"{target.path}: accepted, but it does not survive: {name}")
    if target.pure:
        report.accept(target.path, target=f"≥ {LEAST_RATE}", value=rate, holds=rate >= LEAST_RATE)
    return not stale and (rate >= LEAST_RATE or not target.pure)


def _accepted(target: Target) -> list[dict[str, str]]:
    listed = tomllib.loads(ACCEPTED.read_text()) if ACCEPTED.exists() else {}
    entries: list[dict[str, str]] = listed.get(target.name, [])
    return entries


if __name__ == "__main__":
    sys.exit(main())
