"""A pytest plugin that runs the collected tests against mutants of one module, each in a forked process.

Everything is imported once. A first child runs all tests on the code as it is, and notes which test reaches which line.
Then every mutant gets a child, which runs the tests that reach its function, those that reach its line and take the
least time first, up to the first that fails.
"""

from __future__ import annotations

import gc
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType

import coverage
import pytest

from mutants.generate import lines_of, mutants_of, unchanged
from mutants.install import Mutant, module_of

_LEAST_SECONDS, _TIMES = 15.0, 5.0  # a mutant's time limit: at least, and of what its tests take


class Verdict(StrEnum):
    """What became of a mutant."""

    KILLED = "killed"  # a test failed
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    UNREACHED = "unreached"  # no test runs its code


@dataclass
class Baseline:
    """The tests on the code as it is."""

    seconds: dict[str, float] = field(default_factory=dict)  # by test
    lines: dict[str, set[int]] = field(default_factory=dict)  # of the module, by test
    failed: list[str] = field(default_factory=list)


class MutantRunner:
    """The plugin; afterwards `verdicts` holds what became of each mutant."""

    def __init__(self, path: str, sample: int | None = None, only: str = "", tell: Callable[..., None] = print) -> None:
        """`sample`: so many mutants, chosen by a fixed seed; `only`: those whose name holds this."""
        self.verdicts: list[tuple[Mutant, Verdict]] = []
        self.baseline = Baseline()
        self._path = path
        self._module: ModuleType = module_of(path)
        mutants = [mutant for mutant in mutants_of(path) if only in mutant.name]
        if sample is not None and sample < len(mutants):
            mutants = random.Random(path).sample(mutants, sample)
        self._mutants = mutants
        self._functions = lines_of(path)
        self._tell = tell

    @pytest.hookimpl
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In place of the usual loop."""
        from hypothesis import Phase, settings  # pytest wants to see it imported first

        settings.register_profile("mutants", deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("mutants")
        gc.collect()
        gc.freeze()  # children share these pages
        self.baseline = self._run_baseline(session.items)
        if self.baseline.failed:
            raise pytest.UsageError(f"tests fail without a mutant: {', '.join(self.baseline.failed)}")
        if _in_child(lambda: self._control(session.items), self._limit(session.items)) != 0:
            raise pytest.UsageError("the tests fail in a forked process in which nothing was changed")
        for number, mutant in enumerate(self._mutants, 1):
            began = time.monotonic()
            verdict = self._verdict(mutant, session.items)
            self.verdicts.append((mutant, verdict))
            if verdict not in (Verdict.KILLED, Verdict.TIMED_OUT) or time.monotonic() - began > _LEAST_SECONDS:
                seconds = time.monotonic() - began
                self._tell(
                    f"{number}/{len(self._mutants)} {verdict} {seconds:.1f} s {mutant.path}:{mutant.line} {mutant.name}"
                )
        return True

    def _verdict(self, mutant: Mutant, items: Sequence[pytest.Item]) -> Verdict:
        chosen = self._tests_for(mutant, items)
        if not chosen:
            return Verdict.UNREACHED

        def work() -> int:
            mutant.install(self._module)
            return _first_failure(chosen)

        code = _in_child(work, self._limit(chosen))
        if code is None:
            return Verdict.TIMED_OUT
        return Verdict.SURVIVED if code == 0 else Verdict.KILLED

    def _control(self, items: Sequence[pytest.Item]) -> int:
        """Put the code as it is in its own place, and run all tests: they must pass."""
        for mutant in unchanged(self._path):
            mutant.install(self._module)
        return _first_failure(items)

    def _limit(self, items: Sequence[pytest.Item]) -> float:
        return _LEAST_SECONDS + _TIMES * sum(self.baseline.seconds[item.nodeid] for item in items)

    def _tests_for(self, mutant: Mutant, items: Sequence[pytest.Item]) -> list[pytest.Item]:
        reached, seconds = self.baseline.lines, self.baseline.seconds
        inside = self._functions.get(mutant.where)
        chosen = [item for item in items if inside is None or not reached[item.nodeid].isdisjoint(inside)]
        return sorted(chosen, key=lambda item: (mutant.line not in reached[item.nodeid], seconds[item.nodeid]))

    def _run_baseline(self, items: Sequence[pytest.Item]) -> Baseline:
        reader, writer = os.pipe()

        def work() -> int:
            baseline = Baseline()
            measured = coverage.Coverage(data_file=None, include=[str(self._module.__file__)], config_file=False)
            measured.set_option("run:disable_warnings", ["no-data-collected"])
            measured.start()
            for item, next_item in zip(items, [*items[1:], None], strict=True):
                measured.switch_context(item.nodeid)
                began = time.monotonic()
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
                baseline.seconds[item.nodeid] = time.monotonic() - began
                baseline.lines[item.nodeid] = set()
                if item.session.testsfailed > len(baseline.failed):
                    baseline.failed.append(item.nodeid)
            measured.stop()
            for line, tests in measured.get_data().contexts_by_lineno(str(self._module.__file__)).items():
                for test in tests:
                    baseline.lines.setdefault(test, set()).add(line)
            with os.fdopen(writer, "wb") as out:
                pickle.dump(baseline, out)
            return 0

        pid = _fork(work)
        os.close(writer)
        with os.fdopen(reader, "rb") as told:
            data = told.read()
        os.waitpid(pid, 0)
        if not data:
            raise pytest.UsageError("the tests could not be run without a mutant")
        baseline = pickle.loads(data)
        assert isinstance(baseline, Baseline)
        return baseline


def _first_failure(items: Sequence[pytest.Item]) -> int:
    """Run tests up to the first that fails: 1, or 0 if none does. Nothing is printed of them."""
    items[0].config.pluginmanager.unregister(name="terminalreporter")
    for item, next_item in zip(items, [*items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        if item.session.testsfailed:
            return 1
    return 0


def _in_child(work: Callable[[], int], limit: float) -> int | None:
    """The exit status of a forked process that does it; None: it took longer than `limit` seconds and was ended."""
    pid, until, pause = _fork(work), time.monotonic() + limit, 0.001
    while time.monotonic() < until:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(pause)
        pause = min(0.05, 1.5 * pause)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _fork(work: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 3
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            code = work()
        finally:
            os._exit(code)
    return pid
