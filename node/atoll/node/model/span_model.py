"""One span of a model in memory, and no other layers.

A `SpanDefinition` is the whole model, built on the meta device where it takes no memory, with the layers of other spans
removed. The model's own `forward` then runs the layers that are left. `SpanModel` allocates these layers as flat fp32
vectors in layer order (`flat_layout.py`), so that a layer is a slice in every span that contains it.

Shape suffixes: B batch, T sequence, D model, V vocabulary, E all elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.local_weights import Weights, WholeWeights
from atoll.node.model.span import Span


@dataclass(frozen=True)
class Tie:
    """A matrix that the first and the last layer share: its name in the owner (first) and in the borrower (last)."""

    owner: str
    borrower: str


class Run(Protocol):
    """A span as a function. `starts_BT`: where documents start (bool), if each is separate; None: one document."""

    def __call__(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class SpanDefinition:
    """A model on the meta device without the layers outside `span`."""

    span: Span
    layers: int  # of the whole model
    dimension: int  # D of the activations between spans
    vocabulary: int
    module: nn.Module
    run: Run  # tokens [B,T] or activations [B,T,D] → activations, or logits [B,T,V]
    parameters: tuple[Mapping[str, nn.Parameter], ...]  # by layer of the span; frozen ones require no gradient
    embedding: str  # name of the embedding's parameter, which has no weight decay
    tie: Tie | None = None  # if trained
    copy: Tie | None = None  # if frozen: the borrower loads a copy, and nothing is exchanged

    @property
    def is_first(self) -> bool:
        return self.span.first == 0

    @property
    def is_last(self) -> bool:
        return self.span.last == self.layers - 1


class SpanModule(nn.Module):
    """A span definition as one module, for torch functions that need a module: `run` is a plain function.

    It computes with the current parameters of `module`.
    """

    def __init__(self, span_definition: SpanDefinition) -> None:
        super().__init__()
        self.module, self._run = span_definition.module, span_definition.run

    def forward(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        return self._run(x, starts_BT)


class Architecture(Protocol):
    """A decoder that can be cut between any two of its layers."""

    @property
    def layers(self) -> int:
        """Number of layers: embedding, blocks, head."""
        ...

    def span_definition(self, span: Span, activation_checkpointing: bool = False) -> SpanDefinition:
        """Define a span, without allocation.

        With activation checkpointing, backward recomputes blocks where gradients are needed.
        """
        ...


class TrainableModel(Protocol):
    """A span in memory, as seen by optimisers: all of it on one device, or this device's shards."""

    span_definition: SpanDefinition
    device: torch.device
    trained_layout: FlatLayout  # layout of all trained parameters, including those on other devices
    frozen_layout: FlatLayout
    weights: Weights

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that can be loaded on this device, by name in the whole model.

        They include at least all frozen ones.
        """
        ...

    def run(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        """Compute the span as `Run` does: tokens or activations to activations or logits."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """List the trained parameters, or this device's shards of them, in layer order."""
        ...

    @property
    def embedding(self) -> nn.Parameter | None:
        """The embedding's parameter, which has no weight decay, if it is trained here."""
        ...

    @property
    def muon_matrices(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The matrices of all layers but the first and the last layer of the whole model.

        Each as it is among `parameters()`, and as Muon steps it: as a whole, also if this device has a shard.
        """
        ...

    def gather_gradients(self) -> None:
        """Complete the gradients after backward; until then they are where backward left them."""
        ...

    def norms(self) -> tuple[float, ...]:
        """Compute the gradient's norm, one per layer."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        ...

    def zero_gradients(self) -> None:
        """Reset all gradients."""
        ...


class StageModel(TrainableModel, Protocol):
    """A model of a stage: one end of a tied matrix may be on another node."""

    @property
    def tied_weight(self) -> Tensor:
        """The tied matrix [V,D] on the first span."""
        ...

    @property
    def tied_weight_copy(self) -> nn.Parameter:
        """The copy of the tied matrix [V,D] on the last span."""
        ...


class SpanModel:
    """A span with memory for its parameters, which are zero until they are loaded."""

    def __init__(self, span_definition: SpanDefinition, device: torch.device) -> None:
        self.span_definition, self.device = span_definition, device
        self.trained_layout = layout_of(span_definition)
        self.frozen_layout = layout_of(span_definition, trained=False)
        self.weights_E = torch.zeros(self.trained_layout.elements, device=device)
        self.weights: Weights = WholeWeights(self.weights_E)
        self.gradients_E = torch.zeros_like(self.weights_E)
        self.frozen_E = torch.zeros(self.frozen_layout.elements, device=device)
        self.trained_layout.bind(span_definition.module, self.weights_E, self.gradients_E)
        self.frozen_layout.bind(span_definition.module, self.frozen_E, None)
        move_buffers(span_definition.module, device)
        self._named = dict(span_definition.module.named_parameters())
        self._tied_weight_copy = (
            self._bind_tied_weight_copy() if span_definition.tie is not None and span_definition.is_last else None
        )

    def _bind_tied_weight_copy(self) -> nn.Parameter:
        """Give the borrower a view of the tied matrix, with a separate gradient.

        The view shares the owner's memory if this span contains the owner.
        """
        tie = self.span_definition.tie
        assert tie is not None
        meta_VD = self._named[tie.borrower]
        weights_VD = (
            self.tied_weight.detach()
            if self.span_definition.is_first
            else torch.zeros(meta_VD.shape, device=self.device)
        )
        bound = nn.Parameter(weights_VD)
        bound.grad = torch.zeros_like(weights_VD)
        module, _, name = tie.borrower.rpartition(".")
        setattr(self.span_definition.module.get_submodule(module), name, bound)
        return bound

    @property
    def tied_weight(self) -> nn.Parameter:
        assert self.span_definition.tie is not None
        return self._named[self.span_definition.tie.owner]

    @property
    def tied_weight_copy(self) -> nn.Parameter:
        assert self._tied_weight_copy is not None
        return self._tied_weight_copy

    @property
    def embedding(self) -> nn.Parameter | None:
        return self._named.get(self.span_definition.embedding)

    @property
    def muon_matrices(self) -> list[tuple[nn.Parameter, Tensor]]:
        within = range(1, self.span_definition.layers - 1)
        return [
            (self._named[slot.name], self._named[slot.name])
            for slot in self.trained_layout.slots
            if slot.layer in within and len(slot.shape) == 2
        ]

    def run(self, x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        return self.span_definition.run(x, starts_BT)

    def gather_gradients(self) -> None:
        """Add the head's gradient of a tied matrix to the owner's and reset it, if this span contains both."""
        if self._tied_weight_copy is not None and self.span_definition.is_first:
            assert self.tied_weight.grad is not None
            assert self._tied_weight_copy.grad is not None
            self.tied_weight.grad.add_(self._tied_weight_copy.grad)
            self._tied_weight_copy.grad.zero_()

    def norms(self) -> tuple[float, ...]:
        norms = [
            torch.linalg.vector_norm(self.gradients_E[a:b]) for a, b in pairwise(self.trained_layout.layer_offsets)
        ]
        return tuple(torch.stack(norms).tolist())

    def scale_gradients(self, factor: float) -> None:
        self.gradients_E.mul_(factor)

    def zero_gradients(self) -> None:
        """Reset all gradients but the head's of a tied matrix, which is sent to the owner."""
        self.gradients_E.zero_()

    def parameters(self) -> list[nn.Parameter]:
        return [self._named[slot.name] for slot in self.trained_layout.slots]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all trained and frozen tensors by name in the whole model."""
        yield from named(self.span_definition, self.trained_layout, self.weights_E)
        yield from named(self.span_definition, self.frozen_layout, self.frozen_E)


def named(span_definition: SpanDefinition, layout: FlatLayout, flat_E: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views of a flat vector by name in the whole model."""
    copy = span_definition.copy
    for name, view in layout.views(flat_E):
        plain = name.replace(".base_layer.", ".")  # the layer inside an adapter
        yield (copy.owner if copy is not None and copy.borrower == plain else plain), view


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers, which are computed and not loaded (rotary frequencies), to a device."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def layout_of(span_definition: SpanDefinition, trained: bool = True) -> FlatLayout:
    """Lay out the span's trained parameters, or the frozen ones; a borrowed matrix is in neither layout."""
    borrowed = span_definition.tie.borrower if span_definition.tie is not None else None
    layers = [
        {name: each for name, each in parameters.items() if each.requires_grad == trained and name != borrowed}
        for parameters in span_definition.parameters
    ]
    return FlatLayout.of_layers(layers, span_definition.span.first)
