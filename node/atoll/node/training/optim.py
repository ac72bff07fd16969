"""The inner optimiser: AdamW with the field's parameter groups, gradient clipping and loss scaling.

Matrices decay; norms and the embedding do not. Fused kernels are used where the device has them. A gradient that
is not finite skips its step: one bad batch must not destroy the weights that the next round will send.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from atoll.core.run_spec import OptimizerSection
from atoll.node.training.model import Decoder

_FUSED = ("cpu", "cuda", "mps")


def make_optimizer(model: Decoder, section: OptimizerSection, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the model's parameters."""
    decayed: list[Tensor] = []
    plain: list[Tensor] = []
    embedding = next(model.layers[0].parameters())
    for parameter in model.parameters():
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


class Stepper:
    """Clips, unscales and steps. Owns what persists between steps: AdamW's moments and the loss scale."""

    def __init__(self, model: Decoder, section: OptimizerSection, device: torch.device, precision: str) -> None:
        self.optimizer = make_optimizer(model, section, device)
        self.scaler = GradScaler(device.type, enabled=precision == "fp16")
        self.skipped_steps = 0
        self._clip_norm = section.clip_norm

    def set_learning_rate(self, learning_rate: float) -> None:
        """For all groups, from the next step on."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate

    def backward(self, loss: Tensor) -> None:
        """Gradients of one micro-batch, added to those there are."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self, gradients_E: Tensor) -> None:
        """Clip by the global norm of the flat gradient, step, and leave the gradient zero."""
        self.scaler.unscale_(self.optimizer)
        norm = torch.linalg.vector_norm(gradients_E)
        if bool(torch.isfinite(norm)):
            gradients_E.mul_(torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))
            self.scaler.step(self.optimizer)
        else:
            self.skipped_steps += 1
        self.scaler.update()
        gradients_E.zero_()
