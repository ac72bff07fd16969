"""The files of an unfinished build, in `.build` inside the corpus's directory, from which a killed build is continued.

    .build/state.json            which build this is: digests of the spec and of the input
    .build/lock                  locked while a build runs
    .build/units/web/000012.spill   tokens of a unit, until its group is complete
    .build/shards/web/000003.json   a shard that is complete, until its group is
    .build/groups/web/000000.json   a group that is complete

A shard's description is written after its files, a group's after all its shards. So whatever is described is complete,
and what is not described is made again with the same bytes.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from atoll.core.disk import OS_DISK, Disk
from atoll.core.errors import AlreadyExists, AlreadyRunning, CorpusError, DataDirUnusable
from atoll.node.data.build_schedule import DoneGroup
from atoll.node.data.card import CARD_NAME, TOKENIZER_DIRECTORY, CardTokenizer, Shard
from atoll.node.data.durable_files import explained, remove_unfinished, write_file
from atoll.node.data.source_report import SourceReport
from atoll.node.data.spill import Spill, open_spill

NAME = ".build"
_DONE = ".build.done"  # the rest of `.build` next to a complete corpus, before it is deleted
_KINDS = ("units", "shards", "groups")
_SHARD_FILE = re.compile(r"\d{6,}\.(tokens|digests|documents)")


@dataclass(frozen=True)
class BuildState:
    """Identity of the build that fills a directory."""

    spec: str  # digest of everything but the input that determines the tokens
    inputs: str  # digest of the input files' names, sizes and times
    sources: tuple[str, ...]


class BuildDirectory:
    """The directory of a corpus that is being built."""

    def __init__(self, corpus: Path, sources: Iterable[str], disk: Disk = OS_DISK) -> None:
        self.corpus = corpus
        self._work = corpus / NAME
        self._sources = tuple(sources)
        self._disk = disk

    # --- begin and end ----------------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the directory's lock for this process. Raises `AlreadyExists`, `AlreadyRunning`, `DataDirUnusable`."""
        with explained(self.corpus):
            self.corpus.mkdir(parents=True, exist_ok=True)
            if (self.corpus / _DONE).exists():
                shutil.rmtree(self.corpus / _DONE)
            if not self._work.exists():
                self._refuse_foreign_files()
            self._work.mkdir(exist_ok=True)
            lock = os.open(self._work / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise AlreadyRunning(f"another build fills {self.corpus}", "wait for it, or stop it") from error
            yield
        finally:
            os.close(lock)

    def open(self, state: BuildState, restart: bool) -> None:
        """Begin, or continue the same build. Raises `CorpusError` if an earlier build here was of another corpus."""
        file = self._work / "state.json"
        if restart:
            self._delete_earlier()
        if file.exists():
            with _readable(file):
                found = json.loads(file.read_bytes())
                earlier = BuildState(found["spec"], found["inputs"], tuple(found["sources"]))
            self._check(earlier, state)
        with explained(self.corpus):
            for name in self._sources:
                for directory in (
                    self.corpus / name,
                    *(self._work / kind / name for kind in _KINDS),
                ):
                    directory.mkdir(parents=True, exist_ok=True)
                    remove_unfinished(directory)
            for directory in (self.corpus, self._work):
                remove_unfinished(directory)
            for directory in (*(self._work / kind for kind in _KINDS), self._work, self.corpus, self.corpus.parent):
                self._disk.sync_directory(directory)
        write_file(file, json.dumps(vars(state)).encode() + b"\n", self._disk)

    def staged_tokenizer(self) -> Path:
        """Return an empty directory for the tokenizer's files, until it is clear that they belong to this build."""
        staged = self._work / TOKENIZER_DIRECTORY
        with explained(staged):
            shutil.rmtree(staged, ignore_errors=True)
            staged.mkdir()
        return staged

    def adopt_tokenizer(self, tokenizer: CardTokenizer) -> Path:
        """Move the tokenizer's files to their place, and return that directory. Raises `DataDirUnusable`."""
        directory = self.corpus / TOKENIZER_DIRECTORY
        with explained(directory):
            if tokenizer.files:
                directory.mkdir(exist_ok=True)
            for file in tokenizer.files:
                self._disk.rename(self._work / TOKENIZER_DIRECTORY / file.name, directory / file.name)
            if tokenizer.files:
                self._disk.sync_directory(directory)
        return directory

    def finish(self, card: bytes) -> None:
        """Write the card, and delete the files that only the build needed. Raises `DataDirUnusable`."""
        write_file(self.corpus / CARD_NAME, card, self._disk)
        with explained(self._work):
            # renamed first: a kill during the deletion leaves no incomplete `.build`
            self._disk.rename(self._work, self.corpus / _DONE)
            shutil.rmtree(self.corpus / _DONE)

    # --- units, shards and groups -----------------------------------------------------------------------

    def spill_path(self, source: str, unit: int) -> Path:
        """Return the path of a unit's spill file."""
        return self._work / "units" / source / f"{unit:06d}.spill"

    def shard_path(self, source: str, shard: int) -> Path:
        """Return the path of a shard's description, which is kept until its group is complete."""
        return self._work / "shards" / source / f"{shard:06d}.json"

    def spills(self, source: str) -> dict[int, Spill]:
        """Return the units that are tokenised. Raises `DataDirUnusable`."""
        with _readable(self._work):
            paths = sorted((self._work / "units" / source).glob("*.spill"))
            return {int(path.stem): open_spill(path) for path in paths}

    def groups(self, source: str) -> list[DoneGroup]:
        """Return the groups that are complete, in order. Raises `DataDirUnusable`."""
        found = []
        with _readable(self._work):
            for number in range(len(list((self._work / "groups" / source).glob("*.json")))):
                read = json.loads(self._group_path(source, number).read_bytes())
                read["report"] = SourceReport.from_dict(read["report"])
                read["shards"] = tuple(Shard.model_validate(shard) for shard in read["shards"])
                found.append(DoneGroup(**read))
        return found

    def shard(self, source: str, number: int) -> Shard | None:
        """Return the description of a shard that is complete. Raises `DataDirUnusable`."""
        path = self.shard_path(source, number)
        with _readable(path):
            return Shard.model_validate_json(path.read_bytes()) if path.exists() else None

    def write_group(self, source: str, number: int, group: DoneGroup) -> None:
        """Record that a group is complete. Raises `DataDirUnusable`."""
        shards = [shard.model_dump(mode="json") for shard in group.shards]
        document = {**vars(group), "report": group.report.to_dict(), "shards": shards}
        write_file(self._group_path(source, number), json.dumps(document).encode(), self._disk)

    def forget_units(self, source: str, group: DoneGroup, first_shard: int) -> None:
        """Delete the files that only an incomplete group needs. Raises `DataDirUnusable`."""
        paths = [self.spill_path(source, unit) for unit in range(group.first_unit, group.end_unit)]
        paths += [self.shard_path(source, first_shard + number) for number in range(len(group.shards))]
        with explained(self._work):
            for path in paths:
                path.unlink(missing_ok=True)

    # --- inside -----------------------------------------------------------------------------------------

    def _group_path(self, source: str, number: int) -> Path:
        return self._work / "groups" / source / f"{number:06d}.json"

    def _refuse_foreign_files(self) -> None:
        if (self.corpus / CARD_NAME).exists():
            raise AlreadyExists(f"{self.corpus} has a complete corpus", "choose another directory, or delete that one")
        if any(self.corpus.iterdir()):
            raise AlreadyExists(f"{self.corpus} has files that are no corpus", "choose an empty or new directory")

    def _check(self, earlier: BuildState, now: BuildState) -> None:
        if earlier.spec != now.spec:
            raise CorpusError(
                f"{self.corpus} has an unfinished build with another spec or tokenizer",
                "use that spec to go on, or begin again with --restart, which deletes the unfinished build",
            )
        if earlier.inputs != now.inputs:
            raise CorpusError(
                f"the input files have changed since the unfinished build in {self.corpus}",
                "begin again with --restart, which deletes the unfinished build",
            )

    def _delete_earlier(self) -> None:
        """Delete all files of an unfinished build but its lock."""
        file = self._work / "state.json"
        with explained(self.corpus):
            sources = json.loads(file.read_bytes())["sources"] if file.exists() else ()
            (self.corpus / CARD_NAME).unlink(missing_ok=True)
            for kind in _KINDS:
                shutil.rmtree(self._work / kind, ignore_errors=True)
            for source in sources:
                for path in (self.corpus / source).glob("*"):
                    if _SHARD_FILE.fullmatch(path.name):
                        path.unlink()
                if (self.corpus / source).is_dir() and not any((self.corpus / source).iterdir()):
                    (self.corpus / source).rmdir()
            shutil.rmtree(self.corpus / TOKENIZER_DIRECTORY, ignore_errors=True)
            file.unlink(missing_ok=True)


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Report damaged files of an earlier build. Raises `DataDirUnusable`."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataDirUnusable(
            f"the unfinished build in {path} cannot be read: {error}", "begin again with --restart"
        ) from error
