"""One stage's part in a flush, as a state machine: messages in, actions in the schedule's order, messages out.

The runner reads no socket and no clock: whoever carries messages calls `deliver`, then `advance` until it answers
None. Messages of one link must come in order; how links interleave changes nothing. The first stage's runner also
drives: it is fed micro-batches and decides how each flush ends.

A flush ends by one verdict, which only the first stage makes: step, skip (a gradient is not finite) or abort. Before
the verdict nothing on any stage has changed but gradients, and an abort drops those; after it nothing can be aborted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from atoll.core.errors import InvalidTransition, PeerMisbehaved
from atoll.node.pipeline.inbox import Inbox, Place
from atoll.node.pipeline.messages import (
    Activation,
    Begin,
    Gradient,
    Message,
    Report,
    TiedGradient,
    TiedWeights,
    Verdict,
)
from atoll.node.pipeline.schedule import Action, Backward, Forward, Settle, Step, actions
from atoll.node.training.optim import clip_factor


class Compute(Protocol):
    """A span's arithmetic. Micro-batches are numbered from 0 in each flush."""

    def check(self, message: Message) -> None:
        """Raise `PeerMisbehaved` for tensors of another shape or dtype than this span takes."""
        ...

    def begin(self, micro_batches: int) -> None:
        """A flush of so many begins; gradients are zero."""
        ...

    def forward(self, micro_batch: int, x: Tensor, targets_BT: Tensor) -> Tensor:
        """The span's output; on the last stage, the loss."""
        ...

    def backward(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        """Add to the gradients. The gradient of the span's input; None on the first stage."""
        ...

    def norms(self) -> tuple[float, ...]:
        """Of the gradient, one a layer."""
        ...

    def loss(self) -> float:
        """Mean of the flush, on the last stage."""
        ...

    def step(self, factor: float | None) -> None:
        """Scale the gradients and step, or with None take no step. They are zero afterwards."""
        ...

    def abort(self) -> None:
        """Forget the flush; gradients are zero."""
        ...

    def tied_weights(self) -> Tensor:
        """Owner: the matrix, a copy."""
        ...

    def borrow(self, weights_VD: Tensor) -> None:
        """Borrower: use this one from now on."""
        ...

    def tied_gradient(self) -> Tensor:
        """Borrower: what to return of this flush."""
        ...

    def add_tied(self, gradient_VD: Tensor) -> None:
        """Owner: make its gradient whole."""
        ...


Outgoing = tuple[int, Message]  # to which stage


@dataclass(frozen=True)
class Flushed:
    """How a flush ended, at the driver."""

    verdict: Verdict
    loss: float = 0.0  # nats per token
    norms: tuple[float, ...] = ()  # one a layer of the whole model


class Runner:
    """One stage. One that takes another's place is told the driver's `verdicts`."""

    def __init__(self, place: Place, compute: Compute, clip_norm: float, verdicts: Sequence[Verdict] = ()) -> None:
        self.place = place
        self.ended = max((verdict.flush for verdict in verdicts), default=0)  # the last flush that is over here
        self.finished: Flushed | None = None  # the newest flush, at the driver
        self._torn = False
        self._compute, self._clip_norm = compute, clip_norm
        self._actions: deque[Action] = deque()
        self._inboxes: dict[int, Inbox] = {}  # by flush
        self._lent: TiedWeights | None = None  # the newest, whatever its flush: it travels on a link of its own
        self._decided = next((verdict for verdict in verdicts if not verdict.aborted), None)
        self._aborted = max((verdict.flush for verdict in verdicts if verdict.aborted), default=0)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """What another stage may have missed, in order: the last decision, and up to where all else was aborted."""
        decided = () if self._decided is None else (self._decided,)
        return (*decided, Verdict(self._aborted, None, aborted=True)) if self._aborted else decided

    @property
    def _inbox(self) -> Inbox:
        return self._inboxes.setdefault(self.ended + 1, Inbox(self.place))

    @property
    def held(self) -> int:
        """Micro-batches that were taken forward and not yet backward."""
        return self._inbox.forwarded - self._inbox.backwarded

    # --- what comes in ------------------------------------------------------------------------------

    def deliver(self, sender: int, message: Message) -> None:
        """Take a neighbour's message; those of flushes that are over are dropped. Raises `PeerMisbehaved`."""
        if message.flush <= self.ended or (isinstance(message, Verdict) and message == self._inbox.get(Verdict)):
            return
        inbox = self._inboxes.get(message.flush) or Inbox(self.place)
        inbox.check(sender, message)
        self._compute.check(message)
        if isinstance(message, TiedWeights):
            self._lend(message)
        elif isinstance(message, Verdict) and message.aborted:
            self._aborted = max(self._aborted, message.flush)
        elif message.flush > max(self.ended, self._aborted) + 2:
            raise PeerMisbehaved(f"stage {sender} is at flush {message.flush}, we are at {self.ended + 1}")
        else:
            self._inboxes[message.flush] = inbox
            inbox.put(message)

    def _lend(self, weights: TiedWeights) -> None:
        if self._lent is not None and self._lent.flush >= weights.flush:
            raise PeerMisbehaved(f"the tied matrix came twice, for flush {weights.flush}")
        self._lent = weights

    def feed(self, micro_batches: Sequence[tuple[Tensor, Tensor]]) -> int:
        """Driver: begin the next flush with inputs and targets, int64 [B,T] each; its number."""
        flush = self.ended + 1
        if not self.place.first or self._inbox.has(Begin):
            raise InvalidTransition("a flush begins at the first stage, when the one before has ended")
        self._inbox.put(Begin(flush, len(micro_batches)))
        for number, (tokens_BT, targets_BT) in enumerate(micro_batches):
            self._inbox.put(Activation(flush, number, tokens_BT, targets_BT))
        return flush

    def abort(self) -> None:
        """Driver: let the flush end with nothing. Raises `InvalidTransition` when there is none, or it is decided."""
        self._require_whole()
        if not self.place.first or not self._inbox.has(Begin) or self._inbox.has(Verdict):
            raise InvalidTransition("there is no flush, or it is decided and all stages will step")
        self._aborted = self.ended + 1

    def cut_off(self) -> None:
        """All links broke: forget what was under way, but for a flush that may have been decided with our report."""
        self._require_whole()
        settled = bool(self._actions) and isinstance(self._actions[0], Step)
        self._inboxes = {self.ended + 1: self._inbox} if settled else {}
        if not settled:
            self._actions.clear()
            self._compute.abort()

    # --- what is done -------------------------------------------------------------------------------

    def advance(self) -> list[Outgoing] | None:
        """Carry out the next action and say what to send; None while it waits for a message."""
        self._require_whole()
        if self._aborted > self.ended and not self._inbox.has(Verdict):
            return self._drop()
        if not self._actions:
            return self._begin()
        if not self._ready(self._actions[0]):
            return None
        match self._actions.popleft():
            case Forward(number):
                return self._forward(number)
            case Backward(number):
                return self._backward(number)
            case Settle():
                return self._settle()
            case Step():
                return self._step()

    def _ready(self, action: Action) -> bool:
        place, inbox = self.place, self._inbox
        match action:
            case Forward(number):
                return inbox.has(Activation, number) and (number > 0 or self._borrowed())
            case Backward(number):
                return place.last or inbox.has(Gradient, number)
            case Settle():
                return (place.last or inbox.has(Report)) and (not place.lends or inbox.has(TiedGradient))
            case Step():
                return inbox.has(Verdict)

    def _borrowed(self) -> bool:
        return not self.place.borrows or (self._lent is not None and self._lent.flush == self.ended + 1)

    def _begin(self) -> list[Outgoing] | None:
        place = self.place
        begin = self._inbox.get(Begin)
        if begin is None:
            return None
        self._compute.begin(begin.micro_batches)
        self._actions.extend(actions(begin.micro_batches, place.credits(begin.micro_batches)))
        lent = [(place.stages - 1, TiedWeights(begin.flush, self._compute.tied_weights()))] if place.lends else []
        return [*self._downstream(begin), *lent]

    def _forward(self, number: int) -> list[Outgoing]:
        if number == 0 and self.place.borrows and self._lent is not None:
            self._compute.borrow(self._lent.weights_VD)
        taken = self._inbox.pop(Activation, number)
        output = self._compute.forward(number, taken.x_BTD, taken.targets_BT)
        self._inbox.forwarded += 1
        return self._downstream(Activation(taken.flush, number, output, taken.targets_BT))

    def _backward(self, number: int) -> list[Outgoing]:
        taken = None if self.place.last else self._inbox.pop(Gradient, number).gradient_BTD
        gradient = self._compute.backward(number, taken)
        self._inbox.backwarded += 1
        return [] if gradient is None else self._upstream(Gradient(self.ended + 1, number, gradient))

    def _settle(self) -> list[Outgoing]:
        place, flush = self.place, self.ended + 1
        returned = TiedGradient(flush, self._compute.tied_gradient()) if place.tied and place.last else None
        if place.lends:
            self._compute.add_tied(self._inbox.pop(TiedGradient).gradient_VD)
        elif returned is not None and place.first:
            self._compute.add_tied(returned.gradient_VD)
        report = Report(flush, self._compute.norms(), self._compute.loss() if place.last else 0.0)
        if not place.last:
            after = self._inbox.pop(Report)
            report = Report(flush, report.norms + after.norms, after.loss)
        if place.first:
            self._inbox.put(report)
            self._inbox.put(Verdict(flush, clip_factor(report.norms, self._clip_norm)))
        self._inbox.reported = True
        lent = [(0, returned)] if returned is not None and place.borrows else []
        return [*lent, *self._upstream(report)]

    def _step(self) -> list[Outgoing]:
        verdict = self._inbox.pop(Verdict)
        self._torn = True  # weights of both flushes, until it is done
        self._compute.step(verdict.factor)
        self._torn = False
        self._decided = verdict
        if self.place.first:
            report = self._inbox.pop(Report)
            self.finished = Flushed(verdict, report.loss, report.norms)
        return self._end(verdict)

    def _require_whole(self) -> None:
        if self._torn:
            raise InvalidTransition(
                "this stage failed in the midst of a step", "replace it: its weights are of no flush"
            )

    def _drop(self) -> list[Outgoing]:
        self._actions.clear()
        self._compute.abort()
        verdict = Verdict(self._aborted, None, aborted=True)
        if self.place.first:
            self.finished = Flushed(verdict)
        return self._end(verdict)

    def _end(self, verdict: Verdict) -> list[Outgoing]:
        self.ended = verdict.flush
        self._inboxes = {flush: inbox for flush, inbox in self._inboxes.items() if flush > self.ended}
        return self._downstream(verdict)

    def _downstream(self, message: Message) -> list[Outgoing]:
        return [] if self.place.last else [(self.place.stage + 1, message)]

    def _upstream(self, message: Message) -> list[Outgoing]:
        return [] if self.place.first else [(self.place.stage - 1, message)]
