"""One member of the utilisation benchmark that runs torchft's DiLoCo over gloo; in torchft's own environment.

Tunings: how many fragments, whether an exchange goes on behind the steps (`fragment_sync_delay`, as long as it may be),
and the type of the parameters, which is the type that travels.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager

from benchmarks.torchft_replica import Replica
from benchmarks.utilisation_peer import serve_requests

TENSORS = 16  # of the model, all of one size; in one bucket per fragment all this is slower
DEVICES = 8  # of gloo, all the one that there is: so many tensors travel at once, on connections of their own


@dataclass(frozen=True)
class Tuning:
    """One point of the grid."""

    fragments: int
    delayed: bool
    dtype: torch.dtype = torch.float32


TUNINGS = {
    "waiting": Tuning(1, delayed=False),
    "delayed": Tuning(1, delayed=True),
    "4-fragments-delayed": Tuning(4, delayed=True),
    "delayed-bf16": Tuning(1, delayed=True, dtype=torch.bfloat16),
    "4-fragments-delayed-bf16": Tuning(4, delayed=True, dtype=torch.bfloat16),
}


class Fragment(nn.Module):
    """Tensors that are averaged together."""

    def __init__(self, tensors: int, elements: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.zeros(elements, dtype=dtype)) for _ in range(tensors))


class NoOpOptimizer(torch.optim.Optimizer):
    """An inner optimiser whose work the device does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Only what is hooked to it."""


class Torchft:
    """DiLoCo with the outer step of its paper."""

    def __init__(self, index: int, members: int, address: str) -> None:
        self._replica = Replica(index, members, address)
        self._manager: Manager
        self._inner: NoOpOptimizer
        self._tuning = TUNINGS["waiting"]
        self._steps = 0
        self._sync_every = 1  # steps from one fragment to the next

    def connect(self, contacts: list[Any]) -> Any:
        if all(contacts):
            self._manager = self._replica.manager(contacts[0], DEVICES)
        return self._replica.lighthouse() or "here"

    def begin(self, elements: int, inner_steps: int, mbit: float, tuning: str) -> None:
        self._tuning = chosen = TUNINGS[tuning]
        tensors = TENSORS // chosen.fragments
        model = [Fragment(tensors, elements // TENSORS, chosen.dtype) for _ in range(chosen.fragments)]
        outer = [torch.optim.SGD(it.parameters(), lr=0.7, momentum=0.9, nesterov=True) for it in model]
        self._inner = NoOpOptimizer([tensor for it in model for tensor in it.parameters()])
        self._sync_every = inner_steps // chosen.fragments
        DiLoCo(
            self._manager,
            model,
            self._inner,
            outer,
            sync_every=inner_steps,
            fragment_sync_delay=self._sync_every - 1 if chosen.delayed else 0,
        ).__enter__()

    def step(self) -> None:
        self._inner.step()
        self._steps += 1

    def rounds(self) -> tuple[float, int]:
        committed = self._manager.current_step()
        return committed / self._tuning.fragments, self._steps // self._sync_every - committed

    @property
    def codec(self) -> str:
        return "bf16" if self._tuning.dtype is torch.bfloat16 else "fp32"

    def close(self) -> None:
        self._replica.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve_requests(Torchft(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
