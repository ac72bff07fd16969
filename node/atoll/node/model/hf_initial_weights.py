"""Initial weights of a Hugging Face decoder from a seed, equal for a layer in every span that contains it.

Each layer is initialised by the family's own rules with a generator of its own; each adapter with a generator seeded by
its name. One node does this at genesis and the others fetch its bytes, as for the built-in decoder: torch does not
promise equal random sequences on all machines.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from atoll.core.errors import UnsupportedModel
from atoll.node.model.span_model import SpanModel


def initialise_layer(model: SpanModel, seed: int) -> None:
    """Initialise the trained parameters of one layer, on the host.

    Raises `UnsupportedModel` for a matrix for which the family has no rule.
    """
    module = model.span_definition.module
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(_number(f"{seed} layer {model.span_definition.span.first}"))
        for part in module.modules():
            module._init_weights(part)  # type: ignore[operator]  # every `PreTrainedModel` has it
    for name, view in model.trained.views(model.weights_E):
        if view.dim() > 1 and not view.any():
            raise UnsupportedModel(
                f"transformers has no rule to initialise {name}", "start from pretrained weights: add [model.base]"
            )


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return the initial values of one factor of an adapter; `name` is its name in the whole model.

    An adapter initially changes nothing: the second factor is zero, the first is uniform within 1/√inputs (Hu et al.
    2021, arXiv:2106.09685, as in `peft`).
    """
    values = torch.zeros(shape)
    if "lora_A" in name:
        bound = shape[-1] ** -0.5
        values.uniform_(-bound, bound, generator=torch.Generator().manual_seed(_number(f"{seed} {name}")))
    return values


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
