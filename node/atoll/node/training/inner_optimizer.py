"""The inner optimiser: AdamW or Muon, gradient clipping and loss scaling.

Matrices have weight decay; norms and the embedding have none. Muon (Jordan et al. 2024,
kellerjordan.github.io/posts/muon) steps the matrices between embedding and head, and AdamW steps the rest. Muon's
updates are scaled to the size of AdamW's (Liu et al. 2025, arXiv:2502.16982, section 2.2), so that one learning rate
serves both. Fused kernels are used where the device has them. A gradient that is not finite skips its step: one bad
batch must not destroy the weights that the next round will send.

Clipping is the same arithmetic wherever a model is cut: one fp32 norm per layer, their squares summed in fp64 in the
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
from atoll.node.training.stacked_muon import StackedMuon

_FUSED = ("cpu", "cuda", "mps")


class InnerOptimizer:
    """An optimiser of some of a model's parameters."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        embedding: Tensor | None,
        section: OptimizerSection,
        device: torch.device,
        muon_matrices: Iterable[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """`embedding` may be one of `parameters` or None.

        `muon_matrices` lists parameters that Muon may step, each as its entry in `parameters` and as a whole matrix.
        """
        assert section.name != "auto", "a run spec resolves it"
        pairs = list(muon_matrices) if section.name == "muon" else []
        taken, matrices = {id(parameter) for parameter, _ in pairs}, [matrix for _, matrix in pairs]
        rest = [parameter for parameter in parameters if id(parameter) not in taken]
        self.optimizers: list[torch.optim.Optimizer] = [_adamw(rest, embedding, section, device)] if rest else []
        if matrices:
            self.optimizers.append(_muon(matrices, section))

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all parameters, from the next step on."""
        for part in self.optimizers:
            for group in part.param_groups:
                group["lr"] = learning_rate

    def step(self) -> None:
        """Step all parameters along their gradients."""
        for part in self.optimizers:
            part.step()

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state that persists between steps: the tensors themselves, not copies."""
        return [part.state_dict() for part in self.optimizers]

    def load_state_dict(self, state: Sequence[dict[str, Any]]) -> None:
        """Restore the state that `state_dict` returned for the same parameters."""
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


def _muon(matrices: Iterable[Tensor], section: OptimizerSection) -> StackedMuon:
    return StackedMuon(
        matrices,
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def clip_factor(norms: Iterable[float], clip_norm: float) -> float | None:
    """Compute the factor for all gradients from the norms of all layers in order.

    The result is None if the norms are not finite.
    """
    total = 0.0
    for norm in norms:
        total += norm * norm
    if not math.isfinite(total):
        return None
    return min(1.0, clip_norm / (math.sqrt(total) + 1e-6))


class Stepper:
    """Clips, unscales and steps; owns the optimiser's moments and the loss scale, which persist between steps."""

    def __init__(self, model: TrainableModel, section: OptimizerSection, precision: str) -> None:
        """`model` contains all layers."""
        self.optimizer = InnerOptimizer(model.parameters(), model.embedding, section, model.device, model.muon_matrices)
        self.scaler = GradScaler(model.device.type, enabled=precision == "fp16")
        self.skipped_steps = 0
        self._clip_norm, self._model = section.clip_norm, model

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate, from the next step on."""
        self.optimizer.set_learning_rate(learning_rate)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one micro-batch."""
        self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """Clip the gradient by its global norm, step, and reset the gradient.

        It waits for the device once, to read the norms; all work queued before is done after that.
        """
        self._model.gather_gradients()
        for part in self.optimizer.optimizers:
            self.scaler.unscale_(part)
        factor = clip_factor(self._model.norms(), self._clip_norm)
        if factor is None:
            self.skipped_steps += 1
        else:
            if factor < 1.0:
                self._model.scale_gradients(factor)
            for part in self.optimizer.optimizers:
                self.scaler.step(part)
        self.scaler.update()
        self._model.zero_gradients()
