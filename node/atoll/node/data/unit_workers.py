"""Tokenising on all cores: worker processes take units, and their tokens come back in the order of the units.

A worker is a program of its own (`unit_worker.py`), which does not import torch. It is killed when this process ends,
and Ctrl-C does not reach it. Its tokens come in a file.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from atoll.core.errors import ChildDied, error_class
from atoll.core.files import data_dir_unusable
from atoll.node.data.encoders import SavedTokenizer
from atoll.node.data.inputs import SourceReport, Unit
from atoll.node.data.tokenise import OnProgress
from atoll.node.model.tokenizer import HuggingFaceTokenizer, Tokenizer
from atoll.node.system.child_processes import command_killed_with_parent

_POLL_SECONDS = 1.0
_READ_BYTES = 1 << 16


class _Worker:
    def __init__(self, tokenizer: str, saved_tokenizer: str, threads: int) -> None:
        command = [sys.executable, "-P", "-m", "atoll.node.data.unit_worker"]
        environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "true"}
        self.process = subprocess.Popen(
            command_killed_with_parent(command, os.getpid()),
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout
        self.unit: int | None = None
        self._rest = b""
        self._send(tokenizer=tokenizer, saved_tokenizer=saved_tokenizer)

    def give(self, unit: Unit, path: Path) -> None:
        self.unit = unit.number
        self._send(unit=asdict(unit), path=str(path))

    def _send(self, **values: Any) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the end of its output tells
            self.process.stdin.write(json.dumps(values).encode() + b"\n")
            self.process.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        """Read what has come. Raises `ChildDied` at the end of the output."""
        data = os.read(self.output.fileno(), _READ_BYTES)
        if not data:
            raise ChildDied(
                f"a process that tokenises text ended with status {self.process.wait()}",
                "see the log; if the machine is short of memory, lower cpu_threads",
            )
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.output):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()


def tokenised_units(
    units: Sequence[Unit], tokenizer: Tokenizer, folder: Path, threads: int, on_progress: OnProgress
) -> Iterator[tuple[Path, SourceReport]]:
    """Yield for each unit, in order, the file of its tokens in `folder`, and its report.

    `on_progress` is called at least every `_POLL_SECONDS`. Raises the workers' errors, `ChildDied`,
    `DataDirUnusable`.
    """
    count = max(1, min(threads, len(units)))
    saved = folder / "tokenizer.json"
    try:
        is_saved = isinstance(tokenizer, HuggingFaceTokenizer) and SavedTokenizer.save(tokenizer, saved)
    except OSError as error:
        raise data_dir_unusable(folder, error) from error
    workers: list[_Worker] = []
    with selectors.DefaultSelector() as waiting:
        try:
            for _ in range(count):
                workers.append(_Worker(tokenizer.name, str(saved) if is_saved else "", max(1, threads // count)))
                waiting.register(workers[-1].output, selectors.EVENT_READ, workers[-1])
            yield from _run(units, folder, waiting, on_progress)
        finally:
            for worker in workers:
                worker.end()


def _run(
    units: Sequence[Unit], folder: Path, waiting: selectors.BaseSelector, on_progress: OnProgress
) -> Iterator[tuple[Path, SourceReport]]:
    left, paths = iter(units), [folder / f"{unit.number}.tokens" for unit in units]
    reports: dict[int, SourceReport] = {}
    tokens: dict[int, int] = {}  # by unit
    next_unit = 0
    while next_unit < len(units):
        for key, _ in waiting.select(_POLL_SECONDS):
            worker: _Worker = key.data
            for answer in worker.answers():
                if "error" in answer:
                    raise error_class(answer["error"])(answer["message"], answer["remedy"])
                if worker.unit is not None:
                    tokens[worker.unit] = answer["tokens"]
                    if "report" not in answer:
                        continue
                    reports[worker.unit] = SourceReport.from_dict(answer["report"])
                if (unit := next(left, None)) is not None:
                    worker.give(unit, paths[unit.number])
        on_progress(sum(tokens.values()))
        while next_unit in reports:
            yield paths[next_unit], reports.pop(next_unit)
            next_unit += 1
