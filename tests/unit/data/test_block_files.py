"""What a node gives of its disk: bytes of the corpus or nothing, whatever is asked and whatever happened to files."""

from __future__ import annotations

import hashlib
import os
import random
from pathlib import Path

import numpy as np
import pytest
from benchmarks.corpus_server import CorpusServer, card_tokenizer, files_of, write_corpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.core.clock import SystemClock
from atoll.core.errors import CorpusError
from atoll.core.run_spec import DataSection
from atoll.node.data.block_files import BlockFiles
from atoll.node.data.blocks import BLOCK_BYTES, CHUNK_BYTES, block_digests_range, chunk_digests_range
from atoll.node.data.card import CARD_NAME, CorpusCard, Shard, Source, TokenizerFile, parse_card
from atoll.node.data.corpus_table import MAX_RANGE_BYTES, PIECE_BYTES, CorpusTable
from atoll.node.data.known_digests import KnownDigests
from atoll.node.data.open_corpus import CacheFolder, open_corpus


def text(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).integers(1, 256, size, dtype=np.uint8).tobytes()


WEB = [text(0, (1 << 20) + 70_001), text(1, 3 * BLOCK_BYTES)]
CODE = [text(2, 400_000)]
VOCABULARY = text(3, PIECE_BYTES + 1000)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A corpus of two sources and a tokenizer of one file."""
    root = tmp_path / "corpus"
    write_corpus(root, {"web": WEB, "code": CODE})
    card = parse_card((root / CARD_NAME).read_bytes())
    file = TokenizerFile(name="vocab.txt", size=len(VOCABULARY), sha256=hashlib.sha256(VOCABULARY).hexdigest())
    tokenizer = card_tokenizer().model_copy(update={"files": (file,)})
    (root / CARD_NAME).write_bytes(card.model_copy(update={"tokenizer": tokenizer}).to_json())
    (root / "tokenizer").mkdir()
    (root / "tokenizer/vocab.txt").write_bytes(VOCABULARY)
    return root


def digest_of(root: Path) -> str:
    return hashlib.sha256((root / CARD_NAME).read_bytes()).hexdigest()


def truth_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def asked_ranges(root: Path) -> list[tuple[str, int, int]]:
    """What readers of this corpus ask, and more of the same shapes."""
    found: list[tuple[str, int, int]] = []
    for path, data in truth_of(root).items():
        if path.endswith("tokens"):
            for start in range(0, len(data), BLOCK_BYTES):
                found += [(path, start, min(start + blocks * BLOCK_BYTES, len(data))) for blocks in (1, 3, 32)]
        elif path.endswith("digests"):
            size = len(truth_of(root)[path.replace("digests", "tokens")])
            found.append((path, *chunk_digests_range(size)))
            found += [(path, *block_digests_range(size, chunk)) for chunk in range(-(-size // CHUNK_BYTES))]
        else:
            found += [(path, start, min(start + PIECE_BYTES, len(data))) for start in range(0, len(data), PIECE_BYTES)]
    return found


def test_a_directory_gives_all_that_readers_ask(root: Path) -> None:
    files, truth = BlockFiles(digest_of(root), root, None), truth_of(root)
    for path, start, stop in asked_ranges(root):
        data = files.read(path, start, stop)
        if path.endswith(".tokens") and start // CHUNK_BYTES != (stop - 1) // CHUNK_BYTES:
            assert data is None  # in two chunks: no reader asks that
        else:
            assert data == truth[path][start:stop]


def test_a_cache_gives_what_was_fetched_and_no_holes(root: Path, tmp_path: Path) -> None:
    digest, truth = digest_of(root), truth_of(root)
    section = DataSection(source="corpus", corpus=digest, tokenizer="bytes", sequence_length=512)
    with CorpusServer(files_of(root)) as server:
        section = section.model_copy(update={"mirrors": (server.address,)})
        opened = open_corpus(section, None, CacheFolder(tmp_path / "cache"), SystemClock())
        opened.reader.read(0, 0, 3 * BLOCK_BYTES, 5 * BLOCK_BYTES)
        opened.fetcher.close()
    files = BlockFiles(digest, None, tmp_path / "cache" / digest)
    web = "web/000000.tokens"
    assert files.read(web, 3 * BLOCK_BYTES, 5 * BLOCK_BYTES) == truth[web][3 * BLOCK_BYTES : 5 * BLOCK_BYTES]
    assert files.read(web, 4 * BLOCK_BYTES, 5 * BLOCK_BYTES) == truth[web][4 * BLOCK_BYTES : 5 * BLOCK_BYTES]
    assert files.read(web, 2 * BLOCK_BYTES, 3 * BLOCK_BYTES) is None
    assert files.read(web, 3 * BLOCK_BYTES, 6 * BLOCK_BYTES) is None
    assert files.read("web/000001.tokens", 0, BLOCK_BYTES) is None
    assert files.read(CARD_NAME, 0, len(truth[CARD_NAME])) == truth[CARD_NAME]
    size = len(WEB[0])
    for start, stop in (chunk_digests_range(size), block_digests_range(size, 0)):
        assert files.read("web/000000.digests", start, stop) == truth["web/000000.digests"][start:stop]
    assert files.read("web/000000.digests", *block_digests_range(size, 1)) is None


def test_a_cache_that_deleted_digests_gives_what_is_fetched_later(root: Path, tmp_path: Path) -> None:
    digest, web = digest_of(root), "web/000000.tokens"
    with CorpusServer(files_of(root)) as server:
        section = DataSection(source="corpus", corpus=digest, mirrors=(server.address,), sequence_length=512)
        opened = open_corpus(section, None, CacheFolder(tmp_path / "cache"), SystemClock())
        opened.reader.read(0, 0, 0, BLOCK_BYTES)
        for file in (tmp_path / "cache" / digest / "blocks").iterdir():  # as the cache does when it is full
            file.unlink()
        opened.reader.read(0, 0, BLOCK_BYTES, 2 * BLOCK_BYTES)  # of a chunk whose digests the reader has
        opened.fetcher.close()
    files = BlockFiles(digest, None, tmp_path / "cache" / digest)
    assert files.read(web, BLOCK_BYTES, 2 * BLOCK_BYTES) == truth_of(root)[web][BLOCK_BYTES : 2 * BLOCK_BYTES]
    assert files.read(web, 0, BLOCK_BYTES) is None


def test_a_pipe_in_the_place_of_a_file_holds_nothing_up(root: Path) -> None:
    files = BlockFiles(digest_of(root), root, None)
    assert files.table() is not None
    path = root / "web" / "000000.digests"
    path.unlink()
    os.mkfifo(path)
    assert files.read("web/000000.tokens", 0, BLOCK_BYTES) is None


def test_what_one_place_lacks_comes_from_the_other(root: Path, tmp_path: Path) -> None:
    digest, truth = digest_of(root), truth_of(root)
    section = DataSection(source="corpus", corpus=digest, mirrors=(str(root),), sequence_length=512)
    with CorpusServer(files_of(root)) as server:
        section = section.model_copy(update={"mirrors": (server.address,)})
        opened = open_corpus(section, None, CacheFolder(tmp_path / "cache"), SystemClock())
        opened.reader.read(0, 0, 0, BLOCK_BYTES)
        opened.fetcher.close()
    damaged = bytearray(truth["web/000000.tokens"])
    damaged[5] ^= 1
    (root / "web/000000.tokens").write_bytes(damaged)
    assert BlockFiles(digest, root, None).read("web/000000.tokens", 0, BLOCK_BYTES) is None
    both = BlockFiles(digest, root, tmp_path / "cache" / digest)
    assert both.read("web/000000.tokens", 0, BLOCK_BYTES) == truth["web/000000.tokens"][:BLOCK_BYTES]


PATHS = st.one_of(
    st.sampled_from(
        [
            "web/000000.tokens",
            "web/000001.tokens",
            "web/000002.tokens",
            "code/000000.digests",
            "web/000000.digests",
            "corpus.json",
            "tokenizer/vocab.txt",
            "tokenizer/../corpus.json",
            "../secret",
            "/etc/passwd",
            "web/../../secret",
            "web/000000.documents",
            "web/00000000.tokens",
            "web/0.tokens",
            "web/٠٠٠٠٠٠.tokens",
            "",
            "\0",
            "web/000000.tokens\n",
        ]
    ),
    st.text(max_size=200),
)
NUMBERS = st.one_of(
    st.integers(0, 40).map(lambda n: n * BLOCK_BYTES),
    st.integers(-5, 3000),
    st.sampled_from([len(WEB[0]), len(VOCABULARY), PIECE_BYTES]),
    st.integers(-(2**63), 2**63),
)


def test_whatever_is_asked_of_damaged_files_the_answer_is_the_corpus_or_nothing(root: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    digest, truth = digest_of(root), truth_of(root)
    asked = st.one_of(st.tuples(PATHS, NUMBERS, NUMBERS), st.sampled_from(asked_ranges(root)))

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(asked, max_size=20), st.randoms(use_true_random=False), st.integers(0, 6))
    def ask(questions: list[tuple[str, int, int]], rng: random.Random, damages: int) -> None:
        for path, content in truth.items():
            (root / path).write_bytes(content)
        for _ in range(damages):
            path = rng.choice(sorted(truth))
            damaged = bytearray(truth[path])
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
            (root / path).write_bytes(rng.choice((damaged, damaged[: rng.randrange(len(damaged))])))
        files = BlockFiles(digest, root, None)
        for path, start, stop in questions:
            data = files.read(path, start, stop)
            assert data is None or (data == truth[path][start:stop] and 0 < len(data) <= MAX_RANGE_BYTES)

    ask()


def test_the_card_of_another_corpus_gives_nothing_and_is_an_error_at_start(root: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_corpus(other, {"web": [text(9, 20_000)]})
    files = BlockFiles(digest_of(root), other, None)
    assert files.read("web/000000.tokens", 0, BLOCK_BYTES) is None
    assert files.read(CARD_NAME, 0, (other / CARD_NAME).stat().st_size) is None
    with pytest.raises(CorpusError, match="has the digest"):
        files.require_directory()
    with pytest.raises(CorpusError, match="cannot be read"):
        BlockFiles(digest_of(root), tmp_path / "none", None).require_directory()


def test_a_directory_says_how_much_it_has(root: Path) -> None:
    assert BlockFiles(digest_of(root), root, None).require_directory().startswith("3 of 3 shards")
    (root / "web/000000.tokens").unlink()
    (root / "code/000000.digests").write_bytes(b"short")
    assert BlockFiles(digest_of(root), root, None).require_directory().startswith("1 of 3 shards")
    (root / "web/000001.tokens").unlink()
    with pytest.raises(CorpusError, match="none of its 3 shards"):
        BlockFiles(digest_of(root), root, None).require_directory()


def test_a_card_that_comes_later_is_found(root: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    files = BlockFiles(digest_of(root), None, cache)
    assert files.table() is None
    cache.mkdir()
    (cache / CARD_NAME).write_bytes(b"{")
    assert files.table() is None
    (cache / CARD_NAME).write_bytes((root / CARD_NAME).read_bytes())
    table = files.table()
    assert table is not None
    assert table.shards == 3


def test_digests_in_memory_have_a_bound(root: Path) -> None:
    files = BlockFiles(digest_of(root), root, None)
    files.digests = KnownDigests(max_bytes=500)
    for path, start, stop in asked_ranges(root):
        files.read(path, start, stop)
    assert sum(map(len, files.digests._known.values())) <= 2048  # the newest one stays


def test_only_shards_of_the_card_have_files() -> None:
    one = Shard(tokens=CHUNK_BYTES, documents=1, sha256="0" * 64, root="1" * 64, documents_sha256="0" * 64)
    source = Source(name="web", shards=(one,) * 300)
    table = CorpusTable(CorpusCard(token_bytes=1, tokenizer=card_tokenizer(), sources=(source,)), "0" * 64, 1)
    assert table.shards == 300
    assert table.range_of("web/000299.tokens", 0, BLOCK_BYTES) is not None
    assert table.range_of("web/000300.tokens", 0, BLOCK_BYTES) is None
