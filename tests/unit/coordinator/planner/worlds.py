"""Small swarms to plan for, with round numbers: 10 blocks of 100 M parameters, links and machines that tests change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from atoll.coordinator.planner.links import MeasuredPath, links_from_paths
from atoll.coordinator.planner.problem import Layer, Machine, Problem, Training, Wishes, decoder_layers

GB = 1e9
MBIT = 1e6 / 8
LAYERS = decoder_layers(
    blocks=10, dimension=1024, block_parameters=100_000_000, vocabulary=32_000, sequence_length=1024
)
WISHES = Wishes()
TRAINING = Training(micro_batch_tokens=1024, micro_batches=8, round_tokens=1_000_000)


def machine(name: str, **changed: Any) -> Machine:
    """10 TFLOP/s, 24 GB, 1 Gbit/s, in Europe."""
    usual = Machine(
        name=name,
        device_memory_bytes=24 * GB,
        host_memory_bytes=64 * GB,
        uplink_bytes_per_second=1000 * MBIT,
        downlink_bytes_per_second=1000 * MBIT,
        flops_per_second=1e13,
        region="europe",
        price_per_hour=0.5,
    )
    return replace(usual, **changed)


def swarm(
    machines: Sequence[Machine],
    paths: Sequence[MeasuredPath] = (),
    *,
    layers: tuple[Layer, ...] = LAYERS,
    training: Training = TRAINING,
    wishes: Wishes = WISHES,
) -> Problem:
    """All 20 ms apart, but for `paths`."""
    regions = sorted({item.region for item in machines})
    usual = [MeasuredPath(one, other, 0.02) for one in regions for other in regions]
    return Problem(tuple(machines), links_from_paths(machines, [*usual, *paths]), layers, training, wishes)
