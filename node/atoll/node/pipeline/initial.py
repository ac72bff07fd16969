"""Initial weights of a span, from a seed: the same for a layer whatever span it is part of.

Every parameter draws from a generator of its own, seeded by the run's seed and its name. One node does this at
genesis, as for whole models, and the others fetch its bytes: sequences of a generator are not promised to be equal
everywhere.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from atoll.node.pipeline.span_model import SpanModel


def initialise_span(model: SpanModel, seed: int, standard_deviation: float = 0.02) -> None:
    """Fill all of it, frozen or not."""
    for name, view in model.tensors():
        view.copy_(initial_values(name, tuple(view.shape), seed, standard_deviation))


def initial_values(name: str, shape: tuple[int, ...], seed: int, standard_deviation: float) -> Tensor:
    """One parameter by the name that a whole model has for it.

    Matrices are normal, weights of norms one, biases zero. Adapters begin as no change: the second factor is zero, the
    first uniform within 1/√inputs (Hu et al. 2021, arXiv:2106.09685, as `peft` has it).
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(shape)
    if "lora_B" in name or (values.dim() < 2 and name.endswith("bias")):
        return values.zero_()
    if "lora_A" in name:
        bound = shape[-1] ** -0.5
        return values.uniform_(-bound, bound, generator=generator)
    if values.dim() < 2:
        return values.fill_(1.0)
    return values.normal_(0.0, standard_deviation, generator=generator)
