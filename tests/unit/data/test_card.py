"""A card from anywhere is either sound or refused with a sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from atoll.core.errors import CorpusError
from atoll.node.data.card import (
    MAX_CARD_BYTES,
    MAX_SHARDS,
    CardTokenizer,
    CorpusCard,
    Shard,
    ShardName,
    Source,
    card_digest,
    first_windows,
    parse_card,
    summary,
)

HASH = "ab" * 32
SHARD = Shard(tokens=100, documents=3, sha256=HASH, root=HASH, documents_sha256=HASH)
TOKENIZER = CardTokenizer(name="bytes", digest=HASH, vocabulary=256, separator=(0,))
CARD = CorpusCard(token_bytes=1, tokenizer=TOKENIZER, sources=(Source(name="web", shards=(SHARD, SHARD)),))

Change = Callable[[dict[str, Any]], object]


def test_a_card_is_what_was_written() -> None:
    data = CARD.to_json()
    assert parse_card(data) == parse_card(data, card_digest(data)) == CARD
    assert parse_card(data).to_json() == data
    assert (CARD.tokens, CARD.documents, CARD.dtype.itemsize) == (200, 6, 1)
    assert summary(CARD)["sources"] == [{"name": "web", "tokens": 200, "documents": 6, "shards": 2}]


def test_another_digest_is_refused() -> None:
    with pytest.raises(CorpusError, match="the run demands"):
        parse_card(CARD.to_json(), "0" * 64)


@pytest.mark.parametrize(
    "change",
    [
        lambda card: card["sources"][0].update(name="../web"),
        lambda card: card["sources"][0].update(name="/etc"),
        lambda card: card["sources"][0].update(name=".."),
        lambda card: card["sources"][0].update(name=""),
        lambda card: card["sources"][0].update(name="a\0b"),
        lambda card: card["sources"][0].update(name="tokenizer"),
        lambda card: card["sources"][0].update(name="web\n"),
        lambda card: card["sources"][0].update(shards=[]),
        lambda card: card["sources"].append(card["sources"][0]),
        lambda card: card["sources"][0]["shards"][0].update(tokens=0),
        lambda card: card["sources"][0]["shards"][0].update(tokens=1 << 40),
        lambda card: card["sources"][0]["shards"][0].update(tokens="100"),
        lambda card: card["sources"][0]["shards"][0].update(root="zz" * 32),
        lambda card: card["sources"][0]["shards"][0].pop("documents_sha256"),
        lambda card: card["sources"][0]["shards"][0].update(path="/etc/passwd"),
        lambda card: card["tokenizer"].update(vocabulary=257),
        lambda card: card["tokenizer"].update(separator=[256]),
        lambda card: card["tokenizer"].update(files=[{"name": "../x", "size": 1, "sha256": HASH}]),
        lambda card: card["tokenizer"].update(files=[{"name": "run.py", "size": 1, "sha256": HASH}]),
        lambda card: card["tokenizer"].update(files=[{"name": "vocab.json", "size": 1 << 40, "sha256": HASH}]),
        lambda card: card.update(version=2),
        lambda card: card.update(format="other"),
        lambda card: card.update(token_bytes=8),
        lambda card: card.update(sources=[]),
        lambda card: card.update(extra=1),
        lambda card: card.update(left_out={"lines": -1}),
    ],
)
def test_a_forged_card_is_refused(change: Change) -> None:
    card = json.loads(CARD.to_json())
    change(card)
    with pytest.raises(CorpusError, match="the corpus card"):
        parse_card(json.dumps(card).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[" * 100_000, b"\xff", b"null", b'{"format":"atoll-corpus"}'])
def test_what_is_no_card_is_refused(data: bytes) -> None:
    with pytest.raises(CorpusError, match="cannot be read"):
        parse_card(data)


def test_a_card_of_a_million_shards_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    row = SHARD.model_dump_json()
    data = CARD.to_json().replace(row.encode(), (row + "," + row).encode())
    huge = b'{"sources":[{"name":"web","shards":[' + b",".join([row.encode()] * 1_000_000) + b"]}]}"
    assert len(huge) > MAX_CARD_BYTES > len(data)
    monkeypatch.setattr(CorpusCard, "model_validate_json", lambda _: pytest.fail("it is parsed"))
    with pytest.raises(CorpusError, match="larger than 64 MiB") as refused:
        parse_card(huge)
    assert "larger shards" in refused.value.remedy


def test_the_most_shards_fit_in_a_card() -> None:
    largest = SHARD.model_copy(update={"tokens": 1 << 33, "documents": 1 << 33})
    assert len(largest.model_dump_json()) * MAX_SHARDS < MAX_CARD_BYTES


def test_names_of_files_follow_from_source_and_number() -> None:
    assert ShardName("web", 12).path("tokens") == "web/000012.tokens"
    assert ShardName("web", 1_234_567).path("digests") == "web/1234567.digests"


def test_windows_lie_in_one_shard() -> None:
    source = Source(name="a", shards=tuple(SHARD.model_copy(update={"tokens": n}) for n in (33, 32, 1, 65)))
    assert list(first_windows(source, 16)) == [0, 2, 3, 3, 7]
