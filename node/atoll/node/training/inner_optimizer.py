"""The inner optimiser: AdamW with the field's parameter groups, or Muon beside it, gradient clipping and loss scaling.

Matrices decay; norms and the embedding do not. Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) takes the
matrices between embedding and head; its updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982,
section 2.2), so that one learning rate does for both. Fused kernels are used where the device has them. A gradient that
is not finite skips its step: one bad batch must not destroy the weights that the next round will send.

Clipping is the same arithmetic wherever a model is cut: one fp32 norm a layer, their squares summed in fp64 in the
order of the layers, one factor for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from atoll.core.run_spec import OptimizerSection
from atoll.node.model.span_model import TrainableModel

_FUSED = ("cpu", "cuda", "mps")


class InnerOptimizer:
    """Steps some of a model's parameters. `embedding` may be one of them; `muon_matrices` lists those for Muon."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        embedding: Tensor | None,
        section: OptimizerSection,
        device: torch.device,
        muon_matrices: Iterable[Tensor] = (),
    ) -> None:
        matrices = list(muon_matrices) if section.name == "muon" else []
        taken = set(map(id, matrices))
        rest = [parameter for parameter in parameters if id(parameter) not in taken]
        self.optimizers: list[torch.optim.Optimizer] = [_adamw(rest, embedding, section, device)] if rest else []
        if matrices:
            self.optimizers.append(_muon(matrices, section))

    def set_learning_rate(self, learning_rate: float) -> None:
        """For all parameters, from the next step on."""
        for part in self.optimizers:
            for group in part.param_groups:
                group["lr"] = learning_rate

    def step(self) -> None:
        """One step along the gradients."""
        for part in self.optimizers:
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """What persists between steps: the tensors themselves, not copies."""
        return [part.state_dict() for part in self.optimizers]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Take back what `state_dict` gave for the same parameters."""
        for part, own in zip(self.optimizers, state, strict=True):
            part.load_state_dict(own)


def _adamw(
    parameters: Iterable[Tensor], embedding: Tensor | None, section: OptimizerSection, device: torch.device
) -> torch.optim.AdamW:
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


def _muon(matrices: Iterable[Tensor], section: OptimizerSection) -> torch.optim.Muon:
    return torch.optim.Muon(
        matrices,
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def clip_factor(norms: Iterable[float], clip_norm: float) -> float | None:
    """What all gradients are multiplied by, from the norms of all layers in order; None if they are not finite."""
    total = 0.0
    for norm in norms:
        total += norm * norm
    if not math.isfinite(total):
        return None
    return min(1.0, clip_norm / (math.sqrt(total) + 1e-6))


class Stepper:
    """Clips, unscales and steps. Owns what persists between steps: the optimiser's moments and the loss scale."""

    def __init__(self, model: TrainableModel, section: OptimizerSection, precision: str) -> None:
        """`model` holds all layers."""
        self.optimizer = InnerOptimizer(model.parameters(), model.embedding, section, model.device, model.muon_matrices)
        self.scaler = GradScaler(model.device.type, enabled=precision == "fp16")
        self.skipped_steps = 0
        self._clip_norm, self._model = section.clip_norm, model

    def set_learning_rate(self, learning_rate: float) -> None:
        """From the next step on."""
        self.optimizer.set_learning_rate(learning_rate)

    def backward(self, loss: Tensor) -> None:
        """Gradients of one micro-batch, added to those there are."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Clip by the global norm of the gradient, step, and leave the gradient zero."""
        self._model.gather_gradients()
        for part in self.optimizer.optimizers:
            self.scaler.unscale_(part)
        factor = clip_factor(self._model.norms(), self._clip_norm)
        if factor is None:
            self.skipped_steps += 1
        else:
            self._model.scale_gradients(factor)
            for part in self.optimizer.optimizers:
                self.scaler.step(part)
        self.scaler.update()
        self._model.zero_gradients()
