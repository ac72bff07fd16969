"""The corpus card: what a corpus contains, in one JSON file that is known by its SHA-256.

A corpus is a directory, or the same files behind a URL:

    corpus.json                    the card
    tokenizer/…                    the files of its tokenizer; absent for bytes
    web/000000.tokens              a shard of the source "web": tokens, little-endian, without a header
    web/000000.digests             its hashes (`data/blocks.py`)
    web/000000.documents           where its documents end: token offsets, little-endian, 8 bytes each

A document may be cut at the end of a shard: it continues at the start of the next one. Its end is listed by the shard
that has its last token, and that shard counts it. So a shard may contain no end of a document.

A run names the digest of the card. The card has the root of each shard's hashes, so that a reader can verify any block
of any shard from any mirror. Names of files follow from the names of sources and from numbers: the card contains no
path. A card comes from a mirror, so every field is checked before use.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.core.errors import CorpusError
from atoll.node.data.blocks import MAX_SHARD_BYTES

if TYPE_CHECKING:  # a seed reads cards, but numpy is not installed there
    import numpy as np
    from numpy.typing import NDArray

CARD_NAME = "corpus.json"
MAX_SOURCES = 1024
MAX_CARD_BYTES = 64 << 20
MAX_SHARDS = 200_000  # fit in a card: 13 TB in shards of 64 MiB
TOKENIZER_DIRECTORY = "tokenizer"
MAX_TOKENIZER_BYTES = 256 << 20
TOKENIZER_FILES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
        "vocab.txt",
    }
)
SOURCE_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
CARD_DIGEST = re.compile(r"[0-9a-f]{64}")

_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Number = Annotated[int, Field(ge=0, lt=1 << 62)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TokenizerFile(_Strict):
    """A file of the tokenizer, by name in the tokenizer's directory."""

    name: str
    size: Annotated[int, Field(ge=0, le=MAX_TOKENIZER_BYTES)]
    sha256: _Sha256


class CardTokenizer(_Strict):
    """The tokenizer that made the tokens."""

    name: Annotated[str, Field(min_length=1, max_length=1024)]
    digest: _Sha256  # of its behaviour, not of its name (`Tokenizer.digest`)
    vocabulary: Annotated[int, Field(ge=2, le=1 << 32)]
    separator: Annotated[tuple[Annotated[int, Field(ge=0, lt=1 << 32)], ...], Field(max_length=16, strict=False)]
    files: Annotated[tuple[TokenizerFile, ...], Field(max_length=len(TOKENIZER_FILES), strict=False)] = ()


class Shard(_Strict):
    """A shard: how much it contains, and its hashes."""

    tokens: Annotated[int, Field(ge=1)]
    documents: _Number
    sha256: _Sha256  # of the file of tokens, so that people can check it with `sha256sum`
    root: _Sha256  # of the Merkle tree over the shard's blocks
    documents_sha256: _Sha256  # of the file of documents
    targets: _Number | None = None  # number of tokens that are not input only; set in a corpus with marks


class Source(_Strict):
    """A named part of a corpus, which a mixture can weigh."""

    name: str
    shards: Annotated[tuple[Shard, ...], Field(min_length=1, strict=False)]

    @cached_property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @cached_property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @cached_property
    def targets(self) -> int:
        """The number of tokens that are not input only."""
        return sum(shard.tokens if shard.targets is None else shard.targets for shard in self.shards)


class CorpusCard(_Strict):
    """A corpus. Make one with `CorpusCard(...)`, read one with `parse_card`."""

    format: Literal["atoll-corpus"] = "atoll-corpus"
    version: Literal[1, 2] = 1  # 2: with marks, and with bits that mark starts of documents
    token_bytes: Literal[1, 2, 4]
    marks: bool = False  # the top bit of a token says: input only, not a target
    tokenizer: CardTokenizer
    sources: Annotated[tuple[Source, ...], Field(min_length=1, max_length=MAX_SOURCES, strict=False)]
    # input that the build did not use, by kind: rows without text, lines that are no JSON
    left_out: dict[str, _Number] = {}

    @property
    def tokens(self) -> int:
        return sum(source.tokens for source in self.sources)

    @property
    def documents(self) -> int:
        return sum(source.documents for source in self.sources)

    @property
    def starts(self) -> bool:
        """Whether the second bit of a token says: a document starts here."""
        return self.version == 2

    @property
    def token_mask(self) -> int:
        """Return the bits of a stored token that are its number."""
        return (1 << (8 * self.token_bytes - self.marks - self.starts)) - 1

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Return the type of a stored token."""
        import numpy as np  # imported here, because numpy is not installed on a seed

        return np.dtype(f"<u{self.token_bytes}")

    def to_json(self) -> bytes:
        """Return the card as JSON. `card_digest` of these bytes identifies the corpus."""
        values = self.model_dump(mode="json")
        if not self.marks:  # as earlier releases wrote it
            del values["marks"]
            for source in values["sources"]:
                for shard in source["shards"]:
                    del shard["targets"]
        return json.dumps(values, separators=(",", ":"), sort_keys=True).encode() + b"\n"

    def shard_bytes(self, shard: Shard) -> int:
        """Return the size of a shard's file of tokens."""
        return shard.tokens * self.token_bytes


