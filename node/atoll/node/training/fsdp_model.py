"""Model sharded over a node's devices by FSDP2 (`fully_shard`; Zhao et al. 2023, arXiv:2304.11277).

Every device has a shard of each parameter, with its gradient, moments, anchor and snapshot. A block is gathered only
while it computes. Each device computes its share of the samples, and gradients are summed by FSDP2 during backward.
Other nodes see one member: it sends and receives whole vectors, in memory that its processes share
(`model/local_weights.py`).

Embedding, final norm and head are one FSDP unit, so that a tied matrix stays one. Frozen parameters (a base under
adapters) are whole on each device.
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from atoll.core.errors import ConfigError
from atoll.core.run_spec import OptimizerSection
from atoll.node.model.local_weights import ShardedWeights, ShardSlices, Weights
from atoll.node.model.run_model import RunModel
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanDefinition, SpanModule, Tie, layout_of, move_buffers, named
from atoll.node.training.device import working_precision
from atoll.node.training.device_group import DeviceGroup


class FsdpModel:
    """One process's part of a sharded span: a `TrainableModel`, and a `StageModel` on one end of a tie."""

    def __init__(self, span_definition: SpanDefinition, group: DeviceGroup, *, compiles: bool = False) -> None:
        """Shard the span; trained parameters are zero until they are loaded."""
        self.device, self._group = group.device, group
        self.trained_layout, self.frozen_layout = layout_of(span_definition), layout_of(span_definition, trained=False)
        self.span_definition = (
            _tied(span_definition) if span_definition.is_first and span_definition.is_last else span_definition
        )
        self.whole = SpanModule(span_definition)
        blocks = [span_definition.module.get_submodule(name) for name in _blocks(span_definition)]
        ignored = {parameter for parameter in span_definition.module.parameters() if not parameter.requires_grad}
        if self._borrows:
            ignored.add(_parameter(span_definition, self._tie.borrower))
        for unit in (*blocks, self.whole):
            if compiles and unit is not self.whole:
                unit.compile()
            # reshard also the outermost unit, because evaluations change parameters and run no backward
            state = fully_shard(unit, mesh=group.mesh, ignored_params=ignored, reshard_after_forward=True)
            state.set_gradient_divide_factor(1.0)  # each process's loss is a summand of the whole loss, not a mean
            state.set_force_sum_reduction_for_comms(True)  # gloo cannot divide while it reduces, not even by one
        buffers = [(part, dict(part.named_buffers(recurse=False))) for part in span_definition.module.modules()]
        self.whole.to_empty(device=self.device)
        for part, computed in buffers:
            for name, buffer in computed.items():
                setattr(part, name, buffer)
        move_buffers(span_definition.module, self.device)
        self.frozen_E = torch.zeros(self.frozen_layout.elements, device=self.device)
        self.frozen_layout.bind(span_definition.module, self.frozen_E, None)
        self._tied_weight_copy = self._allocate_tied_weight_copy() if self._borrows else None
        parameters = dict(span_definition.module.named_parameters())
        self._dtensors = [cast("DTensor", parameters[slot.name]) for slot in self.trained_layout.slots]
        self._own = [nn.Parameter(each.to_local().detach()) for each in self._dtensors]
        for own in self._own:
            own.data.zero_()
        pieces = ShardSlices.of(self.trained_layout, group.rank, group.size)
        self.weights: Weights = ShardedWeights(pieces, [own.data for own in self._own], self.device)

    def _allocate_tied_weight_copy(self) -> nn.Parameter:
        """Allocate a copy of a matrix that another node owns: whole on each device, with its own gradient."""
        module, _, name = self._tie.borrower.rpartition(".")
        bound = nn.Parameter(
            torch.zeros(_parameter(self.span_definition, self._tie.borrower).shape, device=self.device)
        )
        bound.grad = torch.zeros_like(bound)
        setattr(self.span_definition.module.get_submodule(module), name, bound)
        return bound

    def run(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """Compute the span for this process's samples. All processes of the group must call this at the same time."""
        return cast("Tensor", self.whole(x, starts_BT))

    def parameters(self) -> list[nn.Parameter]:
        """Return this device's shards; an optimiser steps them like whole parameters."""
        return self._own

    @property
    def embedding(self) -> nn.Parameter | None:
        """The shard of the embedding, which has no weight decay."""
        held = any(slot.name == self.span_definition.embedding for slot in self.trained_layout.slots)
        return self._own[self._place_of(self.span_definition.embedding)] if held else None

    @property
    def muon_matrices(self) -> list[tuple[nn.Parameter, Tensor]]:
        """This device's shards, each with its DTensor: all devices step these at the same time."""
        within = range(1, self.span_definition.layers - 1)
        return [
            (own, dtensor)
            for own, dtensor, slot in zip(self._own, self._dtensors, self.trained_layout.slots, strict=True)
            if slot.layer in within and len(slot.shape) == 2
        ]

    @property
    def _tie(self) -> Tie:
        assert self.span_definition.tie is not None
        return self.span_definition.tie

    @property
    def _borrows(self) -> bool:
        """True if a tied matrix here is a copy, whose owner is another node."""
        return self.span_definition.tie is not None and self.span_definition.is_last

    def _place_of(self, name: str) -> int:
        return [slot.name for slot in self.trained_layout.slots].index(name)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all frozen tensors by their name in the whole model."""
        return named(self.span_definition, self.frozen_layout, self.frozen_E)

    @property
    def tied_weight_copy(self) -> nn.Parameter:
        assert self._tied_weight_copy is not None
        return self._tied_weight_copy

    @property
    def tied_weight(self) -> DTensor:
        return self._dtensors[self._place_of(self._tie.owner)]

    def gather_tied_weight(self) -> Tensor:
        """Gather a copy [V,D] of the tied matrix from all devices."""
        return cast("DTensor", self.tied_weight.detach()).full_tensor()

    def add_to_tied_gradient(self, gradient_VD: Tensor) -> None:
        """Add the gradient of the tied matrix's other end, equal on all devices, to the gradient here."""
        own = self._own[self._place_of(self._tie.owner)]
        rows = -(-gradient_VD.shape[0] // self._group.size)
        piece = gradient_VD[self._group.rank * rows : self._group.rank * rows + own.shape[0]]
        own.grad = piece.clone() if own.grad is None else own.grad + piece

    def gather_gradients(self) -> None:
        """Copy to each shard the gradient that backward left in its DTensor."""
        for own, dtensor in zip(self._own, self._dtensors, strict=True):
            own.grad = None if dtensor.grad is None else cast("DTensor", dtensor.grad).to_local()

    def norms(self) -> tuple[float, ...]:
        """Compute the gradient's norm over all devices, one per layer."""
        squares_L = torch.zeros(len(self.span_definition.parameters), dtype=torch.float64, device=self.device)
        for own, slot in zip(self._own, self.trained_layout.slots, strict=True):
            if own.grad is not None and own.grad.numel():
                squares_L[slot.layer - self.span_definition.span.first] += (
                    torch.linalg.vector_norm(own.grad).double().square()
                )
        return tuple(self._group.all_reduce_sum(squares_L).sqrt().tolist())

    def scale_gradients(self, factor: float) -> None:
        gradients = [own.grad for own in self._own if own.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, factor)

    def zero_gradients(self) -> None:
        for own, dtensor in zip(self._own, self._dtensors, strict=True):
            own.grad = dtensor.grad = None


def shard_model(
    run: RunModel, span: Span, group: DeviceGroup, section: OptimizerSection, *, checkpointing: bool = False
) -> FsdpModel:
    """Shard a span over the group: frozen parameters get their values, trained ones are zero.

    Raises `ConfigError` if several devices cannot train this model.
    """
    if working_precision(section.precision, group.device) == "fp16":
        raise ConfigError(
            "these devices would train in fp16, and several devices cannot share a loss scale",
            "run one daemon per device, or use GPUs with bf16",
        )
    model = FsdpModel(
        run.architecture.span_definition(span, checkpointing),
        group,
        compiles=section.compile and group.device.type == "cuda",
    )
    run.load_frozen(model)
    return model


def _tied(span_definition: SpanDefinition) -> SpanDefinition:
    """Merge the two parameters of a tied matrix: a span definition has two, for spans with only one end of the tie."""
    if span_definition.tie is not None:
        module, _, name = span_definition.tie.borrower.rpartition(".")
        setattr(
            span_definition.module.get_submodule(module), name, _parameter(span_definition, span_definition.tie.owner)
        )
    return replace(span_definition, tie=None)


def _parameter(span_definition: SpanDefinition, name: str) -> nn.Parameter:
    return dict(span_definition.module.named_parameters(remove_duplicate=False))[name]


def _blocks(span_definition: SpanDefinition) -> list[str]:
    """Return the module paths of all layers except the model's first and last one."""
    names = []
    for layer, parameters in enumerate(span_definition.parameters, span_definition.span.first):
        if 0 < layer < span_definition.layers - 1:
            paths = [name.rpartition(".")[0].replace(".", "/") for name in parameters]
            names.append(os.path.commonpath(paths).replace("/", "."))
    return names
