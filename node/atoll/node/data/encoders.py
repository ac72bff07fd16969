"""Encoding of text with a Hugging Face tokenizer so that text never becomes a special token.

The Rust library behind most tokenizers encodes many texts at once. Text that spells a special token ("<|endoftext|>")
becomes ordinary tokens: only the end of a document is the separator. Tokenizers without the library encode one by one.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.node.model.tokenizer import HuggingFaceTokenizer, Tokenizer


@dataclass(frozen=True)
class Encoding:
    """The tokens of a text that begins at character `start` of its document and ends before `stop`."""

    start: int
    stop: int
    parts: tuple[tuple[int, Any], ...]  # offset in the document, and the library's encoding of the text from there on

    @cached_property
    def ids(self) -> NDArray[np.uint32]:
        """Token numbers, 1-D."""
        return np.concatenate([np.asarray(part.ids, dtype=np.uint32) for _, part in self.parts])

    @cached_property
    def _firsts(self) -> list[int]:
        return [0, *np.cumsum([len(part) for _, part in self.parts]).tolist()]

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def span(self, index: int) -> tuple[int, int]:
        """Return the characters [start, end) of the document that a token encodes."""
        part, inside = self._locate(index)
        offset, encoding = self.parts[part]
        start, end = encoding.token_to_chars(inside) or (0, 0)
        return offset + start, offset + end

    def word(self, index: int) -> tuple[int, int | None]:
        """Return the part, and the number of the word (pre-token) that contains a token."""
        part, inside = self._locate(index)
        return part, self.parts[part][1].token_to_word(inside)

    def _locate(self, index: int) -> tuple[int, int]:
        part = bisect_right(self._firsts, index) - 1
        return part, index - self._firsts[part]

    def first_at(self, position: int) -> int:
        """Return the number of the first token that starts at character `position` or later."""
        low, high = 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self.span(middle)[0] < position:
                low = middle + 1
            else:
                high = middle
        return low


def describe(rust_description: str, separator: Sequence[int], special: Sequence[int]) -> dict[str, Any]:
    """Return the library's description of a tokenizer, which is JSON, with all special tokens marked as such."""
    description: dict[str, Any] = json.loads(rust_description)
    never = {*separator, *special}
    for token in description["added_tokens"]:
        token["special"] = token["special"] or token["id"] in never
    description["truncation"] = description["padding"] = None
    return description


class FastEncoder:
    """Encodes with a copy of the Rust tokenizer in which no special token is recognised in text."""

    def __init__(self, description: str, separator: Sequence[int], model: str, longest_piece: int) -> None:
        """`description`: the library's JSON; `separator`: tokens that end a document.

        `model` is the description's kind of model; `longest_piece` is the number of characters of a Unigram model's
        longest piece.
        """
        from tokenizers import Tokenizer

        self.description, self.model, self.longest_piece = description, model, longest_piece
        self._tokenizer = Tokenizer.from_str(description)
        self._separator = {number: str(self._tokenizer.id_to_token(number)) for number in separator}
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def of(cls, rust_description: str, separator: Sequence[int], special: Sequence[int]) -> FastEncoder:
        """Make an encoder from the library's description of a tokenizer."""
        description = describe(rust_description, separator, special)
        model = str(description["model"].get("type"))
        longest = max(len(piece) for piece, _ in description["model"]["vocab"]) if model == "Unigram" else 0
        return cls(json.dumps(description), separator, model, longest)

    def with_description(self, description: str) -> FastEncoder:
        """Return an encoder with another description of the same tokens."""
        return FastEncoder(description, [*self._separator], self.model, self.longest_piece)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text, 1-D."""
        found = [
            np.asarray(encoding.ids, dtype=np.uint32)
            for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        ]
        return [
            self.encode_pieces([(0, text)])[0].ids if self._has_separator(ids) else ids
            for ids, text in zip(found, texts, strict=True)
        ]

    def encode_pieces(self, pieces: Sequence[tuple[int, str]]) -> list[Encoding]:
        """Encode texts with the positions of their tokens. A piece is its offset in the document, and its text."""
        texts = [text for _, text in pieces]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [
            Encoding(offset, offset + len(text), tuple(self._without_separator(offset, text, encoding)))
            for (offset, text), encoding in zip(pieces, encodings, strict=True)
        ]

    def spelling(self, separator: int) -> str:
        """Return how a token that ends a document is spelt."""
        return self._separator[separator]

    def _has_separator(self, ids: NDArray[np.uint32]) -> bool:
        return any(bool((ids == number).any()) for number in self._separator)

    def _without_separator(self, offset: int, text: str, encoding: Any) -> list[tuple[int, Any]]:
        """Cut the text inside every separator spelling, and encode the parts separately.

        A vocabulary can hold the separator's spelling as an ordinary word (WordLevel and Unigram do).
        """
        if not self._has_separator(np.asarray(encoding.ids, dtype=np.uint32)):
            return [(offset, encoding)]
        cuts = [0]
        for number, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            spelling = self._separator.get(number, "")
            at = text.find(spelling, start, end) if len(spelling) > 1 else -1
            if at >= 0:
                cuts.append(at + 1)
        if len(cuts) == 1:  # the token encodes other text: it is the unknown token of some vocabularies
            return [(offset, encoding)]
        parts: list[tuple[int, Any]] = []
        for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
            part = text[start:end]
            parts += self._without_separator(
                offset + start, part, self._tokenizer.encode(part, add_special_tokens=False)
            )
        return parts


class SlowEncoder:
    """Encodes one text after the other with a tokenizer that is written in Python."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.uint32]]:
        """Encode each text, 1-D."""
        return [
            np.asarray(self._library.encode(text, add_special_tokens=False, split_special_tokens=True), dtype=np.uint32)
            for text in texts
        ]


@lru_cache(maxsize=2)
def encoder_of(tokenizer: HuggingFaceTokenizer) -> FastEncoder | SlowEncoder:
    """Return the fastest encoder for a tokenizer. It is cached for each object, because making one takes up to 1 s."""
    try:
        return FastEncoder.of(tokenizer.rust_description(), tokenizer.separator, tokenizer.library.all_special_ids)
    except Exception:  # the library raises plain `Exception` for parts that are written in Python
        return SlowEncoder(tokenizer.library)


def description_of(tokenizer: Tokenizer) -> str:
    """Return a digest of everything that a tokenizer's tokens depend on."""
    parts: list[Any] = [tokenizer.vocabulary, tokenizer.separator]
    if isinstance(tokenizer, HuggingFaceTokenizer):
        library = tokenizer.library
        parts += [type(library).__name__, tokenizers_version(), sorted(library.all_special_ids)]
        try:
            parts.append(describe(library.backend_tokenizer.to_str(), tokenizer.separator, library.all_special_ids))
        except Exception:  # as in `encoder_of`
            parts += [sorted(library.get_vocab().items()), repr(sorted(library.init_kwargs.items()))]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def tokenizers_version() -> str:
    """Return the versions of the libraries that encode."""
    return " ".join(version(name) for name in ("transformers", "tokenizers"))
