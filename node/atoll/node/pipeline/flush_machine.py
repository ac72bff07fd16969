"""State machine of one stage in a flush: messages in, actions in the schedule's order, messages out.

The machine reads no socket and no clock. Its owner calls `deliver` for each message, then `advance` until that returns
None. Messages of one link must arrive in order; the interleaving of links does not matter. The machine of the first
stage is also the driver: it gets micro-batches (`begin_flush`) and decides how each flush ends.

A flush ends with one verdict, which only the first stage makes: step, or skip because a gradient is not finite. Before
the verdict, only gradients have changed on any stage. On any error all links are cut (`disconnect`). A stage that has
not reported its part of the flush then drops its gradients. A stage that has reported keeps them, since the flush may
have been decided. When the route restarts (`begin`), this stage learns the newest decision. It steps if its flush was
decided, and otherwise drops the gradients. A stage can miss at most one decision, because the first stage decides only
with every stage's report.
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
    MicroBatch,
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
from atoll.node.training.targets import IGNORED


class StageCompute(Protocol):
    """Computation of one span. Micro-batches are numbered from 0 in each flush.

    If the model ties its embedding to its output matrix, the first stage has the tied weight. The last stage has a copy
    of it, which it gets before each flush and whose gradient it returns.
    """

    def check(self, message: Message) -> None:
        """Raise `PeerMisbehaved` for tensors whose shape or dtype this span does not accept."""
        ...

    def begin(self, micro_batches: int, targets: int | None) -> None:
        """Begin a flush of this many micro-batches and targets (None: all count). Gradients are zero."""
        ...

    def forward(self, micro_batch: int, x: Tensor, targets_BT: Tensor, starts_BT: Tensor | None) -> Tensor:
        """Compute the span's output; on the last stage, the loss. `starts_BT` as in `Activation`."""
        ...

    def backward(self, micro_batch: int, gradient_BTD: Tensor | None) -> Tensor | None:
        """Add to the gradients. Returns the gradient of the span's input; None on the first stage."""
        ...

    def norms(self) -> tuple[float, ...]:
        """Norms of the gradient, one per layer."""
        ...

    def loss(self) -> float:
        """Mean loss of the flush, on the last stage."""
        ...

    def step(self, factor: float | None) -> None:
        """Scale the gradients and step; None skips the step. Gradients are zero afterwards."""
        ...

    def abort(self) -> None:
        """Forget the flush. Gradients are zero, and weights are the trained ones, not the anchor."""
        ...

    def begin_evaluation(self, micro_batches: int, targets: int | None) -> None:
        """Begin a flush without gradients, over the anchor's parameters."""
        ...

    def end_evaluation(self) -> int:
        """Restore the trained weights. Returns the committed tokens of the anchor."""
        ...

    def tied_weights(self) -> Tensor:
        """First stage: a copy of the tied weight."""
        ...

    def set_tied_weights(self, weights_VD: Tensor) -> None:
        """Last stage: use this tied weight from now on."""
        ...

    def tied_gradient(self) -> Tensor:
        """Last stage: the gradient of the tied weight in this flush."""
        ...

    def add_tied(self, gradient_VD: Tensor) -> None:
        """First stage: add the last stage's gradient of the tied weight."""
        ...


Outgoing = tuple[int, Message]  # receiving stage, message


@dataclass(frozen=True)
class FlushResult:
    """End of a flush, at the driver."""

    verdict: Verdict
    loss: float = 0.0  # nats per token
    norms: tuple[float, ...] = ()  # one per layer of the whole model
    at_same_anchor: bool = True  # evaluation: all stages had the anchor that was evaluated


