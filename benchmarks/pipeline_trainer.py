"""A trainer process that notes when its flushes ended, and may wait instead of computing; all else is as shipped.

`STAGE_NOTES` in the environment names the file: `{"ended": [...], "most": ..., "seconds": [...]}`, the clock's seconds
at each step, how many micro-batches were here at most, and processor seconds of a forward and of a backward.
`STAGE_SECONDS`, if there, are those of a micro-batch's forward and of its backward, the way back through the span
included; what passes is then random and of the run's size.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.node.pipeline import stage_loop
from atoll.node.pipeline.stage import Stage
from atoll.node.trainer import worker


class FlushRecorder(Stage):
    """Computes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._notes = Path(os.environ["STAGE_NOTES"])
        self._most = 0
        self._ended: list[float] = []
        self._computed = [0.0, 0.0]
        self._counted = 0

    def forward(self, micro_batch: int, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        began = time.thread_time()
        output = super().forward(micro_batch, x, targets_BT, starts_BT)
        self._computed[0] += time.thread_time() - began
        self._counted += 1
        self._most = max(self._most, len(self._inputs))
        return output

    def backward(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        began = time.thread_time()
        gradient = super().backward(micro_batch, gradient_BTD)
        self._computed[1] += time.thread_time() - began
        return gradient

    def step(self, factor: float | None) -> None:
        super().step(factor)
        self._ended.append(time.monotonic())
        written = self._notes.with_suffix(".new")
        written.write_text(json.dumps(self._figures()))
        written.replace(self._notes)

    def _figures(self) -> dict[str, Any]:
        seconds = [each / max(1, self._counted) for each in self._computed]
        return {"ended": self._ended, "most": self._most, "seconds": seconds}


class SimulatedStage(FlushRecorder):
    """Takes the time that it is told, like a device with a queue: late starts are not made up for."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._forward_seconds, self._backward_seconds = map(float, os.environ["STAGE_SECONDS"].split())
        size = self._micro_batch_shape.samples, self._micro_batch_shape.tokens, self.model.span_definition.dimension
        self._passed_BTD = torch.randn(
            size, generator=torch.Generator().manual_seed(self.model.span_definition.span.first)
        )
        self.optimizer.step = lambda: None  # type: ignore[method-assign]

    def _forward_loss(self, micro_batch: int, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
        time.sleep(self._forward_seconds)
        self._inputs[micro_batch] = x
        return torch.zeros(())

    def _run(self, x: Tensor, starts_BT: Tensor | None) -> Tensor:
        time.sleep(self._forward_seconds)
        return self._passed_BTD[: len(x)]

    def backward(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        time.sleep(self._backward_seconds)
        x = self._inputs.pop(micro_batch)
        return None if self.model.span_definition.is_first else self._passed_BTD[: len(x)]

    def norms(self) -> tuple[float, ...]:
        return (1.0,) * len(self.model.span_definition.span)


if __name__ == "__main__":
    waits = "STAGE_SECONDS" in os.environ
    stage_loop.Stage = SimulatedStage if waits else FlushRecorder  # type: ignore[misc]
    status = worker.main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
