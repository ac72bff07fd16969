"""Small corpora for tests: input text, builds without processes, and reading back."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from support.inline_pool import InlinePool

from atoll.node.data.build import BuiltCorpus, build_corpus
from atoll.node.data.build_schedule import Limits
from atoll.node.data.build_spec import BuildSource, BuildSpec
from atoll.node.data.card import CorpusCard, ShardName

SMALL = Limits(unit_bytes=200, group_bytes=600, group_documents=20, group_units=5)


def write_jsonl(path: Path, documents: Sequence[str]) -> Path:
    """Write one object a line."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    return path


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write one object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def small_spec(*paths: Path, shard_bytes: int = 256, **values: Any) -> BuildSpec:
    """A spec of sources "s0", "s1", …, with shards smaller than a user may ask for."""
    sources = tuple(BuildSource(name=f"s{i}", source="jsonl", path=str(path)) for i, path in enumerate(paths))
    return BuildSpec(sources=sources, **values).model_copy(update={"shard_bytes": shard_bytes})


def build_inline(spec: BuildSpec, directory: Path, *, chance: int = 0, workers: int = 2, **options: Any) -> BuiltCorpus:
    """Build without other processes; tasks end in an order that `chance` decides."""
    pool = partial(InlinePool, chance=random.Random(chance))
    return build_corpus(spec, directory, workers=workers, start_pool=pool, **{"limits": SMALL, **options})


def tokens_of(directory: Path, card: CorpusCard, source: str) -> np.ndarray[Any, Any]:
    """All tokens of a source, shard after shard."""
    (found,) = (it for it in card.sources if it.name == source)
    files = (directory / ShardName(source, number).path("tokens") for number in range(len(found.shards)))
    return np.concatenate([np.fromfile(file, dtype=card.dtype) for file in files])


def documents_of(directory: Path, card: CorpusCard, source: str) -> list[bytes]:
    """All documents of a source of bytes, without separators, cut where the files of documents say."""
    (found,) = (it for it in card.sources if it.name == source)
    documents, first = [], 0
    tokens, offset = tokens_of(directory, card, source).tobytes(), 0
    for number, shard in enumerate(found.shards):
        for end in np.fromfile(directory / ShardName(source, number).path("documents"), dtype="<u8").tolist():
            documents.append(tokens[first : offset + end].removesuffix(b"\0"))
            first = offset + end
        offset += shard.tokens
    assert first == offset, "the last document ends with the last shard"
    return documents


def files_of(directory: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
