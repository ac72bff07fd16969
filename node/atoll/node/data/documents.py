"""Bounds of packed documents, for runs with `document_masks`. Pure.

A document ends with the tokenizer's separator. In a corpus of instruction data it need not, and may contain separators:
there a bit of each token tells whether a document starts (`data/card.py`).

In windows, the first token of a document has `DOCUMENT_START` added. A token that is an input but no target is its
bitwise complement, which is negative. So is the first token of each document: no earlier token of its document is in
the window. A window's first token is never a target, and always starts a document.

Shape suffixes: B batch, T sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.core.errors import ConfigError, CorpusError
from atoll.core.run_spec import DataSection
from atoll.node.model.tokenizer import Tokenizer

DOCUMENT_START = 1 << 40  # beyond all tokens
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
    """Raise `CorpusError` if a file of tokens has no separator: it would be a single document."""
    for start in range(0, len(tokens), _SEARCHED_TOKENS):
        if (tokens[start : start + _SEARCHED_TOKENS] == separator).any():
            return
    raise CorpusError(
        f"[data] document_masks is set, but {where} does not contain the token {separator}, which ends documents",
        "write the tokenizer's separator after each document, or remove document_masks",
    )


def starts_after(windows_BT: NDArray[np.int64], separator: int) -> NDArray[np.bool_]:
    """Return where documents start in windows [B, T+1] of a corpus without marks: after each separator."""
    starts_BT = np.zeros(windows_BT.shape, dtype=np.bool_)
    starts_BT[:, 1:] = windows_BT[:, :-1] == separator
    return starts_BT


def mark_starts(windows_BT: NDArray[np.int64], starts_BT: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Mark in windows [B, T+1] where documents start; these tokens are not targets."""
    tokens_BT = windows_BT ^ (windows_BT >> 63)
    return np.where(starts_BT, ~(tokens_BT | DOCUMENT_START), windows_BT)
