"""One span of a model in memory, and nothing else of it.

A `Cut` is the whole model built on the meta device, where it takes no memory, with holes where other spans are: its
own `forward` then runs the layers that are left. `SpanModel` gives those their memory: flat fp32 vectors in layer
order, like those of `training/flat.py`, so that a layer is a slice whatever span it is part of.

Shape suffixes: B batch, T sequence, D model, V vocabulary, E all elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from atoll.node.pipeline.span import Span
from atoll.node.training.flat import FlatLayout


@dataclass(frozen=True)
class Tie:
    """A matrix that the first layer owns and the last one borrows, under both names."""

    owner: str
    borrower: str


@dataclass(frozen=True)
class Cut:
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

    def cut(self, span: Span, activation_checkpointing: bool = False) -> Cut:
        """Allocates nothing. With checkpointing, backward computes blocks again where gradients are wanted."""
        ...


class SpanModel:
    """A cut with memory for its parameters: zeros until they are loaded."""

    def __init__(self, cut: Cut, device: torch.device) -> None:
        self.cut, self.device = cut, device
        self.trained = layout_of(cut)
        self.frozen = layout_of(cut, trained=False)
        self.weights_E = torch.zeros(self.trained.elements, device=device)
        self.gradients_E = torch.zeros_like(self.weights_E)
        self.frozen_E = torch.zeros(self.frozen.elements, device=device)
        self.trained.bind(cut.module, self.weights_E, self.gradients_E)
        self.frozen.bind(cut.module, self.frozen_E, None)
        _move_buffers(cut.module, device)
        self._named = dict(cut.module.named_parameters())
        self._borrowed = self._bind_borrowed() if cut.tie is not None and cut.last else None

    def _bind_borrowed(self) -> nn.Parameter:
        """The borrower's view of the matrix: the owner's memory where it is here, and always a gradient of its own."""
        tie = self.cut.tie
        assert tie is not None
        meta_VD = self._named[tie.borrower]
        weights_VD = self.owned.detach() if self.cut.first else torch.zeros(meta_VD.shape, device=self.device)
        bound = nn.Parameter(weights_VD)
        bound.grad = torch.zeros_like(weights_VD)
        module, _, name = tie.borrower.rpartition(".")
        setattr(self.cut.module.get_submodule(module), name, bound)
        return bound

    @property
    def owned(self) -> nn.Parameter:
        """The tied matrix, on the first span."""
        assert self.cut.tie is not None
        return self._named[self.cut.tie.owner]

    @property
    def borrowed(self) -> nn.Parameter:
        """The tied matrix, on the last span."""
        assert self._borrowed is not None
        return self._borrowed

    @property
    def embedding(self) -> nn.Parameter | None:
        """The parameter that does not decay, if it is trained here."""
        return self._named.get(self.cut.embedding)

    def return_borrowed(self) -> None:
        """Add what the head summed of a tied matrix that is here to its owner's gradient, and begin again at zero."""
        if self._borrowed is not None and self.cut.first:
            assert self.owned.grad is not None
            assert self._borrowed.grad is not None
            self.owned.grad.add_(self._borrowed.grad)
            self._borrowed.grad.zero_()

    def parameters(self) -> list[nn.Parameter]:
        """Those that are trained here, in layer order."""
        return [self._named[slot.name] for slot in self.trained.slots]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that is loaded, trained or frozen, by the name under which a whole model has it."""
        copy = self.cut.copy
        for layout, flat_E in ((self.trained, self.weights_E), (self.frozen, self.frozen_E)):
            for name, view in layout.views(flat_E):
                plain = name.replace(".base_layer.", ".")  # what an adapter stands around
                yield (copy.owner if copy is not None and copy.borrower == plain else plain), view

    def layer(self, layer: int) -> Tensor:
        """What is trained of one layer of the model, as a view of the weights [E of the layer]."""
        first = layer - self.cut.span.first
        return self.weights_E[self.trained.layer_offsets[first] : self.trained.layer_offsets[first + 1]]


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """What was computed and is not loaded, such as rotary frequencies."""
    for part in module.modules():
        for name, buffer in list(part.named_buffers(recurse=False)):
            setattr(part, name, buffer.to(device))


def layout_of(cut: Cut, trained: bool = True) -> FlatLayout:
    """Of the parameters that are trained, or of those that are frozen; a borrowed one is neither."""
    borrowed = cut.tie.borrower if cut.tie is not None else None
    layers = [
        {name: each for name, each in parameters.items() if each.requires_grad == trained and name != borrowed}
        for parameters in cut.parameters
    ]
    return FlatLayout.of_layers(layers, cut.span.first)
