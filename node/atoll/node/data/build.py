"""Build a corpus: text of any size becomes shards, in bounded memory, on all cores; a killed build can be continued.

    plan       each source is divided into units, which are taken in an order that the seed permutes
    tokenise   workers write the tokens of each unit into a spill file
    shuffle    when a group of units is tokenised, workers write its documents, permuted by the seed, as shards
    finish     the card is written last; a directory without it is no corpus

The result depends on the input, the spec and the tokenizer only: if these are equal, so are all bytes, with any number
of workers and after any number of kills. This process reads no text and encodes none: it hands out tasks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from atoll.core.disk import OS_DISK, Disk
from atoll.core.errors import CorpusError
from atoll.node.data.build_directory import BuildDirectory, BuildState
from atoll.node.data.build_schedule import Limits, OpenGroup, SourceSchedule
from atoll.node.data.build_spec import BuildSource, BuildSpec, read_chat_template
from atoll.node.data.build_tasks import SaveTokenizer, TokeniseUnit, WriteShard
from atoll.node.data.byte_streams import unreadable
from atoll.node.data.card import MAX_SHARDS, CorpusCard, Shard, Source, card_digest, parse_card
from atoll.node.data.corpus_tokenizer import CorpusTokenizer, TokenizerUse
from atoll.node.data.durable_files import GO_ON
from atoll.node.data.examples import ExampleLength
from atoll.node.data.inputs import InputSpec, Plan, SourceReport, plan_units
from atoll.node.data.shard_writer import Group
from atoll.node.data.shuffle import permutation
from atoll.node.data.spill import Spill
from atoll.node.data.tokenise import token_dtype
from atoll.node.system.worker_pool import StartPool, WorkerPool, usable_cores


@dataclass(frozen=True)
class BuildProgress:
    """Progress of a build."""

    phase: str  # plan | tokenise
    bytes_done: int = 0  # of input, tokenised
    bytes_all: int = 0
    bytes_earlier: int = 0  # part of `bytes_done`: bytes that an earlier, interrupted build tokenised
    tokens: int = 0
    shards: int = 0  # complete


@dataclass(frozen=True)
class BuiltCorpus:
    """A complete corpus."""

    card: CorpusCard
    digest: str
    reports: dict[str, SourceReport]  # by source


OnProgress = Callable[[BuildProgress], object]


def build_corpus(
    spec: BuildSpec,
    directory: Path,
    *,
    workers: int | None = None,
    strict: bool = False,
    restart: bool = False,
    limits: Limits = Limits(),  # noqa: B008  (frozen)
    on_progress: OnProgress = lambda _: None,
    disk: Disk = OS_DISK,
    start_pool: StartPool = WorkerPool,
) -> BuiltCorpus:
    """Build the corpus in `directory`, or continue the build that an earlier call began.

    Raises `CorpusError`, `ConfigError`, `AlreadyExists`, `AlreadyRunning`, `DataDirUnusable`, `ChildDied`.
    """
    on_progress(BuildProgress("plan"))
    files = BuildDirectory(directory, (source.name for source in spec.sources), disk)
    for source in spec.sources:
        _check_place(source, directory)
    plans = [plan_units(_input_spec(source), limits.unit_bytes) for source in spec.sources]
    with files.locked():
        tokenizer = _save_tokenizer(spec, files.staged_tokenizer(), disk, start_pool)
        inputs = _inputs_digest(plans)
        state = BuildState(_spec_digest(spec, tokenizer, limits), inputs, tuple(it.name for it in spec.sources))
        files.open(state, restart)
        tokenizer = replace(tokenizer, directory=files.adopt_tokenizer(tokenizer.card))
        build = _Build(spec, plans, files, tokenizer, limits, strict, on_progress, disk)
        with start_pool(workers or usable_cores(), GO_ON) as pool:
            build.run(pool)
        if _inputs_digest(plans) != inputs:
            raise CorpusError("the input files changed while they were read", "build again with --restart")
        data = build.card().to_json()
        card = parse_card(data)  # the checks that readers will make
        files.finish(data)
    return BuiltCorpus(card, card_digest(data), {it.name: it.report() for it in build.sources})


def _input_spec(source: BuildSource) -> InputSpec:
    pair = (source.prompt, source.completion) if source.prompt and source.completion else ()
    return InputSpec(source.source, source.path, source.field, source.subset, source.split, source.messages or "", pair)


def _check_place(source: BuildSource, directory: Path) -> None:
    """Refuse to write into a directory that is read as input: a continued build would find more input.

    Raises `CorpusError`.
    """
    read = Path(source.path).expanduser()
    if source.source != "huggingface" and read.is_dir() and directory.resolve().is_relative_to(read.resolve()):
        raise CorpusError(f"{directory} is inside {read}, which is the text", "choose a directory elsewhere with --to")


def _save_tokenizer(spec: BuildSpec, directory: Path, disk: Disk, start_pool: StartPool) -> CorpusTokenizer:
    """Write the tokenizer's files in a separate process, so that its memory is free afterwards."""
    use = TokenizerUse(
        answers=spec.has_answers,
        pairs=any(source.prompt for source in spec.sources),
        chat=any(source.messages for source in spec.sources),
        template=read_chat_template(spec.chat_template) if spec.chat_template is not None else None,
    )
    with start_pool(1, GO_ON) as pool:
        pool.submit(SaveTokenizer(spec.tokenizer, directory, disk, use))
        saved: CorpusTokenizer = pool.wait()[1]
    return saved


