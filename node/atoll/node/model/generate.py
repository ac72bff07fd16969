"""Sampling of text from a model, for the demo's final sample and for curious volunteers.

There is no key-value cache: every token computes the whole window again, which is fine for a few hundred tokens of a
small model. Tokens are drawn on the host from a seeded generator, so that a seed determines the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TEMPERATURE = 0.8


def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    count: int,
    window: int,
    seed: int,
    device: torch.device,
) -> list[int]:
    """Sample `count` tokens that follow `prompt` (at least one token).

    `logits_of`: tokens [B,T] → logits [B,T,V]. `window`: largest number of context tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    for _ in range(count):
        context_BT = torch.tensor([tokens[-window:]], device=device)
        logits_V = logits_of(context_BT)[0, -1].float().cpu() / TEMPERATURE
        drawn = torch.multinomial(torch.softmax(logits_V, dim=-1), 1, generator=generator)
        tokens.append(int(drawn))
    return tokens[len(prompt) :]
