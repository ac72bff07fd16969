"""Stages without a model, whose arithmetic is counting: for tests of the schedule and of what may be said."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from support.flush_ledger import FlushLedger
from support.in_process_route import InProcessRoute, Link, oldest
from torch import Tensor

from atoll.node.pipeline.flush_machine import FlushMachine, FlushResult
from atoll.node.pipeline.inbox import StagePosition
from atoll.node.pipeline.messages import Message


class ScriptedStage:
    """Adds micro-batch m's gradient m + 1; its norm is its number."""

    def __init__(self, number: int, last: bool) -> None:
        self.number, self.last = number, last
        self.own_norm = float(number)
        self.backwards: list[int] = []
        self.steps = self.skipped = 0
        self.added_gradient = self._gradient = 0
        self.most_held = 0
        self._held: set[int] = set()

    def check(self, message: Message) -> None:
        """Everything fits."""

    def begin(self, micro_batches: int, targets: int | None = None) -> None:
        assert self._gradient == 0
        assert not self._held

    def forward(self, micro_batch: int, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
        assert int(x) == micro_batch
        self._held.add(micro_batch)
        self.most_held = max(self.most_held, len(self._held))
        return x

    def backward(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        assert gradient_BTD is None or int(gradient_BTD) == micro_batch
        self._held.remove(micro_batch)
        self.backwards.append(micro_batch)
        self._gradient += micro_batch + 1
        return None if self.number == 0 else torch.tensor(micro_batch)

    def norms(self) -> tuple[float, ...]:
        return (self.own_norm,)

    def loss(self) -> float:
        return 1.0

    def step(self, factor: float | None) -> None:
        if factor is None:
            self.skipped += 1
        else:
            self.steps += 1
            self.added_gradient += self._gradient
        self._gradient = 0

    def begin_evaluation(self, micro_batches: int, targets: int | None = None) -> None:
        self.begin(micro_batches)

    def end_evaluation(self) -> int:
        self._held.clear()
        return 0

    def abort(self) -> None:
        self._held.clear()
        self._gradient = 0

    def tied_weights(self) -> Tensor:
        return torch.tensor(0)

    def set_tied_weights(self, weights_VD: Tensor) -> None: ...

    def tied_gradient(self) -> Tensor:
        return torch.tensor(0)

    def add_tied(self, gradient_VD: Tensor) -> None: ...


class ScriptedRoute:
    """A route of them, its driver's ledger, and a way to abort after so many turns."""

    def __init__(
        self, stages: int, tied: bool = False, ahead: int = 0, pick: Callable[[Sequence[Link]], Link] = oldest
    ) -> None:
        self.stages = [ScriptedStage(number, number == stages - 1) for number in range(stages)]
        self.machines = [
            FlushMachine(StagePosition(each.number, stages, tied, ahead), each, 1.0) for each in self.stages
        ]
        self.route = InProcessRoute(self.machines, pick)
        self.ledger = FlushLedger()

    def flush(self, count: int) -> FlushResult:
        """To its end, and into the ledger if that knows of it."""
        flushed = self.route.flush(self._tokens(count))
        if self.ledger.under_way:
            self.ledger.decide(self.ledger.flush)
        return flushed

    def evaluate(self, anchor: int) -> FlushResult:
        """As many micro-batches as a flush of it may have; the stages' anchor is 0."""
        return self.route.flush(self._tokens(self.machines[0].max_evaluation_micro_batches), anchor)

    def settle(self) -> None:
        """Until all stages are ready."""
        self.route.settle()

    def flush_until_break(self, count: int, turns: int, replaced: int | None = None) -> bool:
        """After so many turns every link breaks; whether the flush was decided by then. A stage may be `replaced`."""
        self.route.begin(self._tokens(count))
        for _ in range(turns):
            self.route.turn()
        decided = self.machines[0].last_result is not None
        if self.ledger.under_way:
            (self.ledger.decide if decided else self.ledger.abort)(self.ledger.flush)
        if replaced is not None and replaced < len(self.stages):
            self._replace(replaced)
        self.route.reconnect()
        return decided

    def _replace(self, number: int) -> None:
        stage = self.stages[number] = ScriptedStage(number, self.stages[number].last)
        self.machines[number] = FlushMachine(self.machines[number].place, stage, 1.0)
        self.route.machines = tuple(self.machines)

    @staticmethod
    def _tokens(count: int) -> list[Tensor]:
        return [torch.tensor([[number, number]]) for number in range(count)]
