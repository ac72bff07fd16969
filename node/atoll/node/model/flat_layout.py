"""Flat layout: all parameters of a model as one fp32 vector, in layer order.

The anchor, the pseudo-gradient and all parameter vectors that nodes exchange have this layout; a layer is a slice. The
layout is read off a model, which may be on the meta device. `bind` makes the model's parameters and gradients views of
two flat tensors, so that snapshots, carries and norms are single operations.

Shape suffix: E all elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from atoll.node.model.llama import Decoder


@dataclass(frozen=True)
class Slot:
    """The position of one parameter in the flat vector."""

    name: str  # as in `named_parameters`
    layer: int
    offset: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return torch.Size(self.shape).numel()


@dataclass(frozen=True)
class FlatLayout:
    """The mapping between a model's parameters and one flat vector; a tied parameter appears once."""

    slots: tuple[Slot, ...]
    layer_offsets: tuple[int, ...]  # start of each layer, then the length of the vector

    @classmethod
    def of(cls, model: Decoder) -> FlatLayout:
        """Read the layout off a built-in decoder on any device, the meta device included."""
        seen: set[nn.Parameter] = set()
        layers: list[dict[str, nn.Parameter]] = []
        for index, layer in enumerate(model.layers):
            own = {name: parameter for name, parameter in layer.named_parameters() if parameter not in seen}
            seen.update(own.values())
            layers.append({f"layers.{index}.{name}": parameter for name, parameter in own.items()})
        return cls.of_layers(layers)

    @classmethod
    def of_layers(cls, layers: Iterable[Mapping[str, Tensor]], first: int = 0) -> FlatLayout:
        """Lay out the parameters, by name, of consecutive layers; `first` is the number of the first layer."""
        slots: list[Slot] = []
        offsets = [0]
        for index, parameters in enumerate(layers, first):
            end = offsets[-1]
            for name, parameter in parameters.items():
                slots.append(Slot(name, index, end, tuple(parameter.shape)))
                end += parameter.numel()
            offsets.append(end)
        return cls(tuple(slots), tuple(offsets))

    @property
    def elements(self) -> int:
        return self.layer_offsets[-1]

    def views(self, flat_E: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter by name, as a view of `flat_E`."""
        for slot in self.slots:
            yield slot.name, flat_E[slot.offset : slot.offset + slot.elements].view(slot.shape)

    def bind(self, model: nn.Module, weights_E: Tensor, gradients_E: Tensor | None) -> None:
        """Replace the model's parameters and gradients by views of two flat tensors; tied parameters stay tied.

        Without gradients the parameters become constants. Parameters that are not in this layout do not change.
        """
        named = dict(model.named_parameters())
        bound: dict[nn.Parameter, nn.Parameter] = {}
        for name, weight in self.views(weights_E):
            bound[named[name]] = nn.Parameter(weight, requires_grad=gradients_E is not None)
        if gradients_E is not None:
            for name, gradient in self.views(gradients_E):
                bound[named[name]].grad = gradient
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter in bound:
                    setattr(module, name, bound[parameter])