def top_bit(dtype: np.dtype[Any]) -> int:
    """Return the bit of a stored token that says: input only."""
    return 1 << (8 * dtype.itemsize - 1)


def start_bit(dtype: np.dtype[Any]) -> int:
    """Return the bit of a stored token that says: a document starts here."""
    return top_bit(dtype) >> 1


def count_marks(tokens: NDArray[Any]) -> int:
    """Count the stored tokens that are input only."""
    import numpy as np  # imported here as in `dtype`

    return int(np.count_nonzero(tokens & tokens.dtype.type(top_bit(tokens.dtype))))


@dataclass(frozen=True)
class ShardName:
    """A shard by its place in a card."""

    source: str
    number: int

    def path(self, suffix: Literal["tokens", "digests", "documents"]) -> str:
        """Return the path of one of the shard's files, relative to the corpus."""
        return f"{self.source}/{self.number:06d}.{suffix}"


def card_digest(data: bytes) -> str:
    """Return the digest by which a run spec names its corpus."""
    return hashlib.sha256(data).hexdigest()


def parse_card(data: bytes, digest: str | None = None) -> CorpusCard:
    """Parse a card. Raises `CorpusError` for a forged or impossible one. `digest`: the one that the run demands."""
    if len(data) > MAX_CARD_BYTES:
        raise CorpusError(
            f"the corpus card is larger than {MAX_CARD_BYTES >> 20} MiB", "build the corpus with larger shards"
        )
    if digest is not None and card_digest(data) != digest:
        raise CorpusError(
            f"the corpus card has the digest {card_digest(data)[:12]}…, and the run demands {digest[:12]}…",
            "use the corpus that the run names, or a mirror of it",
        )
    try:
        card = CorpusCard.model_validate_json(data)
    except (ValidationError, ValueError, RecursionError) as error:
        raise CorpusError(
            f"the corpus card cannot be read: {_first_problem(error)}", "build the corpus again"
        ) from error
    if problem := _find_problem(card):
        raise CorpusError(f"the corpus card contradicts itself: {problem}", "build the corpus again")
    return card


def _first_problem(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        return f"{where}: {first['msg']}" if where else first["msg"]
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _find_problem(card: CorpusCard) -> str:
    names = [source.name for source in card.sources]
    for name in names:
        if not SOURCE_NAME.fullmatch(name) or name == TOKENIZER_DIRECTORY:
            return f"{name[:80]!r} cannot be the name of a source"
    if len(set(names)) != len(names):
        return "two sources have one name"
    if card.starts and not card.marks:
        return "it is of version 2 and has no marks"
    if card.tokenizer.vocabulary > card.token_mask + 1:
        return f"tokens of {card.token_bytes} bytes are too narrow for {card.tokenizer.vocabulary:,} values"
    if any(token >= card.tokenizer.vocabulary for token in card.tokenizer.separator):
        return "the separator is not in the vocabulary"
    files = [file.name for file in card.tokenizer.files]
    if any(name not in TOKENIZER_FILES for name in files) or len(set(files)) != len(files):
        return "it names a tokenizer file that no tokenizer has"
    if sum(file.size for file in card.tokenizer.files) > MAX_TOKENIZER_BYTES:
        return f"the files of its tokenizer are larger than {MAX_TOKENIZER_BYTES >> 20} MiB"
    shards = [shard for source in card.sources for shard in source.shards]
    if any((shard.targets is not None) != card.marks or (shard.targets or 0) > shard.tokens for shard in shards):
        return "its shards do not tell how many of their tokens are targets, or impossible numbers"
    if any(card.shard_bytes(shard) > MAX_SHARD_BYTES for shard in shards):
        return f"a shard is larger than {MAX_SHARD_BYTES >> 30} GiB"
    return ""


def first_windows(source: Source, sequence_length: int) -> Sequence[int]:
    """Return the number of the first window of each shard, followed by the number of all windows.

    A window of `sequence_length` + 1 tokens lies in one shard: a shard of n tokens has (n − 1) // `sequence_length`.
    """
    return list(accumulate(((shard.tokens - 1) // sequence_length for shard in source.shards), initial=0))


def summary(card: CorpusCard) -> dict[str, object]:
    """Return the document that `atoll data show` prints: a card without its shards."""
    return {
        "tokens": card.tokens,
        "documents": card.documents,
        "token_bytes": card.token_bytes,
        "tokenizer": card.tokenizer.model_dump(mode="json", exclude={"files"}),
        "sources": [
            {"name": s.name, "tokens": s.tokens, "documents": s.documents, "shards": len(s.shards)}
            | ({"targets": s.targets} if card.marks else {})
            for s in card.sources
        ],
        "left_out": card.left_out,
    }
