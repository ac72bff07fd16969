"""Layer times: how long one layer of each kind takes on this device, forward and backward.

The coordinator's planner decides with them which node holds which layers.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn

from atoll.core.clock import Clock
from atoll.core.errors import UnsupportedModel
from atoll.node.model.llama import INITIAL_STD
from atoll.node.model.span import Span
from atoll.node.model.span_model import Architecture, SpanModel
from atoll.node.training.device import autocast, compute_clock_seconds, synchronize

REPETITIONS = 5
LayerTimes = tuple[tuple[str, float, float], ...]  # kind; seconds per token, forward and backward


def time_single_layers(
    architecture: Architecture,
    kinds: dict[str, int],
    tokens_BT: Tensor,
    clock: Clock,
    precision: str,
) -> LayerTimes:
    """Time one layer of each kind on the device of `tokens_BT`, with one layer in memory at a time.

    `kinds`: kind → number of a layer of that kind, in layer order. Each layer gets the output of the previous layer.
    Raises `UnsupportedModel` for a layer that cannot be computed.
    """
    times, x = [], tokens_BT
    for kind, number in kinds.items():
        model = SpanModel(architecture.span_definition(Span(number, number)), tokens_BT.device)
        for _, values in model.tensors():
            nn.init.normal_(values, std=INITIAL_STD)
        try:
            with autocast(tokens_BT.device, precision):
                forward, backward, x = time_layer(model.span_definition.run, x, clock)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise UnsupportedModel(
                f"the model of the run spec cannot be computed: its {kind} failed with {str(error).splitlines()[0]}",
                "change the sizes in [model] of the run spec so that they fit together",
            ) from error
        times.append((kind, forward / tokens_BT.numel(), backward / tokens_BT.numel()))
    return tuple(times)


def time_layer(layer: Callable[[Tensor], Tensor], x: Tensor, clock: Clock) -> tuple[float, float, Tensor]:
    """Median seconds of forward and backward on `x`, and the detached output.

    The layer's gradients grow as a side effect.
    """
    forwards, backwards = [], []
    output = x
    for _ in range(1 + REPETITIONS):  # the first repetition warms up kernels and allocator and does not count
        given = x.detach().requires_grad_(x.is_floating_point())
        began = _now(x.device, clock)
        output = layer(given)
        between = _now(x.device, clock)
        if output.requires_grad:  # false for a frozen embedding
            output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]
        forwards.append(between - began)
        backwards.append(_now(x.device, clock) - between)
    return median(forwards[1:]), median(backwards[1:]), output.detach()


def _now(device: torch.device, clock: Clock) -> float:
    """Wait until the device has finished, then read its clock. On a CPU it excludes the time of other processes."""
    synchronize(device)
    return compute_clock_seconds(device, clock)