def _spec_digest(spec: BuildSpec, tokenizer: CorpusTokenizer, limits: Limits) -> str:
    """Return a digest of everything but the input that determines the corpus. The number of workers does not."""
    sources = [source.model_dump(mode="json", exclude={"path", *_unset(source)}) for source in spec.sources]
    named: dict[str, object] = {
        "order": spec.order,
        "seed": spec.seed,
        "shard_bytes": spec.shard_bytes,
        "sources": sources,
        "tokenizer": tokenizer.card.model_dump(mode="json"),
        "limits": vars(limits),
    }
    if spec.has_answers:
        named["card"] = 2
        named["examples"] = [spec.longest_example, spec.long_examples, tokenizer.chat and vars(tokenizer.chat)]
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _unset(source: BuildSource) -> list[str]:
    """Return the unset keys for answers. They are left out, so that builds of earlier releases can be continued."""
    return [key for key in ("messages", "prompt", "completion") if getattr(source, key) is None]


def _inputs_digest(plans: list[Plan]) -> str:
    """Return a digest of the input: names, sizes and times of its files, and its division into units."""
    digest = hashlib.sha256()
    for plan in plans:
        for path in plan.files:
            try:
                found = os.stat(path)
            except OSError as error:
                raise unreadable(path, error) from error
            digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\n".encode(errors="surrogateescape"))
        for unit in plan.units:
            digest.update(f"{unit.size_bytes}\0{unit.pieces!r}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


# --- the work -------------------------------------------------------------------------------------------


@dataclass
class _SourceBuild:
    """The state of one source during the build."""

    number: int
    name: str
    path: str
    plan: Plan
    order: list[int]  # numbers of its units in the order in which the build takes them
    schedule: SourceSchedule
    open_groups: deque[OpenGroup] = field(default_factory=deque)

    def report(self) -> SourceReport:
        """Return what was read and what was left out."""
        total = replace(self.plan.report)
        for group in self.schedule.groups:
            total.add(group.report)
        return total

    def size_bytes(self, unit: int) -> int:
        """Return the input bytes of a unit, by its number in the order of the build."""
        return self.plan.units[self.order[unit]].size_bytes

    @property
    def shards(self) -> list[Shard]:
        """All shards that are in complete groups."""
        return [shard for group in self.schedule.groups for shard in group.shards]


class _Build:
    """Hands out the tasks of a build and records which are done."""

    def __init__(
        self,
        spec: BuildSpec,
        plans: list[Plan],
        files: BuildDirectory,
        tokenizer: CorpusTokenizer,
        limits: Limits,
        strict: bool,
        on_progress: OnProgress,
        disk: Disk,
    ) -> None:
        self._spec, self._files, self._tokenizer, self._disk = spec, files, tokenizer, disk
        self._limits, self._strict, self._on_progress = limits, strict, on_progress
        self._dtype = token_dtype(tokenizer.card.vocabulary, spec.has_answers)
        self._length = ExampleLength(spec.longest_example, spec.long_examples == "cut")
        self._shard_tokens = spec.shard_bytes // self._dtype.itemsize
        self._waiting: deque[WriteShard] = deque()
        self._progress = BuildProgress("tokenise", bytes_all=sum(plan.size_bytes for plan in plans))
        self.sources = [self._open(number, plan) for number, plan in enumerate(plans)]
        self._progress = replace(self._progress, bytes_earlier=self._progress.bytes_done)

    def run(self, pool: WorkerPool[Any]) -> None:
        """Complete all groups. Raises the errors that `build_corpus` names."""
        for source in self.sources:
            self._open_groups(source)
        self._on_progress(self._progress)
        while True:
            while pool.idle and (task := self._next_task()):
                pool.submit(task)
            if not pool.running:
                return
            self._task_done(*pool.wait())
            self._on_progress(self._progress)

    def card(self) -> CorpusCard:
        """Describe the corpus when all groups are complete."""
        left_out: Counter[str] = Counter()
        for source in self.sources:
            report = source.report()
            left_out.update(files=report.skipped_files, lines=report.bad_lines, rows=report.skipped_rows)
            left_out.update(
                unanswered_examples=report.unanswered_examples,
                long_examples=report.long_examples,
                ends_of_long_examples=report.cut_examples,
            )
        return CorpusCard(
            token_bytes=self._dtype.itemsize,  # type: ignore[arg-type]  # 1, 2 or 4
            marks=self._spec.has_answers,
            version=2 if self._spec.has_answers else 1,
            tokenizer=self._tokenizer.card,
            sources=tuple(Source(name=it.name, shards=tuple(it.shards)) for it in self.sources),
            left_out={kind: count for kind, count in sorted(left_out.items()) if count},
        )

    def _open(self, number: int, plan: Plan) -> _SourceBuild:
        """Begin a source, or continue after its completed groups and units."""
        spec = self._spec.sources[number]
        units = len(plan.units)
        order = (
            permutation(units, self._spec.seed, spec.name, "units").tolist() if self._shuffled else list(range(units))
        )
        groups, spills = self._files.groups(spec.name), self._files.spills(spec.name)
        first_shard = 0
        for group in groups:  # a kill may have come before these files were deleted
            self._files.forget_units(spec.name, group, first_shard)
            first_shard += len(group.shards)
        schedule = SourceSchedule(units, self._limits, self._dtype.itemsize, self._shard_tokens, groups, spills)
        source = _SourceBuild(number, spec.name, spec.path, plan, order, schedule)
        finished = groups[-1].end_unit if groups else 0
        for unit in {*range(finished), *spills}:
            self._count(bytes_done=source.size_bytes(unit))
        self._count(
            tokens=sum(group.tokens for group in groups)
            + sum(spill.tokens for unit, spill in spills.items() if unit >= finished),
            shards=first_shard,
        )
        return source

    @property
    def _shuffled(self) -> bool:
        return self._spec.order == "shuffled"

    def _next_task(self) -> TokeniseUnit | WriteShard | None:
        """Return the next task: shards before units, so that spill files do not accumulate."""
        if self._waiting:
            return self._waiting.popleft()
        for source in self.sources:
            unit = source.schedule.next_unit()
            if unit is not None:
                path = self._files.spill_path(source.name, unit)
                input_unit = source.plan.units[source.order[unit]]
                return TokeniseUnit(
                    source.number,
                    unit,
                    input_unit,
                    self._tokenizer,
                    path,
                    self._strict,
                    self._disk,
                    self._spec.has_answers,
                    self._length,
                )
        return None

    def _task_done(self, task: Any, result: Spill | Shard) -> None:
        source = self.sources[task.source]
        if isinstance(result, Spill):
            source.schedule.unit_done(task.number, result)
            self._count(bytes_done=source.size_bytes(task.number), tokens=result.tokens)
        else:
            group = next(it for it in source.open_groups if it.number == task.group.number)
            group.done[task.number] = result
            self._count(shards=1)
        self._open_groups(source)

    def _open_groups(self, source: _SourceBuild) -> None:
        """Hand out the shards of groups whose units are all tokenised, and close groups that are complete."""
        while group := source.schedule.next_group():
            if group.first_shard + group.shards > MAX_SHARDS:
                raise CorpusError(
                    f"source {source.name!r} has more than {MAX_SHARDS:,} shards of {self._spec.shard_bytes:,} bytes",
                    "build with a larger shard_bytes",
                )
            source.open_groups.append(group)
            seed = self._spec.seed if self._shuffled else None
            marks = self._spec.has_answers
            tokens = Group(source.name, group.number, group.spills, seed, self._dtype, self._shard_tokens, marks)
            for number in range(group.shards):
                shard = self._files.shard(source.name, group.first_shard + number)
                if shard is not None:
                    group.done[number] = shard
                    self._count(shards=1)
                    continue
                described = self._files.shard_path(source.name, group.first_shard + number)
                self._waiting.append(
                    WriteShard(
                        source.number, tokens, number, group.first_shard, self._files.corpus, described, self._disk
                    )
                )
        while source.open_groups and not source.open_groups[0].missing:
            group = source.open_groups.popleft()
            done = group.finish()
            self._files.write_group(source.name, group.number, done)
            source.schedule.group_done(done)
            self._files.forget_units(source.name, done, group.first_shard)
        if source.schedule.complete and not source.shards:
            raise source.report().nothing_read(source.path)

    def _count(self, bytes_done: int = 0, tokens: int = 0, shards: int = 0) -> None:
        now = self._progress
        self._progress = replace(
            now, bytes_done=now.bytes_done + bytes_done, tokens=now.tokens + tokens, shards=now.shards + shards
        )
