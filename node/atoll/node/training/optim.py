"""The inner optimiser: AdamW with the field's parameter groups, gradient clipping and loss scaling.

Matrices decay; norms and the embedding do not. Fused kernels are used where the device has them. A gradient that
is not finite skips its step: one bad batch must not destroy the weights that the next round will send.

Clipping is the same arithmetic wherever a model is cut: one fp32 norm a layer, their squares summed in fp64 in the
order of the layers, one factor for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from atoll.core.run_spec import OptimizerSection
from atoll.node.training.flat import FlatLayout
from atoll.node.training.model import Decoder, Head

_FUSED = ("cpu", "cuda", "mps")


def make_optimizer(
    parameters: Iterable[Tensor], embedding: Tensor | None, section: OptimizerSection, device: torch.device
) -> torch.optim.AdamW:
    """AdamW over some of a model's parameters, of which `embedding` may be one."""
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    for parameter in parameters:
        (plain if parameter.dim() < 2 or parameter is embedding else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=section.learning_rate,
        betas=section.betas,
        eps=section.epsilon,
        fused=device.type in _FUSED,
    )


def layer_norms(gradients_E: Tensor, offsets: Sequence[int]) -> tuple[float, ...]:
    """The norm of each layer's slice of a flat gradient; `offsets` has one entry more than there are layers."""
    norms = [torch.linalg.vector_norm(gradients_E[start:end]) for start, end in pairwise(offsets)]
    return tuple(torch.stack(norms).tolist())


def clip_factor(norms: Iterable[float], clip_norm: float) -> float | None:
    """What all gradients are multiplied by, from the norms of all layers in order; None if they are not finite."""
    total = 0.0
    for norm in norms:
        total += norm * norm
    if not math.isfinite(total):
        return None
    return min(1.0, clip_norm / (math.sqrt(total) + 1e-6))


class Stepper:
    """Clips, unscales and steps. Owns what persists between steps: AdamW's moments and the loss scale."""

    def __init__(self, model: Decoder, section: OptimizerSection, device: torch.device, precision: str) -> None:
        self.optimizer = make_optimizer(model.parameters(), next(model.layers[0].parameters()), section, device)
        self.scaler = GradScaler(device.type, enabled=precision == "fp16")
        self.skipped_steps = 0
        self._clip_norm = section.clip_norm
        self._head = model.layers[-1]
        self._layer_offsets = FlatLayout.of(model).layer_offsets

    def set_learning_rate(self, learning_rate: float) -> None:
        """For all groups, from the next step on."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def backward(self, loss: Tensor) -> None:
        """Gradients of one micro-batch, added to those there are."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, gradients_E: Tensor) -> None:
        """Clip by the global norm of the flat gradient, step, and leave the gradient zero."""
        self.gather()
        factor = clip_factor(layer_norms(gradients_E, self._layer_offsets), self._clip_norm)
        if factor is None:
            self.skipped_steps += 1
        else:
            gradients_E.mul_(factor)
            self.scaler.step(self.optimizer)
        self.scaler.update()
        gradients_E.zero_()

    def gather(self) -> None:
        """Make the gradients whole: what the head summed of a tied matrix, and without the loss scale."""
        if isinstance(self._head, Head):
            self._head.return_gradient()
        self.scaler.unscale_(self.optimizer)
