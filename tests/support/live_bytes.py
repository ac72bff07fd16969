"""How many bytes of tensors are alive, counted where they are made."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary


class LiveBytes(TorchDispatchMode):
    """While it is entered, every storage that an operation makes counts until it is freed; meta tensors have none.

    A product of bf16 matrices is zeros: only sizes count, and a processor without bf16 units takes seconds for one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default and args[0].dtype == torch.bfloat16:
            made = args[0].new_zeros(args[0].shape[0], args[1].shape[1])
        else:
            made = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._see, made)
        return made

    def _see(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if tensor.device.type != "meta" and storage not in self._known:
            self._known[storage] = True
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, storage.nbytes())
        return tensor

    def _gone(self, count: int) -> None:
        self.now -= count
