"""How long a layer takes on this device, forward and backward, for those who plan which node holds which layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median

import torch
from torch import Tensor, nn

from atoll.core.clock import Clock
from atoll.node.training.model import INITIAL_STD, Block, Embedding, Head
from atoll.node.training.shape import ModelShape

REPETITIONS = 5
LayerTimes = tuple[tuple[str, float, float], ...]  # kind; seconds a token, forward and backward


def of_single_layers(
    shape: ModelShape,
    tokens_BT: Tensor,
    clock: Clock,
    autocast: Callable[[], AbstractContextManager[None]],
) -> LayerTimes:
    """An embedding, a block and a head made for this, one in memory at a time, on the device of the tokens."""
    times, x = [], tokens_BT
    kinds: tuple[tuple[str, Callable[[ModelShape], nn.Module]], ...] = (
        ("embedding", Embedding),
        ("block", Block),
        ("head", Head),
    )
    for kind, make in kinds:
        with torch.device(x.device):
            layer = make(shape)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=INITIAL_STD)
        with autocast():
            forward, backward, x = measure(layer, x, clock)
        times.append((kind, forward / tokens_BT.numel(), backward / tokens_BT.numel()))
    return tuple(times)


def measure(layer: nn.Module, x: Tensor, clock: Clock) -> tuple[float, float, Tensor]:
    """Median seconds of forward and of backward on `x`, and the output, detached. Adds to the layer's gradients."""
    forwards, backwards = [], []
    output = x
    for _ in range(1 + REPETITIONS):  # the first warms kernels and allocator
        given = x.detach().requires_grad_(x.is_floating_point())
        began = _now(x.device, clock)
        output = layer(given)
        between = _now(x.device, clock)
        output.backward(torch.ones_like(output))
        forwards.append(between - began)
        backwards.append(_now(x.device, clock) - between)
    return median(forwards[1:]), median(backwards[1:]), output.detach()


def _now(device: torch.device, clock: Clock) -> float:
    """When everything that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
    return clock.monotonic()
