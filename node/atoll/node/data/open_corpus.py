"""Opening of a corpus of shards: its card, its tokenizer, its held-out samples, in this order.

What was fetched stays in the cache folder of the node, under the digest of the card:

    <digest>/corpus.json, <digest>/tokenizer/…, <digest>/blocks/…
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from atoll.core.clock import Clock, SystemClock
from atoll.core.errors import ConfigError, CorpusError, DataDirUnusable
from atoll.core.files import write_atomic
from atoll.core.run_spec import DataSection, RunSpec
from atoll.node.data.block_cache import BLOCKS_FOLDER, BlockCache
from atoll.node.data.block_reader import BlockReader
from atoll.node.data.blocks import BlockMismatch
from atoll.node.data.card import (
    CARD_DIGEST,
    CARD_NAME,
    MAX_CARD_BYTES,
    TOKENIZER_DIRECTORY,
    CorpusCard,
    TokenizerFile,
    card_digest,
    parse_card,
)
from atoll.node.data.fetcher import Fetcher, OnTrouble, no_trouble_callback
from atoll.node.data.mirrors import Mirror, UnusableMirror, open_mirror
from atoll.node.data.sharded_corpus import ShardedCorpus
from atoll.node.model.tokenizer import HuggingFaceTokenizer, Tokenizer, load_tokenizer

TOKENIZER_OF_CORPUS = "corpus"  # the tokenizer's name in a run spec that uses the one in the corpus
DEFAULT_CACHE_BYTES = 20 * 10**9
OPENING_PATIENCE = timedelta(hours=1)
_EXPORT_PATIENCE = timedelta(seconds=30)
_HELD_OUT_AT_ONCE = 64


@dataclass(frozen=True)
class CacheFolder:
    """The folder for fetched files, and its limit."""

    path: Path
    budget_bytes: int = DEFAULT_CACHE_BYTES


@dataclass
class OpenedCorpus:
    """A corpus whose card and tokenizer are loaded."""

    card: CorpusCard
    tokenizer: Tokenizer
    fetcher: Fetcher
    reader: BlockReader
    digest: str  # of the card

    def for_training(self, spec: RunSpec, on_progress: Callable[[], object] = lambda: None) -> ShardedCorpus:
        """Divide the corpus into windows for a run, and fetch the held-out samples.

        Raises `CorpusError`, `Unreachable`.
        """
        try:
            corpus = ShardedCorpus(
                self.card, self.digest, spec.data, spec.run.seed, self.tokenizer, self.fetcher, self.reader
            )
        except BaseException:
            self.fetcher.close()
            raise
        try:
            held_out = corpus.validation_windows()
            self.reader.pin(map(corpus.place, held_out))
            targets = 0
            for start in range(0, len(held_out), _HELD_OUT_AT_ONCE):
                windows_BT = corpus.windows(held_out[start : start + _HELD_OUT_AT_ONCE])
                targets += int((windows_BT[:, 1:] >= 0).sum())
                on_progress()
            if not targets:
                raise CorpusError(
                    "no held-out sample has an answer, so there would be no validation loss",
                    "raise [data] validation_samples or sequence_length",
                )
        except BaseException:
            corpus.close()
            raise
        self.fetcher.opened()
        return corpus


def open_corpus(
    section: DataSection,
    path: str | None,
    cache: CacheFolder | None,
    clock: Clock,
    on_trouble: OnTrouble = no_trouble_callback,
    peers: Mirror | None = None,
    patience: timedelta | None = None,
) -> OpenedCorpus:
    """Read the card and the tokenizer of a run's corpus. `path`: a directory that has it, asked before the mirrors.

    `peers`: the other members of the run, as one more mirror.

    `on_trouble` is called while no mirror gives the needed bytes, until the held-out samples are fetched. Raises
    `CorpusError`, `ConfigError`, `DataDirUnusable`, `Unreachable`.
    """
    assert section.corpus is not None
    mirrors = mirrors_of(section, path, peers)
    folder = CacheFolder(cache.path / section.corpus, cache.budget_bytes) if cache is not None else None
    if cache is not None:
        _forget_other_corpora(cache.path, section.corpus)
    fetcher = Fetcher(mirrors, clock, patience or OPENING_PATIENCE, on_trouble)
    try:
        card = parse_card(_fetch_card(fetcher, section.corpus, folder), section.corpus)
        tokenizer = _tokenizer(section, card, fetcher, folder)
    except BaseException:
        fetcher.close()
        raise
    blocks = BlockCache(folder.path / BLOCKS_FOLDER, folder.budget_bytes) if folder is not None else None
    return OpenedCorpus(card, tokenizer, fetcher, BlockReader(card, fetcher, blocks), section.corpus)


def load_run_tokenizer(section: DataSection, cache: CacheFolder | None = None) -> Tokenizer:
    """Load the tokenizer of a run, for the export: that of its corpus comes from the node's cache or from a mirror.

    Raises `ConfigError`, `CorpusError`, `Unreachable`.
    """
    if section.source != "corpus" or section.tokenizer != TOKENIZER_OF_CORPUS:
        return load_tokenizer(section.tokenizer)
    kept = str(cache.path / section.corpus) if cache is not None and section.corpus and not section.mirrors else None
    opened = open_corpus(section, kept, cache, SystemClock(), patience=_EXPORT_PATIENCE)
    opened.fetcher.close()
    return opened.tokenizer


def mirrors_of(section: DataSection, path: str | None, peers: Mirror | None) -> list[Mirror]:
    """Return the mirrors of a run's corpus, the node's own directory first, members last. Raises `ConfigError`."""
    addresses = [*([path] if path else []), *section.mirrors]
    if not addresses and peers is None:
        raise ConfigError(
            "the run's corpus is nowhere: its spec names no mirror", "give a directory that has it with --data"
        )
    mirrors, problem = list[Mirror](), None
    for address in addresses:
        try:
            mirrors.append(open_mirror(address))
        except ConfigError as error:
            problem = error
            mirrors.append(UnusableMirror(str(error)))
    if problem is not None and peers is None and all(isinstance(mirror, UnusableMirror) for mirror in mirrors):
        raise problem
    return [*mirrors, *([peers] if peers is not None else [])]


def _forget_other_corpora(folder: Path, digest: str) -> None:
    """Delete the blocks of other corpora: the disk budget is for all training text of a node."""
    for other in folder.glob("*/blocks"):
        if other.parent.name != digest and CARD_DIGEST.fullmatch(other.parent.name):
            shutil.rmtree(other.parent, ignore_errors=True)


def _fetch_card(fetcher: Fetcher, digest: str, folder: CacheFolder | None) -> bytes:
    def check(data: bytes) -> None:
        if card_digest(data) != digest:
            raise BlockMismatch(f"its corpus card has another digest than {digest[:12]}…")

    return _kept(folder, CARD_NAME, check, lambda: fetcher.read_whole(CARD_NAME, MAX_CARD_BYTES, check))


def _tokenizer(section: DataSection, card: CorpusCard, fetcher: Fetcher, folder: CacheFolder | None) -> Tokenizer:
    """Load the run's tokenizer, and check that it made the corpus."""
    if section.tokenizer != TOKENIZER_OF_CORPUS or not card.tokenizer.files:
        name = card.tokenizer.name if section.tokenizer == TOKENIZER_OF_CORPUS else section.tokenizer
        tokenizer = load_tokenizer(name)
    elif folder is None:
        raise ConfigError("the corpus brings its own tokenizer, and there is no folder to keep it in")
    else:
        for file in card.tokenizer.files:
            _fetch_tokenizer_file(file, fetcher, folder)
        tokenizer = HuggingFaceTokenizer(str(folder.path / TOKENIZER_DIRECTORY))
    made = card.tokenizer
    if tokenizer.digest != made.digest or tokenizer.vocabulary != made.vocabulary:
        raise CorpusError(
            f"the corpus was made with the tokenizer {made.name} ({made.digest[:12]}…), and the run's is "
            f"{section.tokenizer} ({tokenizer.digest[:12]}…)",
            f'set [data] tokenizer = "{TOKENIZER_OF_CORPUS}" in the run spec',
        )
    return tokenizer


