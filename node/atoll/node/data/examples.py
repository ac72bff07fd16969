"""Instruction data becomes tokens: tokens of answers are targets, and all others are input only.

The text of an example is tokenised once, as a whole. A token is a target if any character that it stands for is in an
answer. So a token that begins before an answer and reaches into it is a target, as is one that reaches beyond it.

Input only is the top bit of a stored token. Special tokens that a chat template writes are special; those that
messages, prompts or completions spell are text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.node.data.card import top_bit
from atoll.node.data.chat_template import MAX_TEXT_CHARACTERS, ChatFormat, ChatTemplate, Rendered, TooLong, Unusable
from atoll.node.data.corpus_tokenizer import CorpusTokenizer, load_saved
from atoll.node.data.encoders import FastEncoder, encoder_of
from atoll.node.data.row_values import Bad, Conversation, Pair, refuse
from atoll.node.data.source_report import SourceReport
from atoll.node.data.tokenise import require_known_tokens, token_dtype
from atoll.node.model.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

_UNUSABLE_REMEDY = "leave that conversation out, or name another template with chat_template"


@dataclass(frozen=True)
class ExampleLength:
    """How to treat long examples."""

    longest: int | None = None  # tokens; None: examples are whole
    cuts: bool = False  # cut longer examples at the end; otherwise they are left out


WHOLE_EXAMPLES = ExampleLength()


class Encoded(NamedTuple):
    """The tokens of an example."""

    tokens: NDArray[Any]
    is_target: NDArray[np.bool_]


class ExampleEncoder:
    """Encodes conversations, and prompts with completions."""

    def __init__(self, tokenizer: Tokenizer, chat: ChatFormat | None) -> None:
        """Raises `ConfigError` for a tokenizer without token positions, and for a template that does not compile."""
        self.tokenizer = tokenizer
        self._fast = None if isinstance(tokenizer, ByteTokenizer) else _fast_encoder(tokenizer)
        self._template = ChatTemplate(chat) if chat is not None else None
        self._with_special = _recognising_special_tokens(self._fast) if self._fast is not None else None

    def encode(self, example: Pair | Conversation) -> Encoded:
        """Encode an example. Raises `Unusable`, `TooLong`, `ConfigError`."""
        if isinstance(example, Pair):
            return self._pair(example)
        assert self._template is not None
        rendered = self._template.render(example.messages, example.place)
        tokens, spans = self._chat_tokens(rendered)
        return Encoded(tokens, _reach_into(rendered.answers, spans))

    def _pair(self, pair: Pair) -> Encoded:
        text, begin = pair.prompt + pair.completion, len(pair.prompt)
        if len(text) > MAX_TEXT_CHARACTERS:
            raise TooLong
        if not pair.completion.strip():
            return Encoded(np.zeros(0, np.uint32), np.zeros(0, np.bool_))
        tokens, spans = self._text_tokens(text)
        is_target = _reach_into([(begin, len(text))], spans)
        if not is_target.any():
            return Encoded(tokens, is_target)
        separator = np.asarray(self.tokenizer.separator, dtype=tokens.dtype)
        return Encoded(np.concatenate([tokens, separator]), np.append(is_target, [True] * len(separator)))

    def _text_tokens(self, text: str) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the tokens of plain text, and the characters [start, end) of each, one row for each token."""
        if self._fast is None:
            return _bytes(text)
        encoded = self._fast.encode_pieces([(0, text)])[0]
        return encoded.ids, np.concatenate([_spans(at, part) for at, part in encoded.parts])

    def _chat_tokens(self, rendered: Rendered) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the tokens of a conversation, and the characters [start, end) of each."""
        if self._with_special is None:
            return _bytes(rendered.text)
        ids, spans = list[int](), list[NDArray[np.int64]]()
        for first, stop in itertools.pairwise((0, *rendered.cuts, len(rendered.text))):
            found = self._with_special.encode(rendered.text[first:stop], add_special_tokens=False)
            ids += found.ids
            spans.append(_spans(first, found))
        return np.asarray(ids, dtype=np.uint32), np.concatenate(spans)


def example_parts(
    examples: Iterable[Pair | Conversation],
    encoder: ExampleEncoder,
    length: ExampleLength,
    report: SourceReport,
    strict: bool,
) -> Iterator[tuple[NDArray[Any], bool]]:
    """Yield the stored tokens of each example, all with True: each is a whole document.

    What is left out or cut is counted in `report`. Raises `ConfigError`, and `CorpusError` for an unusable conversation
    if it is `strict`.
    """
    dtype = token_dtype(encoder.tokenizer.vocabulary, marks=True)
    for example in examples:
        try:
            encoded = encoder.encode(example)
        except Unusable as error:
            refuse(report, strict, partial(_bad, example, str(error)))
            continue
        except TooLong:
            report.count_example("long_examples", example.place)
            continue
        if (kept := _kept(encoded, length, example, report)) is not None:
            report.documents += 1
            require_known_tokens(kept.tokens, encoder.tokenizer)
            yield stored(kept.tokens.astype(dtype), ~kept.is_target), True


def _bad(example: Pair | Conversation, why: str) -> Bad:
    return Bad(example.place(), why, _UNUSABLE_REMEDY)


def _kept(
    encoded: Encoded, length: ExampleLength, example: Pair | Conversation, report: SourceReport
) -> Encoded | None:
    """Return the used part of an example; if no part is used, count it and return None."""
    if not encoded.is_target.any():
        report.count_example("unanswered_examples", example.place)
        return None
    if length.longest is None or len(encoded.tokens) <= length.longest:
        return encoded
    cut = Encoded(encoded.tokens[: length.longest], encoded.is_target[: length.longest])
    if not length.cuts or not cut.is_target.any():
        report.count_example("long_examples", example.place)
        return None
    report.count_example("cut_examples", example.place)
    return cut


def stored(tokens: NDArray[Any], input_only: NDArray[np.bool_]) -> NDArray[Any]:
    """Set the top bit of tokens that are input only, in place."""
    tokens[input_only] |= tokens.dtype.type(top_bit(tokens.dtype))
    return tokens


@lru_cache(maxsize=1)
def load_example_encoder(saved: CorpusTokenizer) -> ExampleEncoder:
    """Load the encoder of a tokenizer that `save_tokenizer` has written. Repeated calls return the same object."""
    return ExampleEncoder(load_saved(saved), saved.chat)


def _fast_encoder(tokenizer: Tokenizer) -> FastEncoder:
    encoder = encoder_of(tokenizer) if isinstance(tokenizer, HuggingFaceTokenizer) else None
    if not isinstance(encoder, FastEncoder):
        raise ConfigError(
            f"tokenizer {tokenizer.name!r} does not tell which text a token stands for, so no answer can be found",
            "use a tokenizer of the tokenizers library, which has a tokenizer.json",
        )
    # no post-processor: some do not count the spaces around a token as its characters
    return encoder.with_description(json.dumps(json.loads(encoder.description) | {"post_processor": None}))


def _recognising_special_tokens(encoder: FastEncoder) -> Any:
    from tokenizers import Tokenizer as Rust

    return Rust.from_str(encoder.description)


def _bytes(text: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    starts = np.cumsum((data & 0xC0) != 0x80) - 1  # UTF-8 continuation bytes begin with the bits 10
    return data, np.stack([starts, starts + 1], axis=1)


def _spans(offset: int, encoding: Any) -> NDArray[np.int64]:
    """Return the characters of each token of a piece of text that begins at `offset`."""
    return offset + np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)


def _reach_into(answers: Iterable[tuple[int, int]], spans: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which tokens contain a character of an answer; an empty token counts as the character after it."""
    starts, ends = spans[:, 0], np.maximum(spans[:, 1], spans[:, 0] + 1)
    found = np.zeros(len(spans), dtype=np.bool_)
    for start, end in answers:
        found |= (starts < end) & (ends > start)
    return found
