"""Tasks of a build's worker processes: tokenise one unit, or write one shard. They are pickled and sent to workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.core.disk import OS_DISK, Disk
from atoll.node.data.card import Shard
from atoll.node.data.corpus_tokenizer import NO_ANSWERS, CorpusTokenizer, TokenizerUse, load_saved, save_tokenizer
from atoll.node.data.durable_files import write_file
from atoll.node.data.examples import WHOLE_EXAMPLES, ExampleLength, example_parts, load_example_encoder
from atoll.node.data.inputs import SourceReport, Unit, read_examples, read_unit
from atoll.node.data.shard_writer import Group, write_shard
from atoll.node.data.spill import Spill, write_spill
from atoll.node.data.tokenise import token_parts


@dataclass(frozen=True)
class SaveTokenizer:
    """Write the files of the tokenizer into the corpus."""

    name: str
    directory: Path
    disk: Disk = OS_DISK
    use: TokenizerUse = NO_ANSWERS

    def __call__(self) -> CorpusTokenizer:
        saved = save_tokenizer(self.name, self.directory, self.disk, self.use)
        if self.use.answers:
            load_example_encoder(saved)  # refuses a tokenizer that no worker could use
        return saved


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
    marks: bool = False  # the corpus has tokens that are input only
    length: ExampleLength = WHOLE_EXAMPLES

    def __call__(self) -> Spill:
        report = SourceReport()
        if self.unit.spec.has_answers:
            examples = read_examples(self.unit, report, self.strict)
            encoder = load_example_encoder(self.tokenizer)
            parts = example_parts(examples, encoder, self.length, report, self.strict)
        else:
            documents = read_unit(self.unit, report, self.strict)
            parts = token_parts(documents, load_saved(self.tokenizer), marks=self.marks)
        return write_spill(self.path, parts, report, self.disk)


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
