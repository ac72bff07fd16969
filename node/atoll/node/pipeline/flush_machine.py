"""One stage's part in a flush, as a state machine: messages in, actions in the schedule's order, messages out.

The runner reads no socket and no clock: whoever carries messages calls `deliver`, then `advance` until it answers
None. Messages of one link must come in order; how links interleave changes nothing. The first stage's runner also
drives: it is fed micro-batches and decides how each flush ends.

A flush ends by one verdict, which only the first stage makes: step, or no step (a gradient is not finite). Before the
verdict nothing on any stage has changed but gradients. When anything goes wrong, all links are cut (`disconnect`):
stages that had not settled the flush drop those gradients, and so does every other stage when the route begins anew
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
from atoll.node.pipeline.inbox import MAX_MICRO_BATCHES, Inbox, StagePosition
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
from atoll.node.pipeline.schedule import (
    Action,
    Backward,
    Forward,
    SendReport,
    Step,
    evaluation_actions,
    flush_actions,
    stage_credits,
)
from atoll.node.training.inner_optimizer import clip_factor


class StageCompute(Protocol):
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

    def set_tied_weights(self, weights_VD: Tensor) -> None:
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
class FlushResult:
    """How a flush ended, at the driver."""

    verdict: Verdict
    loss: float = 0.0  # nats per token
    norms: tuple[float, ...] = ()  # one a layer of the whole model
    at_same_anchor: bool = True  # of an evaluation: all stages stood at the anchor that it was of


class FlushMachine:
    """One stage, through any number of incarnations of its route."""

    def __init__(self, place: StagePosition, compute: StageCompute, clip_norm: float) -> None:
        self.place = place
        self.last_flush = 0  # the last flush of this incarnation that is over here
        self.last_result: FlushResult | None = None  # at the driver: how the newest flush ended; None before
        self.ready = False  # all stages after this one take part in flushes
        self.decided: Decision | None = None  # the newest that is known here
        self._incarnation = 0
        self._joined = False  # what became of the flush before is settled
        self._step_unfinished = False
        self._compute, self._clip_norm = compute, clip_norm
        self._actions: deque[Action] = deque()
        self._outgoing: list[Outgoing] = []
        self._inboxes: dict[int, Inbox] = {}  # by flush
        self._tied_weights: TiedWeights | None = None  # the newest, whatever its flush: it travels on a link of its own
        self._undecided: Decision | None = None  # the flush that this stage settled when it was cut off

    # --- incarnations -------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """All links broke: forget what was under way, but for a flush that may have been decided with our report."""
        self._require_consistent_weights()
        if self.awaiting_verdict:
            self._undecided = Decision(self._incarnation, self.last_flush + 1)
        elif self._undecided is None:
            self._compute.abort()
        self._actions.clear()
        self._outgoing.clear()
        self._inboxes.clear()
        self._tied_weights = None
        self._joined = self.ready = False

    def begin(self, incarnation: int) -> None:
        """The route begins anew; flushes are numbered from 1 again."""
        self.disconnect()
        self._incarnation, self.last_flush = incarnation, 0
        if self.place.first:
            self._join(None)

    def drop_undecided(self) -> None:
        """Give up a flush of which this stage has not heard whether it was decided: its weights are others now."""
        if self._undecided is not None:
            self._undecided = None
            self._compute.abort()

    def _join(self, told: Decision | None) -> None:
        """Step or drop what was in limbo, tell downstream what is known and, when all are there, upstream."""
        if self._undecided is not None and self._undecided == told:
            self._apply_step(told.factor)
        self.drop_undecided()
        self.decided = told or self.decided  # a driver that took another's place knows of none
        self._joined = True
        self._outgoing += self._downstream(Join(self.decided))
        if self.place.last:
            self._announce_ready()

    def _announce_ready(self) -> None:
        self.ready = True
        self._outgoing += self._upstream(Ready())

    @property
    def _inbox(self) -> Inbox:
        return self._inboxes.setdefault(self.last_flush + 1, Inbox(self.place))

    @property
    def idle(self) -> bool:
        """Whether no flush has begun here that is not over."""
        return not self._actions

    @property
    def awaiting_verdict(self) -> bool:
        """Whether the flush that is under way can be decided without us: this stage has told its norms."""
        return bool(self._actions) and isinstance(self._actions[0], Step)

    @property
    def in_flight(self) -> int:
        """Micro-batches that were taken forward and not yet backward."""
        return self._inbox.forwarded - self._inbox.backwarded

    @property
    def max_evaluation_micro_batches(self) -> int:
        """Micro-batches of an evaluation's flush: every stage may have as many before it."""
        return stage_credits(2, MAX_MICRO_BATCHES, self.place.ahead)[0]

    # --- what comes in ------------------------------------------------------------------------------

    def deliver(self, sender: int, message: Message) -> None:
        """Take a neighbour's message; those of flushes that are over are dropped. Raises `PeerMisbehaved`."""
        if isinstance(message, Join | Ready):
            self._on_join_or_ready(sender, message)
            return
        if message.flush <= self.last_flush:
            return
        if message.flush > self.last_flush + 2:
            raise PeerMisbehaved(f"stage {sender} is at flush {message.flush}, we are at {self.last_flush + 1}")
        if not self.ready and not isinstance(message, TiedWeights):
            raise PeerMisbehaved(f"stage {sender} works before all stages are ready")
        inbox = self._inboxes.get(message.flush) or Inbox(self.place)
        inbox.check(sender, message)
        self._compute.check(message)
        if isinstance(message, TiedWeights):
            self._store_tied_weights(message)
        else:
            self._inboxes[message.flush] = inbox
            inbox.put(message)

    def _on_join_or_ready(self, sender: int, message: Join | Ready) -> None:
        kind = type(message)
        if sender != self.place.sender_of(kind):
            raise PeerMisbehaved(f"stage {sender} sent {kind.__name__}, which is another one's to say")
        if isinstance(message, Join) and not self._joined:
            self._join(message.decided)
        elif isinstance(message, Ready) and self._joined and not self.ready:
            self._announce_ready()
        else:
            raise PeerMisbehaved(f"stage {sender} sent {kind.__name__} out of turn")

    def _store_tied_weights(self, weights: TiedWeights) -> None:
        if self._tied_weights is not None and self._tied_weights.flush >= weights.flush:
            raise PeerMisbehaved(f"the tied matrix came twice, for flush {weights.flush}")
        self._tied_weights = weights

    def feed(self, micro_batches: Sequence[tuple[Tensor, Tensor]], anchor: int | None = None) -> int:
        """Driver: begin the next flush with inputs and targets, int64 [B,T] each; its number.

        `anchor` makes it an evaluation, of `max_evaluation_micro_batches` micro-batches at most.
        """
        flush = self.last_flush + 1
        if not self.place.first or not self.ready or self._inbox.has(Begin):
            raise InvalidTransition("a flush begins at the first stage of a route that is ready, one after another")
        self.last_result = None
        self._inbox.put(Begin(flush, len(micro_batches), anchor))
        for number, (tokens_BT, targets_BT) in enumerate(micro_batches):
            self._inbox.put(Activation(flush, number, tokens_BT, targets_BT))
        return flush

    # --- what is done -------------------------------------------------------------------------------

    def advance(self) -> list[Outgoing] | None:
        """Carry out the next action and say what to send; None while it waits for a message."""
        self._require_consistent_weights()
        if self._outgoing:
            owed, self._outgoing = self._outgoing, []
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
            case SendReport():
                return self._report()
            case Step():
                return self._step(self._inbox.pop(Verdict))

    def _ready(self, action: Action) -> bool:
        place, inbox = self.place, self._inbox
        match action:
            case Forward(number):
                return inbox.has(Activation, number) and (number > 0 or self._has_tied_weights())
            case Backward(number):
                return place.last or inbox.has(Gradient, number)
            case SendReport():
                whole = not place.sends_tied_weights or self._evaluates or inbox.has(TiedGradient)
                return whole and (place.last or inbox.has(Report))
            case Step():
                return inbox.has(Verdict)

    def _has_tied_weights(self) -> bool:
        return not self.place.receives_tied_weights or (
            self._tied_weights is not None and self._tied_weights.flush == self.last_flush + 1
        )

    def _begin(self) -> list[Outgoing] | None:
        place = self.place
        begin = self._inbox.get(Begin)
        if begin is None:
            return None
        if begin.anchor is None:
            self._compute.begin(begin.micro_batches)
            self._actions.extend(flush_actions(begin.micro_batches, place.credits(begin.micro_batches)))
        else:
            self._compute.begin_evaluation(begin.micro_batches)
            self._actions.extend(evaluation_actions(begin.micro_batches))
        lent = (
            [(place.stages - 1, TiedWeights(begin.flush, self._compute.tied_weights()))]
            if place.sends_tied_weights
            else []
        )
        return [*self._downstream(begin), *lent]

    def _forward(self, number: int) -> list[Outgoing]:
        if number == 0 and self.place.receives_tied_weights and self._tied_weights is not None:
            self._compute.set_tied_weights(self._tied_weights.weights_VD)
        taken = self._inbox.pop(Activation, number)
        output = self._compute.forward(number, taken.x_BTD, taken.targets_BT)
        self._inbox.forwarded += 1
        return self._downstream(Activation(taken.flush, number, output, taken.targets_BT))

    def _backward(self, number: int) -> list[Outgoing]:
        taken = None if self.place.last else self._inbox.pop(Gradient, number).gradient_BTD
        gradient = self._compute.backward(number, taken)
        self._inbox.backwarded += 1
        return [] if gradient is None else self._upstream(Gradient(self.last_flush + 1, number, gradient))

    @property
    def _evaluates(self) -> bool:
        begin = self._inbox.get(Begin)
        return begin is not None and begin.anchor is not None

    def _report(self) -> list[Outgoing]:
        if self._evaluates:
            return self._settle_evaluation()
        place, flush = self.place, self.last_flush + 1
        returned = TiedGradient(flush, self._compute.tied_gradient()) if place.tied and place.last else None
        if place.sends_tied_weights:
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
        lent = [(0, returned)] if returned is not None and place.receives_tied_weights else []
        return [*lent, *self._upstream(report)]

    def _settle_evaluation(self) -> list[Outgoing]:
        begin = self._inbox.pop(Begin)
        loss = self._compute.loss() if self.place.last else 0.0
        report = Report(begin.flush, (), loss, self._compute.end_evaluation() == begin.anchor)
        if not self.place.last:
            after = self._inbox.pop(Report)
            report = Report(begin.flush, (), after.loss, report.at_same_anchor and after.at_same_anchor)
        if self.place.first:
            self.last_result = FlushResult(Verdict(begin.flush, None), report.loss, (), report.at_same_anchor)
        self._end(begin.flush)
        return self._upstream(report)

    def _step(self, verdict: Verdict, report: Report | None = None) -> list[Outgoing]:
        self._apply_step(verdict.factor)
        self.decided = Decision(self._incarnation, verdict.flush, verdict.factor)
        if report is not None:
            self.last_result = FlushResult(verdict, report.loss, report.norms)
        self._end(verdict.flush)
        return self._downstream(verdict)

    def _end(self, flush: int) -> None:
        self.last_flush = flush
        self._inboxes = {number: inbox for number, inbox in self._inboxes.items() if number > flush}

    def _apply_step(self, factor: float | None) -> None:
        self._undecided = None
        self._step_unfinished = True  # weights of both flushes, until it is done
        self._compute.step(factor)
        self._step_unfinished = False

    def _require_consistent_weights(self) -> None:
        if self._step_unfinished:
            raise InvalidTransition(
                "this stage failed in the midst of a step", "replace it: its weights are of no flush"
            )

    def _downstream(self, message: Message) -> list[Outgoing]:
        return [] if self.place.last else [(self.place.stage + 1, message)]

    def _upstream(self, message: Message) -> list[Outgoing]:
        return [] if self.place.first else [(self.place.stage - 1, message)]
