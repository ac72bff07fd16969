"""Documents become token arrays: in batches, long documents in pieces, each followed by the tokenizer's separator.

Special tokens that text spells are text. The byte tokenizer's tokens are the document's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError
from atoll.node.data.encoders import FastEncoder, SlowEncoder, encoder_of
from atoll.node.data.long_documents import LongDocument
from atoll.node.data.readers import LONG_TEXT_BYTES, Document, LongText
from atoll.node.model.tokenizer import HuggingFaceTokenizer, Tokenizer

OnProgress = Callable[[int], object]  # called after some work, with the number of tokens so far
_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1024


def no_progress_callback(_: int) -> None:
    """Ignore progress."""


def token_dtype(vocabulary: int, marks: bool = False) -> np.dtype[Any]:
    """Return the narrowest little-endian unsigned integer that holds every token, and two bits more with `marks`."""
    values = 4 * vocabulary if marks else vocabulary
    return np.dtype("u1" if values <= 1 << 8 else "<u2" if values <= 1 << 16 else "<u4")


def tokenise(
    documents: Iterable[Document], tokenizer: Tokenizer, on_progress: OnProgress = no_progress_callback
) -> Iterator[NDArray[Any]]:
    """Yield one array per document: its tokens and the separator, 1-D, of `token_dtype(vocabulary)`.

    Empty documents are left out. `on_progress` is called every few seconds, also inside a long document. Raises the
    readers' errors, and `ConfigError` for a token beyond the vocabulary.
    """
    parts: list[NDArray[Any]] = []
    for part, ends in token_parts(documents, tokenizer, on_progress):
        parts.append(part)
        if ends:
            yield parts[0] if len(parts) == 1 else np.concatenate(parts)
            parts.clear()


def token_parts(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    on_progress: OnProgress = no_progress_callback,
    marks: bool = False,
) -> Iterator[tuple[NDArray[Any], bool]]:
    """Yield the arrays of `tokenise` in parts of bounded size, each with a flag that is True if it ends its document.

    `marks`: the type of the tokens has two spare bits, which are not set.
    """
    dtype, done = token_dtype(tokenizer.vocabulary, marks), 0
    separator = np.asarray(tokenizer.separator, dtype=dtype)
    for tokens, ends in _encode(documents, tokenizer):
        require_known_tokens(tokens, tokenizer)
        part = tokens.astype(dtype, copy=False)
        part = np.concatenate([part, separator]) if ends and len(separator) else part
        done += len(part)
        on_progress(done)
        yield part, ends


def require_known_tokens(tokens: NDArray[Any], tokenizer: Tokenizer) -> None:
    """Raise `ConfigError` for a token beyond the vocabulary."""
    if len(tokens) and tokens.dtype != np.uint8 and (largest := int(tokens.max())) >= tokenizer.vocabulary:
        raise ConfigError(
            f"tokenizer {tokenizer.name!r} gave token {largest}, but has {tokenizer.vocabulary} tokens",
            "repair the tokenizer's files: its added tokens must follow its vocabulary without gaps",
        )


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[NDArray[Any], bool]]:
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return _batches(documents, encoder_of(tokenizer))
    return _one_by_one(documents, tokenizer)


def _one_by_one(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[NDArray[Any], bool]]:
    for document in documents:
        if isinstance(document, LongText):
            for chunk in document.chunks():
                yield tokenizer.encode(chunk), False
            yield tokenizer.encode(b""), True
        elif document:
            yield tokenizer.encode(document), True


def _batches(documents: Iterable[Document], encoder: FastEncoder | SlowEncoder) -> Iterator[tuple[NDArray[Any], bool]]:
    texts: list[str] = []
    size = 0
    for document in documents:
        is_long = isinstance(document, LongText) or len(document) > LONG_TEXT_BYTES
        if texts and (is_long or size > _BATCH_BYTES or len(texts) == _BATCH_DOCUMENTS):
            yield from _encoded(texts, encoder)
            texts, size = [], 0
        if is_long:
            yield from _long(document, encoder)
        elif isinstance(document, bytes) and document:
            texts.append(document.decode())
            size += len(document)
    yield from _encoded(texts, encoder)


def _encoded(texts: list[str], encoder: FastEncoder | SlowEncoder) -> Iterator[tuple[NDArray[Any], bool]]:
    if texts:
        yield from ((tokens, True) for tokens in encoder.encode_batch(texts))


def _long(document: Document, encoder: FastEncoder | SlowEncoder) -> Iterator[tuple[NDArray[Any], bool]]:
    chunks = document.chunks() if isinstance(document, LongText) else iter([document])
    if isinstance(encoder, SlowEncoder):  # gives no positions of tokens
        yield encoder.encode_batch([b"".join(chunks).decode()])[0], True
        return
    for tokens in LongDocument(chunks, encoder).tokens():
        yield tokens, False
    yield np.empty(0, dtype=np.uint32), True
