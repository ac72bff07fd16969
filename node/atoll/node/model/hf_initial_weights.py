"""Initial weights of a Hugging Face decoder from a seed: the same for a layer whatever span it is part of.

A layer draws by the family's own rules from a generator of its own, an adapter from one seeded by its name. One node
does this at genesis, as for the built-in decoder, and the others fetch its bytes: sequences of a generator are not
promised to be equal everywhere.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from atoll.core.errors import UnsupportedModel
from atoll.node.model.span_model import SpanModel


def initialise_layer(model: SpanModel, seed: int) -> None:
    """Fill what is trained of one layer, on the host. Raises `UnsupportedModel` for what its family has no rule for."""
    module = model.span_definition.module
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_number(f"{seed} layer {model.span_definition.span.first}"))
        for part in module.modules():
            module._init_weights(part)  # type: ignore[operator]  # of every `PreTrainedModel`
    for name, view in model.trained.views(model.weights_E):
        if view.dim() > 1 and not view.any():
            raise UnsupportedModel(
                f"transformers has no rule for the initial values of {name}", "start from a base: add [model.base]"
            )


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """One factor of an adapter by its name in the whole model.

    Adapters begin as no change: the second factor is zero, the first uniform within 1/√inputs (Hu et al. 2021,
    arXiv:2106.09685, as `peft` has it).
    """
    values = torch.zeros(shape)
    if "lora_A" in name:
        bound = shape[-1] ** -0.5
        values.uniform_(-bound, bound, generator=torch.Generator().manual_seed(_number(f"{seed} {name}")))
    return values


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
