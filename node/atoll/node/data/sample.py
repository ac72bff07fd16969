"""Random windows of a corpus as text, for people who want to inspect it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from atoll.core.errors import CorpusError, NotFound
from atoll.node.data.card import CorpusCard, ShardName, top_bit
from atoll.node.data.corpus_files import open_tokenizer


@dataclass(frozen=True)
class SampleText:
    """A window of a shard, decoded."""

    source: str
    shard: int
    token: int  # number of the first token, counted from the start of the shard
    text: str
    parts: tuple[tuple[bool, str], ...] = ()  # in a corpus with marks: whether it is trained, and text


def sample_texts(
    directory: Path, card: CorpusCard, source: str | None, count: int, tokens: int, seed: int
) -> Iterator[SampleText]:
    """Yield `count` windows of at most `tokens` tokens; each token is as likely as any other to be the first one.

    Raises `NotFound` for an unknown source, `CorpusError`.
    """
    shards = [
        (ShardName(it.name, number), shard)
        for it in card.sources
        if source in (None, it.name)
        for number, shard in enumerate(it.shards)
    ]
    if not shards:
        names = ", ".join(it.name for it in card.sources)
        raise NotFound(f"the corpus has no source {source!r}", f"it has: {names}")
    tokenizer = open_tokenizer(directory, card)
    chance = random.Random(seed)
    for name, shard in chance.choices(shards, [shard.tokens for _, shard in shards], k=count):
        first = chance.randrange(max(1, shard.tokens - tokens + 1))
        path = directory / name.path("tokens")
        size = min(tokens, shard.tokens) * card.token_bytes
        try:
            with path.open("rb") as file:
                file.seek(first * card.token_bytes, os.SEEK_SET)
                data = file.read(size)
        except OSError as error:
            raise CorpusError(f"cannot read {path}: {error.strerror or error}", "check the corpus") from error
        if len(data) != size:
            raise CorpusError(f"{path} is cut short", "run `atoll data verify` on the corpus")
        stored = np.frombuffer(data, dtype=card.dtype)
        top = stored.dtype.type(top_bit(stored.dtype) if card.marks else 0)
        window = stored & stored.dtype.type(card.token_mask)
        text = printable(tokenizer.decode(window.tolist()))
        runs = np.split(np.arange(len(window)), np.flatnonzero(np.diff(stored & top)) + 1) if card.marks else []
        parts = ((not stored[run[0]] & top, printable(tokenizer.decode(window[run].tolist()))) for run in runs)
        yield SampleText(name.source, name.number, first, text, tuple(parts))


def printable(text: str) -> str:
    """Replace control characters, which a terminal would execute: anybody may have written the text of a corpus."""
    return "".join(character if character in "\n\t" or character.isprintable() else "\ufffd" for character in text)
