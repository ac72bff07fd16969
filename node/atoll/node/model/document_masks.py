"""Document masks: attention within each document of a packed sample, and positions that restart with each. Pure.

A sample packs documents back to back. Without masks a token attends to the documents before its own. With masks it
attends only to its own (Zhao et al. 2024, arXiv:2402.13991; Llama 3, arXiv:2407.21783, section 3.2), so that the result
is the same as for each document alone. Masks and positions follow from one bit of each token: whether a document starts
there.

Shape suffixes: B batch, T sequence, H heads, K key-value heads, E head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


class Documents(NamedTuple):
    """Inputs of every block's attention for the documents of a micro-batch."""

    positions_BT: Tensor  # int64, counted from 0 in each document
    mask: Tensor | BlockMask  # Tensor: [B,1,T,T], 0 where a token attends and -inf elsewhere


def document_positions(starts_BT: Tensor) -> Tensor:
    """Count each token's position in its document, int64 [B,T]."""
    places_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    return places_T - torch.where(starts_BT, places_T, 0).cummax(dim=1).values


def attends(starts_BT: Tensor) -> Tensor:
    """Return which token (row) attends to which (column), bool [B,1,T,T]: itself and earlier ones of its document."""
    documents_BT = starts_BT.cumsum(dim=1)
    same_BTT = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)
    return same_BTT.tril().unsqueeze(1)


def documents_of(starts_BT: Tensor) -> Documents:
    """Build positions and mask, once for all blocks. Compiled CUDA code gets a block mask of flex attention instead.

    The mask has the dtype in which blocks multiply: torch would convert a mask of another dtype in every block, and
    keep each result until backward.
    """
    positions_BT = document_positions(starts_BT)
    if torch.compiler.is_compiling() and starts_BT.is_cuda:
        return Documents(positions_BT, block_mask(starts_BT))
    kind = starts_BT.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
    allowed_B1TT = attends(starts_BT)
    return Documents(
        positions_BT,
        torch.zeros(allowed_B1TT.shape, dtype=dtype, device=starts_BT.device).masked_fill_(~allowed_B1TT, -torch.inf),
    )


def block_mask(starts_BT: Tensor) -> BlockMask:
    """Build the same mask for flex attention, without a matrix [T,T] of elements."""
    from torch.nn.attention.flex_attention import create_block_mask

    documents_BT = starts_BT.cumsum(dim=1)
    samples, length = starts_BT.shape

    def within_document(sample: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_BT[sample, query] == documents_BT[sample, key])

    return create_block_mask(within_document, samples, None, length, length, device=starts_BT.device.type)


def flex_attention_of(
    query_BHTE: Tensor, key_BKTE: Tensor, value_BKTE: Tensor, mask: BlockMask, *, grouped: bool
) -> Tensor:
    """Attend under a block mask. The result is fast only in compiled code."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(query_BHTE, key_BKTE, value_BKTE, block_mask=mask, enable_gqa=grouped)
