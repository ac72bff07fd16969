"""Training runs of a benchmark, in processes of their own. They are kept in a file of lines as they end, so that a
killed benchmark goes on where it stopped."""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from atoll.lab.corpus import write_python_corpus


class Job(Hashable, Protocol):
    """One run."""

    def key(self) -> str:
        """What names it, also in the file of finished runs."""
        ...


J = TypeVar("J", bound=Job)
O = TypeVar("O")  # noqa: E741 - a dataclass of plain values


class ResumableJobs(Generic[J, O]):
    """The runs that are done, and the processes that make more: `run(job, corpus)` in each."""

    def __init__(self, path: Path, corpus: Path, workers: int, run: Callable[[J, str], O], outcome: type[O]) -> None:
        self._path, self._corpus, self._run = path, corpus, run
        self._pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        lines = path.read_text().splitlines() if path.exists() else []
        self._done: dict[str, O] = {line["key"]: outcome(**line["outcome"]) for line in map(json.loads, lines)}

    def __enter__(self) -> ResumableJobs[J, O]:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def train(self, jobs: Iterable[J]) -> dict[J, O]:
        """Every job's outcome; those not yet there are run now."""
        wanted = list(dict.fromkeys(jobs))
        missing = [job for job in wanted if job.key() not in self._done]
        running = {self._pool.submit(self._run, job, str(self._corpus)): job for job in missing}
        for future in concurrent.futures.as_completed(running):
            self._keep(running[future].key(), future.result())
        return {job: self._done[job.key()] for job in wanted}

    def _keep(self, key: str, outcome: Any) -> None:
        self._done[key] = outcome
        with self._path.open("a") as file:
            file.write(json.dumps({"key": key, "outcome": asdict(outcome)}) + "\n")
        print(f"{outcome.loss:.4f}  {key}", flush=True)


@contextmanager
def jobs_on_python_corpus(
    keep: Path | None, workers: int, run: Callable[[J, str], O], outcome: type[O]
) -> Iterator[ResumableJobs[J, O]]:
    """Runs on the sources of this machine's Python. Without `keep`, the file of those that are done goes at the end."""
    with tempfile.TemporaryDirectory(prefix="atoll-bench-") as folder:
        corpus = Path(folder) / "corpus.txt"
        write_python_corpus(corpus)
        with ResumableJobs(keep or Path(folder) / "finished.jsonl", corpus, workers, run, outcome) as finished:
            yield finished
