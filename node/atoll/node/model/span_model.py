"""One span of a model in memory, and nothing else of it.

A `SpanDefinition` is the whole model built on the meta device, where it takes no memory, with holes where other spans
are: its own `forward` then runs the layers that are left. `SpanModel` gives those their memory: flat fp32 vectors in
layer order, like those of `model/flat.py`, so that a layer is a slice whatever span it is part of.

Shape suffixes: B batch, T sequence, D model, V vocabulary, E all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
    """A matrix that the first layer owns and the last one borrows, under both names."""

    owner: str
    borrower: str


@dataclass(frozen=True)
class SpanDefinition:
    """A model on the meta device without what lies outside `span`."""

    span: Span
    layers: int  # of the whole model
    dimension: int  # D of what passes between spans
    vocabulary: int
    module: nn.Module
    run: Callable[[Tensor], Tensor]  # tokens [B,T] or activations [B,T,D] → activations, or logits [B,T,V]
    parameters: tuple[Mapping[str, nn.Parameter], ...]  # by layer of the span; frozen ones require no gradient
    embedding: str  # the parameter that does not decay, in the first layer
    tie: Tie | None = None  # of parameters that are trained
    copy: Tie | None = None  # of parameters that are frozen: the borrower has its own, and nothing travels

    @property
    def first(self) -> bool:
        return self.span.first == 0

    @property
    def last(self) -> bool:
        return self.span.last == self.layers - 1


class Architecture(Protocol):
    """A decoder that can be cut between any two of its layers."""

    @property
    def layers(self) -> int:
        """Embedding, blocks, head."""
        ...

    def span_definition(self, span: Span, activation_checkpointing: bool = False) -> SpanDefinition:
        """Allocates nothing. With checkpointing, backward computes blocks again where gradients are wanted."""
        ...


class TrainableModel(Protocol):
    """A cut in memory, as optimisers see it: on one device, or this device's pieces of it."""

    span_definition: SpanDefinition
    device: torch.device
    trained: FlatLayout  # of what is trained, wherever it lies
    frozen: FlatLayout
    weights: Weights

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """What can be loaded here by the name under which a whole model has it; all that is frozen, at least."""
        ...

    def run(self, x: Tensor) -> Tensor:
        """What the cut's `run` does."""
        ...

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained, or their pieces, in layer order."""
        ...

    @property
    def embedding(self) -> nn.Parameter | None:
        """The parameter that does not decay, if it is trained here."""
        ...

    @property
    def muon_matrices(self) -> list[nn.Parameter]:
        """The matrices that are neither of the first nor of the last layer of the whole model."""
        ...

    def gather_gradients(self) -> None:
        """Make them whole when backward is done: until then they lie where it left them."""
        ...

    def norms(self) -> tuple[float, ...]:
        """Of the gradient, one a layer."""
        ...

    def scale_gradients(self, factor: float) -> None:
        """Multiply all of them."""
        ...

    def zero_gradients(self) -> None:
        """Begin again."""
        ...


class StageModel(TrainableModel, Protocol):
    """One that may be a stage: a tied matrix may have its owner here and its borrower elsewhere, or the reverse."""

    @property
    def owned(self) -> Tensor:
        """The tied matrix [V,D], on the first span."""
        ...

    @property
    def borrowed(self) -> nn.Parameter:
        """The tied matrix [V,D], on the last span."""
        ...


class SpanModel:
    """A cut with memory for its parameters: zeros until they are loaded."""

    def __init__(self, span_definition: SpanDefinition, device: torch.device) -> None:
        self.span_definition, self.device = span_definition, device
        self.trained = layout_of(span_definition)
        self.frozen = layout_of(span_definition, trained=False)
        self.weights_E = torch.zeros(self.trained.elements, device=device)
        self.weights: Weights = WholeWeights(self.weights_E)
        self.gradients_E = torch.zeros_like(self.weights_E)
        self.frozen_E = torch.zeros(self.frozen.elements, device=device)
        self.trained.bind(span_definition.module, self.weights_E, self.gradients_E)
        self.frozen.bind(span_definition.module, self.frozen_E, None)
        move_buffers(span_definition.module, device)
        self._named = dict(span_definition.module.named_parameters())
        self._borrowed = self._bind_borrowed() if span_definition.tie is not None and span_definition.last else None

    def _bind_borrowed(self) -> nn.Parameter:
        """The borrower's view of the matrix: the owner's memory where it is here, and always a gradient of its own."""
        tie = self.span_definition.tie
        assert tie is not None
        meta_VD = self._named[tie.borrower]
        weights_VD = (
            self.owned.detach() if self.span_definition.first else torch.zeros(meta_VD.shape, device=self.device)
        )
        bound = nn.Parameter(weights_VD)
        bound.grad = torch.zeros_like(weights_VD)
        module, _, name = tie.borrower.rpartition(".")
        setattr(self.span_definition.module.get_submodule(module), name, bound)
        return bound

    @property
    def owned(self) -> nn.Parameter:
        """The tied matrix, on the first span."""
        assert self.span_definition.tie is not None
        return self._named[self.span_definition.tie.owner]

    @property
    def borrowed(self) -> nn.Parameter:
        """The tied matrix, on the last span."""
        assert self._borrowed is not None
        return self._borrowed

    @property
    def embedding(self) -> nn.Parameter | None:
        """The parameter that does not decay, if it is trained here."""
        return self._named.get(self.span_definition.embedding)

    @property
    def muon_matrices(self) -> list[nn.Parameter]:
        """The matrices that are neither of the first nor of the last layer of the whole model."""
        within = range(1, self.span_definition.layers - 1)
        return [self._named[slot.name] for slot in self.trained.slots if slot.layer in within and len(slot.shape) == 2]

    def run(self, x: Tensor) -> Tensor:
        """Tokens or activations to activations or logits."""
        return self.span_definition.run(x)

    def gather_gradients(self) -> None:
        """Add what the head summed of a tied matrix that is here to its owner's gradient, and begin again at zero."""
        if self._borrowed is not None and self.span_definition.first:
            assert self.owned.grad is not None
            assert self._borrowed.grad is not None
            self.owned.grad.add_(self._borrowed.grad)
            self._borrowed.grad.zero_()

    def norms(self) -> tuple[float, ...]:
        """Of the gradient, one a layer."""
        norms = [torch.linalg.vector_norm(self.gradients_E[a:b]) for a, b in pairwise(self.trained.layer_offsets)]
        return tuple(torch.stack(norms).tolist())

    def scale_gradients(self, factor: float) -> None:
        """Multiply all of them."""
        self.gradients_E.mul_(factor)

    def zero_gradients(self) -> None:
        """Begin again; what a head borrows has a gradient of its own, which goes to its owner."""
        self.gradients_E.zero_()

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained here, in layer order."""
        return [self._named[slot.name] for slot in self.trained.slots]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that is loaded, trained or frozen, by the name under which a whole model has it."""
        yield from named(self.span_definition, self.trained, self.weights_E)
        yield from named(self.span_definition, self.frozen, self.frozen_E)

    def layer(self, layer: int) -> Tensor:
        """What is trained of one layer of the model, as a view of the weights [E of the layer]."""
        first = layer - self.span_definition.span.first
        return self.weights_E[self.trained.layer_offsets[first] : self.trained.layer_offsets[first + 1]]


def named(span_definition: SpanDefinition, layout: FlatLayout, flat_E: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views by the name under which a whole model has them."""
    copy = span_definition.copy
    for name, view in layout.views(flat_E):
        plain = name.replace(".base_layer.", ".")  # what an adapter stands around
        yield (copy.owner if copy is not None and copy.borrower == plain else plain), view


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """What was computed and is not loaded, such as rotary frequencies."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def layout_of(span_definition: SpanDefinition, trained: bool = True) -> FlatLayout:
    """Of the parameters that are trained, or of those that are frozen; a borrowed one is neither."""
    borrowed = span_definition.tie.borrower if span_definition.tie is not None else None
    layers = [
        {name: each for name, each in parameters.items() if each.requires_grad == trained and name != borrowed}
        for parameters in span_definition.parameters
    ]
    return FlatLayout.of_layers(layers, span_definition.span.first)
