"""Corpus cards: what is read back, and what is refused."""

import json
from typing import Any

import pytest
from benchmarks.corpus_server import card_tokenizer

from atoll.core.errors import CorpusError
from atoll.node.data import card as cards
from atoll.node.data.card import CorpusCard, Shard, ShardName, Source, card_digest, first_windows, parse_card

SHARD = Shard(tokens=100, documents=3, sha256="a" * 64, root="b" * 64, documents_sha256="c" * 64)


def a_card(**changes: Any) -> dict[str, Any]:
    card = CorpusCard(
        token_bytes=1, tokenizer=card_tokenizer(), sources=(Source(name="web", shards=(SHARD, SHARD)),)
    ).model_dump(mode="json")
    return {**card, **changes}


def test_a_card_is_read_back_and_known_by_its_digest() -> None:
    card = CorpusCard(token_bytes=1, tokenizer=card_tokenizer(), sources=(Source(name="web", shards=(SHARD,) * 3),))
    data = card.to_json()
    assert parse_card(data, card_digest(data)) == card
    assert (card.tokens, card.documents, card.shard_bytes(SHARD)) == (300, 9, 100)
    with pytest.raises(CorpusError, match=r"has the digest .*, and the run demands"):
        parse_card(data.replace(b"100", b"101", 1), card_digest(data))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "version"),
        ({"sources": []}, "sources"),
        ({"more": 1}, "more"),
        ({"token_bytes": 3}, "token_bytes"),
        ({"sources": [{"name": "web", "shards": []}]}, "shards"),
        ({"sources": [{"name": "../../etc", "shards": [SHARD.model_dump()]}]}, "cannot be the name of a source"),
        ({"sources": [{"name": "tokenizer", "shards": [SHARD.model_dump()]}]}, "cannot be the name of a source"),
        ({"sources": [{"name": "Web", "shards": [SHARD.model_dump()]}]}, "cannot be the name of a source"),
        ({"sources": [{"name": "a", "shards": [SHARD.model_dump()]}] * 2}, "two sources have one name"),
        ({"sources": [{"name": "a", "shards": [{**SHARD.model_dump(), "tokens": 1 << 40}]}]}, "larger than"),
        ({"sources": [{"name": "a", "shards": [{**SHARD.model_dump(), "tokens": 0}]}]}, "tokens"),
        ({"sources": [{"name": "a", "shards": [{**SHARD.model_dump(), "root": "B" * 64}]}]}, "root"),
        ({"tokenizer": {**a_card()["tokenizer"], "vocabulary": 257}}, "too narrow"),
        ({"tokenizer": {**a_card()["tokenizer"], "separator": [256]}}, "separator"),
        (
            {"tokenizer": {**a_card()["tokenizer"], "files": [{"name": "x.py", "size": 1, "sha256": "a" * 64}]}},
            "no tokenizer has",
        ),
        (
            {"tokenizer": {**a_card()["tokenizer"], "files": [{"name": "../a", "size": 1, "sha256": "a" * 64}]}},
            "no tokenizer has",
        ),
    ],
)
def test_forged_and_impossible_cards_are_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CorpusError, match=problem):
        parse_card(json.dumps(a_card(**changes)).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 50_000])
def test_what_is_no_card_is_refused_in_one_sentence(data: bytes) -> None:
    with pytest.raises(CorpusError, match="cannot be read") as caught:
        parse_card(data)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_card_of_too_many_shards_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "MAX_CARD_BYTES", 1000)
    with pytest.raises(CorpusError, match="larger than"):
        parse_card(b" " * 1001)


def test_names_of_files_follow_from_source_and_number() -> None:
    assert ShardName("web", 12).path("tokens") == "web/000012.tokens"
    assert ShardName("web", 1_234_567).path("digests") == "web/1234567.digests"


def test_windows_lie_in_one_shard() -> None:
    source = Source(name="a", shards=tuple(SHARD.model_copy(update={"tokens": n}) for n in (33, 32, 1, 65)))
    assert list(first_windows(source, 16)) == [0, 2, 3, 3, 7]
