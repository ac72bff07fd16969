"""One stage's part in a flush, as a state machine: messages in, actions in the schedule's order, messages out.

The runner reads no socket and no clock: whoever carries messages calls `deliver`, then `advance` until it answers
None. Messages of one link must come in order; how links interleave changes nothing. The first stage's runner also
drives: it is fed micro-batches and decides how each flush ends.

A flush ends by one verdict, which only the first stage makes: step, or no step (a gradient is not finite). Before the
verdict nothing on any stage has changed but gradients. When anything goes wrong, all links are cut (`cut_off`): stages
that had not settled the flush drop those gradients, and so does every other stage when the route begins anew
(`begin`) and it hears that the flush was not decided. What was decided is stepped then by a stage that missed it. It
can have missed one decision at most, because none is made without its report.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from atoll.core.errors import InvalidTransition, PeerMisbehaved
from atoll.node.pipeline.inbox import MAX_MICRO_BATCHES, Inbox, Place
from atoll.node.pipeline.messages import (
    Activation,
    Begin,
    Decision,
    Gradient,
    Join,
    Message,
    Ready,
    Report,
    TiedGradient,
    TiedWeights,
    Verdict,
)
from atoll.node.pipeline.schedule import Action, Backward, Forward, Settle, Step, actions, credits_of, evaluation
from atoll.node.training.inner_optimizer import clip_factor


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
        """Forget the flush; gradients are zero, and weights those that are trained."""
        ...

    def begin_evaluation(self, micro_batches: int) -> None:
        """A flush without gradients begins, over the parameters of the anchor."""
        ...

    def end_evaluation(self) -> int:
        """The weights are those that are trained again. The committed tokens of the anchor."""
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
    agreed: bool = True  # of an evaluation: all stages stood at the anchor that it was of


class Runner:
    """One stage, through any number of incarnations of its route."""

    def __init__(self, place: Place, compute: Compute, clip_norm: float) -> None:
        self.place = place
        self.ended = 0  # the last flush of this incarnation that is over here
        self.finished: Flushed | None = None  # at the driver: how the newest flush ended; None before
        self.ready = False  # all stages after this one take part in flushes
        self.decided: Decision | None = None  # the newest that is known here
        self._incarnation = 0
        self._joined = False  # what became of the flush before is settled
        self._torn = False
        self._compute, self._clip_norm = compute, clip_norm
        self._actions: deque[Action] = deque()
        self._owed: list[Outgoing] = []
        self._inboxes: dict[int, Inbox] = {}  # by flush
        self._lent: TiedWeights | None = None  # the newest, whatever its flush: it travels on a link of its own
        self._limbo: Decision | None = None  # the flush that this stage settled when it was cut off

    # --- incarnations -------------------------------------------------------------------------------

    def cut_off(self) -> None:
        """All links broke: forget what was under way, but for a flush that may have been decided with our report."""
        self._require_whole()
        if self.deciding:
            self._limbo = Decision(self._incarnation, self.ended + 1)
        elif self._limbo is None:
            self._compute.abort()
        self._actions.clear()
        self._owed.clear()
        self._inboxes.clear()
        self._lent = None
        self._joined = self.ready = False

    def begin(self, incarnation: int) -> None:
        """The route begins anew; flushes are numbered from 1 again."""
        self.cut_off()
        self._incarnation, self.ended = incarnation, 0
        if self.place.first:
            self._join(None)

    def forget(self) -> None:
        """Give up a flush of which this stage has not heard whether it was decided: its weights are others now."""
        if self._limbo is not None:
            self._limbo = None
            self._compute.abort()

    def _join(self, told: Decision | None) -> None:
        """Step or drop what was in limbo, tell downstream what is known and, when all are there, upstream."""
        if self._limbo is not None and self._limbo == told:
            self._step_by(told.factor)
        self.forget()
        self.decided = told or self.decided  # a driver that took another's place knows of none
        self._joined = True
        self._owed += self._downstream(Join(self.decided))
        if self.place.last:
            self._be_ready()

    def _be_ready(self) -> None:
        self.ready = True
        self._owed += self._upstream(Ready())

    @property
    def _inbox(self) -> Inbox:
        return self._inboxes.setdefault(self.ended + 1, Inbox(self.place))

    @property
    def idle(self) -> bool:
        """Whether no flush has begun here that is not over."""
        return not self._actions

    @property
    def deciding(self) -> bool:
        """Whether the flush that is under way can be decided without us: this stage has told its norms."""
        return bool(self._actions) and isinstance(self._actions[0], Step)

    @property
    def held(self) -> int:
        """Micro-batches that were taken forward and not yet backward."""
        return self._inbox.forwarded - self._inbox.backwarded

    @property
    def most_evaluated(self) -> int:
        """Micro-batches of an evaluation's flush: every stage may have as many before it."""
        return credits_of(2, MAX_MICRO_BATCHES, self.place.ahead)[0]

    # --- what comes in ------------------------------------------------------------------------------

    def deliver(self, sender: int, message: Message) -> None:
        """Take a neighbour's message; those of flushes that are over are dropped. Raises `PeerMisbehaved`."""
        if isinstance(message, Join | Ready):
            self._take_greeting(sender, message)
            return
        if message.flush <= self.ended:
            return
        if message.flush > self.ended + 2:
            raise PeerMisbehaved(f"stage {sender} is at flush {message.flush}, we are at {self.ended + 1}")
        if not self.ready and not isinstance(message, TiedWeights):
            raise PeerMisbehaved(f"stage {sender} works before all stages are ready")
        inbox = self._inboxes.get(message.flush) or Inbox(self.place)
        inbox.check(sender, message)
        self._compute.check(message)
        if isinstance(message, TiedWeights):
            self._lend(message)
        else:
            self._inboxes[message.flush] = inbox
            inbox.put(message)

    def _take_greeting(self, sender: int, message: Join | Ready) -> None:
        kind = type(message)
        if sender != self.place.sender_of(kind):
            raise PeerMisbehaved(f"stage {sender} sent {kind.__name__}, which is another one's to say")
        if isinstance(message, Join) and not self._joined:
            self._join(message.decided)
        elif isinstance(message, Ready) and self._joined and not self.ready:
            self._be_ready()
        else:
            raise PeerMisbehaved(f"stage {sender} sent {kind.__name__} out of turn")

    def _lend(self, weights: TiedWeights) -> None:
        if self._lent is not None and self._lent.flush >= weights.flush:
            raise PeerMisbehaved(f"the tied matrix came twice, for flush {weights.flush}")
        self._lent = weights

    def feed(self, micro_batches: Sequence[tuple[Tensor, Tensor]], anchor: int | None = None) -> int:
        """Driver: begin the next flush with inputs and targets, int64 [B,T] each; its number.

        `anchor` makes it an evaluation, of `most_evaluated` micro-batches at most.
        """
        flush = self.ended + 1
        if not self.place.first or not self.ready or self._inbox.has(Begin):
            raise InvalidTransition("a flush begins at the first stage of a route that is ready, one after another")
        self.finished = None
        self._inbox.put(Begin(flush, len(micro_batches), anchor))
        for number, (tokens_BT, targets_BT) in enumerate(micro_batches):
            self._inbox.put(Activation(flush, number, tokens_BT, targets_BT))
        return flush

    # --- what is done -------------------------------------------------------------------------------

    def advance(self) -> list[Outgoing] | None:
        """Carry out the next action and say what to send; None while it waits for a message."""
        self._require_whole()
        if self._owed:
            owed, self._owed = self._owed, []
            return owed
        if not self.ready:
            return None
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
                return self._step(self._inbox.pop(Verdict))

    def _ready(self, action: Action) -> bool:
        place, inbox = self.place, self._inbox
        match action:
            case Forward(number):
                return inbox.has(Activation, number) and (number > 0 or self._borrowed())
            case Backward(number):
                return place.last or inbox.has(Gradient, number)
            case Settle():
                whole = not place.lends or self._evaluates or inbox.has(TiedGradient)
                return whole and (place.last or inbox.has(Report))
            case Step():
                return inbox.has(Verdict)

    def _borrowed(self) -> bool:
        return not self.place.borrows or (self._lent is not None and self._lent.flush == self.ended + 1)

    def _begin(self) -> list[Outgoing] | None:
        place = self.place
        begin = self._inbox.get(Begin)
        if begin is None:
            return None
        if begin.anchor is None:
            self._compute.begin(begin.micro_batches)
            self._actions.extend(actions(begin.micro_batches, place.credits(begin.micro_batches)))
        else:
            self._compute.begin_evaluation(begin.micro_batches)
            self._actions.extend(evaluation(begin.micro_batches))
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

    @property
    def _evaluates(self) -> bool:
        begin = self._inbox.get(Begin)
        return begin is not None and begin.anchor is not None

    def _settle(self) -> list[Outgoing]:
        if self._evaluates:
            return self._settle_evaluation()
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
            factor = clip_factor(report.norms, self._clip_norm)
            self._actions.clear()  # nothing to wait for: the decision and this stage's step are one
            return self._step(Verdict(flush, factor), report)
        self._inbox.reported = True
        lent = [(0, returned)] if returned is not None and place.borrows else []
        return [*lent, *self._upstream(report)]

    def _settle_evaluation(self) -> list[Outgoing]:
        begin = self._inbox.pop(Begin)
        loss = self._compute.loss() if self.place.last else 0.0
        report = Report(begin.flush, (), loss, self._compute.end_evaluation() == begin.anchor)
        if not self.place.last:
            after = self._inbox.pop(Report)
            report = Report(begin.flush, (), after.loss, report.agreed and after.agreed)
        if self.place.first:
            self.finished = Flushed(Verdict(begin.flush, None), report.loss, (), report.agreed)
        self._end(begin.flush)
        return self._upstream(report)

    def _step(self, verdict: Verdict, report: Report | None = None) -> list[Outgoing]:
        self._step_by(verdict.factor)
        self.decided = Decision(self._incarnation, verdict.flush, verdict.factor)
        if report is not None:
            self.finished = Flushed(verdict, report.loss, report.norms)
        self._end(verdict.flush)
        return self._downstream(verdict)

    def _end(self, flush: int) -> None:
        self.ended = flush
        self._inboxes = {number: inbox for number, inbox in self._inboxes.items() if number > flush}

    def _step_by(self, factor: float | None) -> None:
        self._limbo = None
        self._torn = True  # weights of both flushes, until it is done
        self._compute.step(factor)
        self._torn = False

    def _require_whole(self) -> None:
        if self._torn:
            raise InvalidTransition(
                "this stage failed in the midst of a step", "replace it: its weights are of no flush"
            )

    def _downstream(self, message: Message) -> list[Outgoing]:
        return [] if self.place.last else [(self.place.stage + 1, message)]

    def _upstream(self, message: Message) -> list[Outgoing]:
        return [] if self.place.first else [(self.place.stage - 1, message)]
