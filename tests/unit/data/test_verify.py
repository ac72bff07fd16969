"""`verify_corpus` finds every change to a corpus and names the file; `sample_texts` shows what is in it."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.corpora import build_inline, files_of, small_spec, write_jsonl
from support.inline_pool import InlinePool

from atoll.core.errors import CorpusError, NotFound
from atoll.node.data.blocks import hash_shard
from atoll.node.data.card import CARD_NAME, CorpusCard, Shard
from atoll.node.data.corpus_files import fetch_card, open_tokenizer, read_card
from atoll.node.data.sample import printable, sample_texts
from atoll.node.data.verify import verify_corpus

DOCUMENTS = [f"document {number}: " + "words and " * (number % 7) for number in range(60)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    path = write_jsonl(folder / "in.jsonl", DOCUMENTS)
    build_inline(small_spec(path, path, shard_bytes=300), folder / "corpus")
    return folder / "corpus"


@pytest.fixture
def corpus(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built, tmp_path / "corpus"))


def wrong_in(corpus: Path, card: CorpusCard | None = None) -> list[str]:
    return verify_corpus(corpus, card or read_card(corpus)[0], 2, start_pool=InlinePool)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def forge(corpus: Path, source: int, number: int, **values: object) -> CorpusCard:
    """The corpus's card with another description of one shard."""
    card = read_card(corpus)[0]
    found = card.sources[source]
    shards = list(found.shards)
    shards[number] = shards[number].model_copy(update=values)
    sources = list(card.sources)
    sources[source] = found.model_copy(update={"shards": tuple(shards)})
    return card.model_copy(update={"sources": tuple(sources)})


def test_a_sound_corpus_has_nothing_wrong(corpus: Path) -> None:
    seen: list[tuple[int, int]] = []
    card = read_card(corpus)[0]
    assert verify_corpus(corpus, card, 2, lambda *progress: seen.append(progress), InlinePool) == []
    assert seen == sorted(seen)
    assert seen[-1] == (card.tokens, card.tokens)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda it: flip(it / "s0/000002.tokens", 7), "s0/000002.tokens is damaged in block 0"),
        (lambda it: (it / "s0/000001.tokens").unlink(), "s0/000001.tokens is missing"),
        (lambda it: (it / "s0/000001.digests").unlink(), "s0/000001.digests is missing"),
        (lambda it: (it / "s0/000001.documents").unlink(), "s0/000001.documents is missing"),
        (lambda it: os.truncate(it / "s1/000000.tokens", 299), "s1/000000.tokens has 299 bytes, and the card"),
        (lambda it: os.truncate(it / "s1/000000.tokens", 301), "s1/000000.tokens has 301 bytes"),
        (lambda it: os.truncate(it / "s1/000000.documents", 8), "s1/000000.documents has 8 bytes"),
        (lambda it: os.truncate(it / "s1/000000.digests", 16), "s1/000000.digests has 16 bytes"),
        (lambda it: flip(it / "s0/000000.digests", 3), "s0/000000.digests does not have the root"),
        (lambda it: flip(it / "s0/000000.digests", 20), "s0/000000.digests has wrong digests of the blocks in chunk 0"),
        (lambda it: flip(it / "s0/000003.documents", 0), "s0/000003.documents has another SHA-256"),
        (lambda it: swap(it / "s0/000000.tokens", it / "s0/000001.tokens"), "s0/000000.tokens is damaged in block 0"),
    ],
)  # fmt: skip
def test_a_change_is_found_and_named(damage: Callable[[Path], object], told: str, corpus: Path) -> None:
    damage(corpus)
    assert wrong_in(corpus)[0].startswith(told)


def test_all_wrong_shards_are_named_in_order(corpus: Path) -> None:
    for name in ("s1/000001", "s0/000004", "s0/000002"):
        flip(corpus / f"{name}.tokens", 0)
    assert [wrong.partition(".")[0] for wrong in wrong_in(corpus)] == ["s0/000002", "s0/000004", "s1/000001"]


def test_shards_in_another_order_are_found(corpus: Path) -> None:
    for suffix in ("tokens", "digests", "documents"):
        swap(corpus / f"s0/000000.{suffix}", corpus / f"s0/000001.{suffix}")
    assert len([wrong for wrong in wrong_in(corpus) if wrong.startswith(("s0/000000", "s0/000001"))]) == 2


