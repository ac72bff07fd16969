"""Muon whose products suit the device: stacked by shape on a GPU, and in fp32 where bf16 has no units.

`torch.optim.Muon` takes one matrix after another. With 110 M parameters on an H100 that was 2,000 launches more a step
than AdamW's, and 38 ms; stacked they are 180, and 7 ms (`benchmarks/results/gpu_hour.json`). It also multiplies in bf16
on every device. A processor without bf16 instructions then takes 20 to 100 times as long as in fp32
(`benchmarks/muon.py`). The update is the same (Jordan et al. 2024, kellerjordan.github.io/posts/muon), and so is the
state.

Shape suffixes: S stacked matrices, M rows, N columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from atoll.core.model_memory import STACK_ELEMENTS
from atoll.node.training.device import has_bf16_units


class StackedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`, for matrices that all have a gradient."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all matrices along their gradients."""
        for group in self.param_groups:
            for stack in stacks(group["params"], together=_stackable(group["params"])):
                self._step(stack, group)

    def _step(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        gradients = [matrix.grad for matrix in matrices if matrix.grad is not None]
        momenta = [self._momentum_of(matrix) for matrix in matrices]
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, momenta, group["momentum"]) if group["nesterov"] else momenta
        update_SMN = _stacked(updates)
        del updates
        update_SMN = orthogonal(update_SMN, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rate = 0.2 * math.sqrt(max(matrices[0].shape)) * group["lr"]
        torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(matrices, list(update_SMN.unbind()), alpha=-float(rate))

    def _momentum_of(self, matrix: Tensor) -> Tensor:
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum_buffer"]
        return momentum


def _stackable(matrices: Sequence[Tensor]) -> bool:
    """True if stacking saves launches: for whole matrices on a GPU. Elsewhere it would only cost memory."""
    return matrices[0].is_cuda and not isinstance(matrices[0], DTensor)


def stacks(matrices: Sequence[Tensor], *, together: bool) -> Iterator[list[Tensor]]:
    """Group matrices by shape, in stacks of at most `STACK_ELEMENTS` if `together`, else one by one."""

    def shape(matrix: Tensor) -> tuple[int, ...]:
        return tuple(matrix.shape)

    for _, equal in groupby(sorted(matrices, key=shape), key=shape):
        alike = list(equal)
        size = max(1, STACK_ELEMENTS // alike[0].numel()) if together else 1
        yield from (alike[first : first + size] for first in range(0, len(alike), size))


def _stacked(updates: Sequence[Tensor]) -> Tensor:
    """Copy matrices of one shape into a stack, in the precision of their products."""
    first, dtype = updates[0], torch.bfloat16 if has_bf16_units(updates[0].device) else torch.float32
    if len(updates) == 1:
        return first.to(dtype, copy=True)[None]
    stack_SMN = torch.empty(len(updates), *first.shape, dtype=dtype, device=first.device)
    torch._foreach_copy_(list(stack_SMN), list(updates))
    return stack_SMN


def orthogonal(update_SMN: Tensor, coefficients: tuple[float, float, float], iterations: int, epsilon: float) -> Tensor:
    """Bring all singular values near 1, by quintic Newton–Schulz iterations in the tensors' precision."""
    a, b, c = coefficients
    tall = update_SMN.shape[1] > update_SMN.shape[2]
    x_SMN = update_SMN.mT if tall else update_SMN
    x_SMN = x_SMN / torch.linalg.vector_norm(x_SMN, dim=(1, 2), keepdim=True).clamp(min=epsilon)
    for _ in range(iterations):
        gram_SMM = x_SMN @ x_SMN.mT
        x_SMN = torch.baddbmm(x_SMN, torch.baddbmm(gram_SMM, gram_SMM, gram_SMM, beta=b, alpha=c), x_SMN, beta=a)
    return x_SMN.mT if tall else x_SMN
