"""Bounds of packed documents, for runs with `document_masks`: a document ends with the tokenizer's separator. Pure.

A token that is an input but no target is stored as its bitwise complement, which is negative. So is the first token of
each document: nothing before it in its window says what it is. A window's first token is never a target.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError, CorpusError
from atoll.core.run_spec import DataSection
from atoll.node.model.tokenizer import Tokenizer

_SEARCHED_TOKENS = 1 << 24  # at once


def document_separator(section: DataSection, tokenizer: Tokenizer) -> int | None:
    """Return the token that ends documents; None if the run has no document masks.

    Raises `ConfigError` if the tokenizer does not end documents with exactly one token.
    """
    if not section.document_masks:
        return None
    if len(tokenizer.separator) != 1:
        found = f"a separator of {len(tokenizer.separator)} tokens" if tokenizer.separator else "no separator"
        raise ConfigError(
            f"[data] document_masks needs a tokenizer that ends each document with one token, and "
            f"{tokenizer.name!r} has {found}",
            "choose a tokenizer with an end-of-text token, or remove document_masks",
        )
    return tokenizer.separator[0]


def check_separated(tokens: NDArray[Any], separator: int, where: str) -> None:
    """Raise `CorpusError` if a file of tokens has no separator at all: all of it would be one document."""
    for start in range(0, len(tokens), _SEARCHED_TOKENS):
        if (tokens[start : start + _SEARCHED_TOKENS] == separator).any():
            return
    raise CorpusError(
        f"[data] document_masks is set, but {where} does not contain the token {separator}, which ends documents",
        "write the tokenizer's separator after each document, or remove document_masks",
    )


def ignore_first_tokens(windows_BT: NDArray[np.int64], separator: int | None) -> NDArray[np.int64]:
    """Store the first token of each document as its complement, in windows [B, T+1]; the result may share memory."""
    if separator is None:
        return windows_BT
    tokens_BT = np.where(windows_BT < 0, ~windows_BT, windows_BT)
    first_BT = np.zeros(tokens_BT.shape, dtype=bool)
    first_BT[:, 1:] = tokens_BT[:, :-1] == separator
    return np.where(first_BT, ~tokens_BT, windows_BT)
