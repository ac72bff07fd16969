"""What worker processes of a build do: tokenise one unit, or write one shard. Tasks are sent to them as they stand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.core.disk import OS_DISK, Disk
from atoll.node.data.card import Shard
from atoll.node.data.corpus_tokenizer import CorpusTokenizer, load_saved, save_tokenizer
from atoll.node.data.durable_files import write_file
from atoll.node.data.inputs import SourceReport, Unit, read_unit
from atoll.node.data.shard_writer import Group, write_shard
from atoll.node.data.spill import Spill, write_spill
from atoll.node.data.tokenise import token_parts


@dataclass(frozen=True)
class SaveTokenizer:
    """Write the files of the tokenizer into the corpus."""

    name: str
    directory: Path
    disk: Disk = OS_DISK

    def __call__(self) -> CorpusTokenizer:
        return save_tokenizer(self.name, self.directory, self.disk)


@dataclass(frozen=True)
class TokeniseUnit:
    """Write the tokens of one unit of input into a spill file."""

    source: int  # number of the source
    number: int  # of the unit in the order of the build
    unit: Unit
    tokenizer: CorpusTokenizer
    path: Path
    strict: bool
    disk: Disk = OS_DISK

    def __call__(self) -> Spill:
        report = SourceReport()
        documents = read_unit(self.unit, report, self.strict)
        return write_spill(self.path, token_parts(documents, load_saved(self.tokenizer)), report, self.disk)


@dataclass(frozen=True)
class WriteShard:
    """Write one shard of a group, and then its description."""

    source: int
    group: Group
    number: int  # in the group
    first_shard: int  # of the group, in its source
    directory: Path
    described: Path
    disk: Disk = OS_DISK

    def __call__(self) -> Shard:
        shard = write_shard(self.group, self.number, self.first_shard, self.directory, self.disk)
        write_file(self.described, shard.model_dump_json().encode(), self.disk)
        return shard