def test_a_forged_card_is_found(corpus: Path) -> None:
    assert "has another SHA-256" in wrong_in(corpus, forge(corpus, 0, 1, sha256="0" * 64))[0]
    assert "does not have the root" in wrong_in(corpus, forge(corpus, 0, 1, root="0" * 64))[0]
    assert "s0/000001.digests" in wrong_in(corpus, forge(corpus, 0, 1, tokens=1 << 24))[0]


def test_ends_outside_the_shard_and_tokens_outside_the_vocabulary_are_found(corpus: Path) -> None:
    """A builder that is wrong, or forges everything alike."""
    first = read_card(corpus)[0].sources[0].shards[0]
    for ends in ([0, *range(2, first.documents + 1)], [*range(1, first.documents), 301], [5] * first.documents):
        data = np.asarray(ends, "<u8").tobytes()
        (corpus / "s0/000000.documents").write_bytes(data)
        card = forge(corpus, 0, 0, documents_sha256=hashlib.sha256(data).hexdigest(), documents=len(ends))
        assert "ends of documents" in wrong_in(corpus, card)[0]
    _rewrite(corpus / "s0/000001", b"\xff" * 300)
    shard = _rewrite(corpus / "s0/000000", bytes(299) + b"\xff")
    card = forge(corpus, 0, 0, sha256=shard.sha256, root=shard.root)
    small = card.model_copy(update={"tokenizer": card.tokenizer.model_copy(update={"vocabulary": 255})})
    assert wrong_in(corpus, small)[0] == "s0/000000.tokens has the token 255 in block 0, and the vocabulary has 255"


def _rewrite(path: Path, data: bytes) -> Shard:
    root, digests = hash_shard([data])
    path.with_suffix(".tokens").write_bytes(data)
    path.with_suffix(".digests").write_bytes(digests)
    checksum = hashlib.sha256(data).hexdigest()
    return Shard(tokens=len(data), documents=0, sha256=checksum, root=root, documents_sha256=checksum)


def test_a_directory_without_a_card_is_no_corpus(corpus: Path) -> None:
    (corpus / CARD_NAME).unlink()
    with pytest.raises(NotFound, match=r"no corpus: it has no corpus\.json"):
        read_card(corpus)
    (corpus / ".build").mkdir()
    with pytest.raises(NotFound, match="not complete"):
        read_card(corpus)
    (corpus / CARD_NAME).write_bytes(b"{}")
    with pytest.raises(CorpusError, match="cannot be read"):
        fetch_card(str(corpus))


def test_samples_are_windows_of_the_corpus(corpus: Path) -> None:
    card = read_card(corpus)[0]
    samples = list(sample_texts(corpus, card, "s1", 20, 50, seed=3))
    assert samples == list(sample_texts(corpus, card, "s1", 20, 50, seed=3))
    assert samples != list(sample_texts(corpus, card, "s1", 20, 50, seed=4))
    files = files_of(corpus)
    for sample in samples:
        assert sample.source == "s1"
        window = files[f"s1/{sample.shard:06d}.tokens"][sample.token : sample.token + 50]
        assert sample.text == printable(window.decode())
        assert len(sample.text) == len(window)
    assert {sample.source for sample in sample_texts(corpus, card, None, 40, 5, 0)} == {"s0", "s1"}
    with pytest.raises(NotFound, match="no source 's2'"):
        list(sample_texts(corpus, card, "s2", 1, 5, 0))


def test_a_sample_of_a_damaged_corpus_is_an_error(corpus: Path) -> None:
    card = read_card(corpus)[0]
    for path in (corpus / "s0").glob("*.tokens"):
        os.truncate(path, 10)
    with pytest.raises(CorpusError, match="cut short"):
        list(sample_texts(corpus, card, "s0", 5, 50, 0))


def test_text_cannot_command_a_terminal() -> None:
    assert printable("a\x1b[2Jb\r\n\tü\u202ec") == "a\ufffd[2Jb\ufffd\n\tü\ufffdc"


def test_another_tokenizer_than_the_cards_is_refused(corpus: Path) -> None:
    card = read_card(corpus)[0]
    other = card.model_copy(update={"tokenizer": card.tokenizer.model_copy(update={"digest": "0" * 64})})
    with pytest.raises(CorpusError, match="not the one that made the tokens"):
        open_tokenizer(corpus, other)
