"""Members of one process that give each other parts of a corpus, over the memory network."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from benchmarks.corpus_server import CorpusServer, files_of, write_corpus
from support.memory_network import Fault, MemoryHub, MemoryNetwork, no_fault

from atoll.core.clock import SystemClock
from atoll.core.run_spec import DataSection
from atoll.node.data.block_client import BlockClient, KnownMembers
from atoll.node.data.block_files import BlockFiles
from atoll.node.data.block_server import BlockServer
from atoll.node.data.blocks import BLOCK_BYTES, CHUNK_BYTES, block_digests_range, chunk_digests_range, count_chunks
from atoll.node.data.card import CARD_NAME, card_digest
from atoll.node.data.open_corpus import CacheFolder, open_corpus

RUN = "r"


def text(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8).tobytes()


def ranges_of(truth: dict[str, bytes], blocks: int = 32) -> Iterator[tuple[str, int, int]]:
    """The ranges that a reader of the whole corpus asks, `blocks` at once."""
    for path in sorted(truth):
        size = len(truth[path])
        if path.endswith("digests"):
            size = len(truth[path.replace("digests", "tokens")])
            yield path, *chunk_digests_range(size)
            yield from ((path, *block_digests_range(size, chunk)) for chunk in range(count_chunks(size)))
        elif path.endswith("tokens"):
            for chunk in range(count_chunks(size)):
                start, stop = chunk * CHUNK_BYTES, min((chunk + 1) * CHUNK_BYTES, size)
                step = blocks * BLOCK_BYTES
                yield from ((path, at, min(at + step, stop)) for at in range(start, stop, step))


@dataclass
class CorpusSwarm:
    """A corpus in `root` / corpus, made unless it is there, and members by name."""

    root: Path
    fault: Fault = no_fault
    seeds: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hub = MemoryHub(self._pass)
        self.corpus = self.root / "corpus"
        if not self.corpus.exists():
            web = [text(0, (1 << 20) + 70_001), text(1, 3 * BLOCK_BYTES)]
            write_corpus(self.corpus, {"web": web, "code": [text(2, 99_999)]})
        self.digest = card_digest((self.corpus / CARD_NAME).read_bytes())
        self.truth = {str(p.relative_to(self.corpus)): p.read_bytes() for p in self.corpus.rglob("*") if p.is_file()}
        self.networks: dict[str, MemoryNetwork] = {}

    async def _pass(self, passage):  # type: ignore[no-untyped-def]
        return await self.fault(passage)

    def files(self, directory: Path | None = None, cache: Path | None = None) -> BlockFiles:
        return BlockFiles(self.digest, directory, cache)

    def serve(self, name: str, files: BlockFiles, may_share: Callable[[], bool] = lambda: True) -> BlockServer:
        """A member that gives what `files` have."""
        self.members.append(name)
        self.networks[name] = self.hub.join(name)
        return BlockServer(self.networks[name], RUN, files, may_share)

    def client(self, name: str = "me", files: BlockFiles | None = None) -> BlockClient:
        """A member that reads."""
        network = self.networks.get(name) or self.hub.join(name)
        self.networks[name] = network
        empty = self.root / f"cache-of-{name}"
        return BlockClient(
            network,
            RUN,
            files or self.files(cache=empty),
            lambda: KnownMembers(self.seeds, self.members),
            SystemClock(),
            random.Random(1),
        )

    def cache_with(self, name: str, *ranges: tuple[int, int, int, int]) -> Path:
        """The cache of a node that fetched these ranges: source, shard, start, stop."""
        folder = CacheFolder(self.root / name)
        with web_server(self.corpus) as address:
            section = DataSection(source="corpus", corpus=self.digest, mirrors=(address,), sequence_length=512)
            opened = open_corpus(section, None, folder, SystemClock())
            for wanted in ranges:
                opened.reader.read(*wanted)
            opened.fetcher.close()
        return folder.path / self.digest


@contextmanager
def web_server(corpus: Path) -> Iterator[str]:
    with CorpusServer(files_of(corpus)) as server:
        yield server.address