def _fetch_tokenizer_file(file: TokenizerFile, fetcher: Fetcher, folder: CacheFolder) -> None:
    def check(data: bytes) -> None:
        if len(data) != file.size or hashlib.sha256(data).hexdigest() != file.sha256:
            raise BlockMismatch(f"the tokenizer's file {file.name} has another digest than the corpus card says")

    name = f"{TOKENIZER_DIRECTORY}/{file.name}"
    _kept(folder, name, check, lambda: fetcher.read(name, 0, file.size, check), must_keep=True)


def _kept(
    folder: CacheFolder | None,
    name: str,
    check: Callable[[bytes], object],
    fetch: Callable[[], bytes],
    must_keep: bool = False,
) -> bytes:
    """Return a file that passes `check`: the node's copy, else a fetched one, which is then kept if possible.

    Raises `DataDirUnusable` if it `must_keep` it and cannot, and what `fetch` raises.
    """
    if folder is None:
        return fetch()
    path = folder.path / name
    try:
        data = path.read_bytes()
        check(data)
        return data
    except (OSError, BlockMismatch):
        data = fetch()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data)
    except (OSError, DataDirUnusable) as error:
        if must_keep:
            raise DataDirUnusable(f"cannot keep {name} of the corpus in {folder.path}: {error}") from error
    return data
