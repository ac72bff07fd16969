"""Tokenising on all cores: worker processes take units, and their tokens come back in the order of the units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.core.files import data_dir_unusable
from atoll.node.data.corpus_tokenizer import CorpusTokenizer, load_saved, write_tokenizer
from atoll.node.data.heartbeat import repeated
from atoll.node.data.inputs import SourceReport, Unit, read_unit
from atoll.node.data.tokenise import OnProgress, token_parts
from atoll.node.model.tokenizer import Tokenizer, load_tokenizer
from atoll.node.system.worker_pool import WorkerPool

_REMEDY = "see the log; if the machine is short of memory, lower cpu_threads"


@dataclass(frozen=True)
class _TokeniseUnit:
    unit: Unit
    tokenizer: CorpusTokenizer | str  # its files, or its name if no file determines the encoding
    path: Path

    def __call__(self) -> tuple[int, SourceReport]:
        """Write the tokens to the file; return their number, and the report."""
        tokenizer = load_tokenizer(self.tokenizer) if isinstance(self.tokenizer, str) else load_saved(self.tokenizer)
        report, tokens = SourceReport(), 0
        try:
            with self.path.open("wb") as file:
                for part, _ in token_parts(read_unit(self.unit, report), tokenizer):
                    file.write(part.data)
                    tokens += len(part)
        except OSError as error:  # errors of reading were converted by the readers
            raise data_dir_unusable(self.path.parent, error) from error
        return tokens, report


def tokenised_units(
    units: Sequence[Unit], tokenizer: Tokenizer, folder: Path, threads: int, on_progress: OnProgress
) -> Iterator[tuple[Path, SourceReport]]:
    """Yield for each unit, in order, the file of its tokens in `folder`, and its report.

    `on_progress` is called every few seconds, sometimes from another thread. Raises the readers' errors, `ChildDied`,
    `DataDirUnusable`.
    """
    workers = max(1, min(threads, len(units)))
    saved = write_tokenizer(tokenizer, folder / "tokenizer")
    tasks = [
        _TokeniseUnit(unit, saved if saved.rust or not saved.card.files else tokenizer.name, _path(folder, unit))
        for unit in units
    ]
    reports: dict[int, SourceReport] = {}
    done = next_unit = 0
    with (
        WorkerPool[tuple[int, SourceReport]](workers, _REMEDY, threads // workers) as pool,
        repeated(on_progress) as tell,
    ):
        for task, (tokens, report) in pool.run(tasks):
            assert isinstance(task, _TokeniseUnit)
            done += tokens
            tell(done)
            reports[task.unit.number] = report
            while next_unit in reports:
                yield tasks[next_unit].path, reports.pop(next_unit)
                next_unit += 1


def _path(folder: Path, unit: Unit) -> Path:
    return folder / f"{unit.number}.tokens"