class FlushMachine:
    """One stage, through any number of incarnations of its route.

    It has more than 20 methods: each action and each message of a flush has its own short one.
    """

    def __init__(self, place: StagePosition, compute: StageCompute, clip_norm: float) -> None:
        self.place = place
        self.last_flush = 0  # the last flush of this incarnation that ended on this stage
        self.last_result: FlushResult | None = None  # driver: end of the newest flush; None until it has ended
        self.ready = False  # this stage and all later stages take part in flushes
        self.last_decision: Decision | None = None  # the newest decision that this stage knows
        self._incarnation = 0
        self._joined = False  # this stage knows whether its flush of the previous incarnation was decided
        self._step_unfinished = False
        self._compute, self._clip_norm = compute, clip_norm
        self._actions: deque[Action] = deque()
        self._outgoing: list[Outgoing] = []
        self._inboxes: dict[int, Inbox] = {}  # by flush
        self._tied_weights: TiedWeights | None = None  # the newest of any flush, because it has a link of its own
        self._undecided: Decision | None = None  # the flush that this stage had reported when its links broke

    # --- incarnations -------------------------------------------------------------------------------

    def disconnect(self) -> None:
        """Drop all work in progress after the links broke.

        A flush that this stage reported is kept, as it may be decided.
        """
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
        """Begin a new incarnation of the route. Flushes are numbered from 1 again."""
        self.disconnect()
        self._incarnation, self.last_flush = incarnation, 0
        if self.place.first:
            self._join(None)

    def drop_undecided(self) -> None:
        """Drop a reported flush whose decision is unknown, because this stage gets other weights."""
        if self._undecided is not None:
            self._undecided = None
            self._compute.abort()

    def _join(self, told: Decision | None) -> None:
        """Step or drop the undecided flush. Send the newest decision downstream; the last stage announces `Ready`."""
        if self._undecided is not None and self._undecided == told:
            self._apply_step(told.factor)
        self.drop_undecided()
        self.last_decision = told or self.last_decision  # a driver that replaced another one knows no decision
        self._joined = True
        self._outgoing += self._downstream(Join(self.last_decision))
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
        """True if no flush is under way on this stage."""
        return not self._actions

    @property
    def awaiting_verdict(self) -> bool:
        """True if this stage has reported its norms, so that the flush may be decided at any time."""
        return bool(self._actions) and isinstance(self._actions[0], Step)

    @property
    def in_flight(self) -> int:
        """Micro-batches between their forward and their backward."""
        return self._inbox.forwarded - self._inbox.backwarded

    @property
    def max_evaluation_micro_batches(self) -> int:
        """Largest number of micro-batches in an evaluation's flush; as many may wait in front of every stage."""
        return stage_credits(2, MAX_MICRO_BATCHES, self.place.ahead)[0]

    # --- messages -----------------------------------------------------------------------------------

    def deliver(self, sender: int, message: Message) -> None:
        """Take a neighbour's message; messages of finished flushes are dropped. Raises `PeerMisbehaved`."""
        if isinstance(message, Join | Ready):
            self._on_join_or_ready(sender, message)
            return
        if message.flush <= self.last_flush:
            return
        if message.flush > self.last_flush + 2:
            raise PeerMisbehaved(
                f"stage {sender} is at flush {message.flush}, more than one ahead of flush {self.last_flush + 1} here"
            )
        if not self.ready and not isinstance(message, TiedWeights):
            raise PeerMisbehaved(f"stage {sender} sent {type(message).__name__} before all stages were ready")
        inbox = self._inboxes.get(message.flush) or Inbox(self.place)
        inbox.check(sender, message)
        self._compute.check(message)
        if isinstance(message, Activation):
            inbox.check_targets(sender, message)
        if isinstance(message, TiedWeights):
            self._store_tied_weights(message)
        else:
            self._inboxes[message.flush] = inbox
            inbox.put(message)

    def _on_join_or_ready(self, sender: int, message: Join | Ready) -> None:
        kind = type(message)
        if sender != self.place.sender_of(kind):
            raise PeerMisbehaved(f"stage {sender} may not send {kind.__name__} to stage {self.place.stage}")
        if isinstance(message, Join) and not self._joined:
            self._join(message.decided)
        elif isinstance(message, Ready) and self._joined and not self.ready:
            self._announce_ready()
        else:
            raise PeerMisbehaved(f"stage {sender} sent {kind.__name__} out of turn")

    def _store_tied_weights(self, weights: TiedWeights) -> None:
        if self._tied_weights is not None and self._tied_weights.flush >= weights.flush:
            raise PeerMisbehaved(
                f"tied weights of flush {weights.flush} came after those of flush {self._tied_weights.flush}"
            )
        self._tied_weights = weights

    def begin_flush(self, micro_batches: Sequence[MicroBatch], anchor: int | None = None) -> int:
        """Driver: begin the next flush. Returns the flush's number.

        With `anchor` (committed tokens) it is an evaluation of at most `max_evaluation_micro_batches` micro-batches.
        """
        flush = self.last_flush + 1
        if not self.place.first or not self.ready or self._inbox.has(Begin):
            raise InvalidTransition(
                "no flush can begin: this stage is not the first, its route is not ready, or a flush is under way"
            )
        self.last_result = None
        targets = sum(int((targets_BT != IGNORED).sum()) for _, targets_BT, _ in micro_batches)
        all_count = targets == sum(targets_BT.numel() for _, targets_BT, _ in micro_batches)
        self._inbox.put(Begin(flush, len(micro_batches), anchor, None if all_count else targets))
        for number, micro_batch in enumerate(micro_batches):
            self._inbox.put(Activation(flush, number, *micro_batch))
        return flush

    # --- actions ------------------------------------------------------------------------------------

    def advance(self) -> list[Outgoing] | None:
        """Execute the next action. Returns the messages to send, or None if a message must arrive first."""
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
            self._compute.begin(begin.micro_batches, begin.targets)
            self._actions.extend(flush_actions(begin.micro_batches, place.credits(begin.micro_batches)))
        else:
            self._compute.begin_evaluation(begin.micro_batches, begin.targets)
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
        output = self._compute.forward(number, taken.x_BTD, taken.targets_BT, taken.starts_BT)
        self._inbox.forwarded += 1
        return self._downstream(Activation(taken.flush, number, output, taken.targets_BT, taken.starts_BT))

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
            self._actions.clear()  # the first stage decides and steps at once
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
        self.last_decision = Decision(self._incarnation, verdict.flush, verdict.factor)
        if report is not None:
            self.last_result = FlushResult(verdict, report.loss, report.norms)
        self._end(verdict.flush)
        return self._downstream(verdict)

    def _end(self, flush: int) -> None:
        self.last_flush = flush
        self._inboxes = {number: inbox for number, inbox in self._inboxes.items() if number > flush}

    def _apply_step(self, factor: float | None) -> None:
        self._undecided = None
        self._step_unfinished = True  # if the step fails, the weights are partly stepped
        self._compute.step(factor)
        self._step_unfinished = False

    def _require_consistent_weights(self) -> None:
        if self._step_unfinished:
            raise InvalidTransition(
                "this stage failed during a step: only a part of its weights has made the step",
                "start its trainer again from the anchor",
            )

    def _downstream(self, message: Message) -> list[Outgoing]:
        return [] if self.place.last else [(self.place.stage + 1, message)]

    def _upstream(self, message: Message) -> list[Outgoing]:
        return [] if self.place.first else [(self.place.stage - 1, message)]
