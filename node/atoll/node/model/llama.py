"""The built-in Llama-compatible decoder, as a list of layers with one interface.

Every layer is an `nn.Module` that takes one tensor (a block also `Documents`, which are the same for all blocks) and
returns one: `Embedding` tokens [B,T] → [B,T,D], `Block` [B,T,D]
→ [B,T,D], `Head` [B,T,D] → logits [B,T,V]. A span of a pipeline is a slice of that list. The equations are those of
Llama 2 and 3: RoPE (Su et al. 2021, arXiv:2104.09864) in the rotate-half form, RMSNorm before attention and MLP,
SwiGLU, grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245) with PyTorch's scaled dot-product attention.
Trained weights therefore export to that architecture by renaming.

Shape suffixes: B batch, T sequence, D model, H heads, K key-value heads, E head dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from atoll.core.built_in_shape import ModelShape
from atoll.node.model.document_masks import Documents, documents_of, flex_attention_of

NORM_EPSILON = 1e-5
INITIAL_STD = 0.02


class Norm(nn.Module):
    """RMSNorm over the last dimension."""

    def __init__(self, dimension: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dimension))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return nn.functional.rms_norm(x_BTD, self.weight.shape, self.weight, NORM_EPSILON)


class Embedding(nn.Module):
    """First layer, tokens [B,T] → [B,T,D]. It owns the shared matrix if embeddings are tied."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocabulary, shape.dimension))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return nn.functional.embedding(tokens_BT, self.weight)


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads share one key-value head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dimension, self.rope_theta = shape.head_dimension, shape.rope_theta
        self.grouped = shape.heads != shape.kv_heads
        kv_dimension = shape.kv_heads * shape.head_dimension
        self.query = nn.Linear(shape.dimension, shape.dimension, bias=False)
        self.key = nn.Linear(shape.dimension, kv_dimension, bias=False)
        self.value = nn.Linear(shape.dimension, kv_dimension, bias=False)
        self.output = nn.Linear(shape.dimension, shape.dimension, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        cos_TE, sin_TE = self._rotation(x_BTD, documents)
        query_BHTE = apply_rope(self._split(self.query(x_BTD)), cos_TE, sin_TE)
        key_BKTE = apply_rope(self._split(self.key(x_BTD)), cos_TE, sin_TE)
        value_BKTE = self._split(self.value(x_BTD))
        mixed_BHTE = self._attend(query_BHTE, key_BKTE, value_BKTE, documents)
        return cast("Tensor", self.output(mixed_BHTE.transpose(1, 2).flatten(2)))

    def _attend(self, query_BHTE: Tensor, key_BKTE: Tensor, value_BKTE: Tensor, documents: Documents | None) -> Tensor:
        if documents is None:
            return nn.functional.scaled_dot_product_attention(
                query_BHTE, key_BKTE, value_BKTE, is_causal=True, enable_gqa=self.grouped
            )
        if not isinstance(documents.mask, Tensor):
            return flex_attention_of(query_BHTE, key_BKTE, value_BKTE, documents.mask, grouped=self.grouped)
        # key heads are repeated, because no fused kernel takes a mask and fewer key heads
        groups = query_BHTE.shape[1] // key_BKTE.shape[1]
        return nn.functional.scaled_dot_product_attention(
            query_BHTE,
            key_BKTE.repeat_interleave(groups, dim=1),
            value_BKTE.repeat_interleave(groups, dim=1),
            attn_mask=documents.mask,
        )

    def _split(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.view(*x_BTD.shape[:2], -1, self.head_dimension).transpose(1, 2)

    def _rotation(self, x_BTD: Tensor, documents: Documents | None) -> tuple[Tensor, Tensor]:
        """Return cos and sin by position [T,E], or by each token's position in its document [B,1,T,E]."""
        length = x_BTD.shape[1]
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].device != x_BTD.device:
            self._rope = rope_tables(length, self.head_dimension, self.rope_theta, x_BTD.device)
        cos_TE, sin_TE = self._rope
        if documents is not None:
            return cos_TE[documents.positions_BT].unsqueeze(1), sin_TE[documents.positions_BT].unsqueeze(1)
        return cos_TE[:length], sin_TE[:length]


def rope_tables(length: int, head_dimension: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Compute cos and sin of every position's angles, fp32 [T,E]; both halves of E are equal."""
    pairs = torch.arange(0, head_dimension, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / theta ** (pairs / head_dimension)  # rounding as in Hugging Face's Llama
    angles_TE = torch.outer(torch.arange(length, dtype=torch.float32, device=device), frequencies).repeat(1, 2)
    return angles_TE.cos(), angles_TE.sin()


def apply_rope(x_BHTE: Tensor, cos_TE: Tensor, sin_TE: Tensor) -> Tensor:
    """Rotate each pair (i, i + E/2) by its position's angle; the result has the dtype of `x`."""
    first, second = x_BHTE.chunk(2, dim=-1)
    turned_BHTE = torch.cat((-second, first), dim=-1)
    return (x_BHTE * cos_TE + turned_BHTE * sin_TE).to(x_BHTE.dtype)


class Mlp(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dimension, shape.hidden_dimension, bias=False)
        self.up = nn.Linear(shape.dimension, shape.hidden_dimension, bias=False)
        self.down = nn.Linear(shape.hidden_dimension, shape.dimension, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return cast("Tensor", self.down(nn.functional.silu(self.gate(x_BTD)) * self.up(x_BTD)))


class Block(nn.Module):
    """One decoder block, [B,T,D] → [B,T,D]."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.attention_norm = Norm(shape.dimension)
        self.attention = Attention(shape)
        self.mlp_norm = Norm(shape.dimension)
        self.mlp = Mlp(shape)

    def forward(self, x_BTD: Tensor, documents: Documents | None = None) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), documents)
        return cast("Tensor", x_BTD + self.mlp(self.mlp_norm(x_BTD)))


class Head(nn.Module):
    """Final norm and projection, [B,T,D] → logits [B,T,V]. `tied`: the embedding's matrix if the head shares it."""

    def __init__(self, shape: ModelShape, tied: nn.Parameter | None = None) -> None:
        super().__init__()
        self.norm = Norm(shape.dimension)
        self.weight = nn.Parameter(torch.empty(shape.vocabulary, shape.dimension)) if tied is None else tied

    def forward(self, x_BTD: Tensor) -> Tensor:
        return nn.functional.linear(self.norm(x_BTD), self.weight)


class Decoder(nn.Module):
    """All layers in order: tokens [B,T] → logits [B,T,V]."""

    def __init__(self, shape: ModelShape, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.activation_checkpointing = activation_checkpointing
        embedding = Embedding(shape)
        blocks = [Block(shape) for _ in range(shape.layers)]
        head = Head(shape, embedding.weight if shape.tie_embeddings else None)
        self.layers = nn.ModuleList([embedding, *blocks, head])

    def forward(self, tokens_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """`starts_BT` (bool): where documents start, if each is computed separately (`document_masks.py`)."""
        x = tokens_BT
        documents = documents_of(starts_BT) if starts_BT is not None else None
        for layer in self.layers:
            if not isinstance(layer, Block):
                x = layer(x)
            elif self.activation_checkpointing and self.training:
                x = checkpoint(layer, x, documents, use_reentrant=False)
            else:
                x = layer(x, documents)
        return x


def initial_parameters(shape: ModelShape, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw the initial parameters from `seed`, by name in layer order, on the host.

    One parameter is in memory at a time. One node does this at genesis; the others fetch its bytes.
    """
    with torch.device("meta"):
        model = Decoder(shape)
    yield from draw_parameters(model, seed)


def draw_parameters(model: Decoder, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Draw initial values of a model on any device: normal with σ = 0.02, and ones for norms.

    Matrices that write to the residual stream are scaled by 1/√(2·blocks), as in GPT-2.
    """
    generator = torch.Generator().manual_seed(seed % 2**63)
    residual_std = INITIAL_STD / max(1.0, 2.0 * (len(model.layers) - 2)) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            yield name, torch.ones(parameter.shape)
            continue
        std = residual_std if name.endswith(("output.weight", "down.weight")) else INITIAL_STD
        yield name, torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
