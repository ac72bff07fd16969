"""Inbox of one stage in one flush: messages of the other stages, checked when they arrive. Pure.

At most two flushes are open at a time: the current one, and the next one, which a neighbour may start once it has
stepped. The credits of the stage upstream therefore bound the messages that wait here, whatever a peer sends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from atoll.core.errors import PeerMisbehaved
from atoll.node.pipeline.messages import (
    Activation,
    Begin,
    Gradient,
    Join,
    Message,
    Ready,
    Report,
    TiedGradient,
    TiedWeights,
    Verdict,
)
from atoll.node.pipeline.schedule import stage_credits
from atoll.node.training.targets import IGNORED

MAX_MICRO_BATCHES = 2**16

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class StagePosition:
    """Position of a stage on its route, with the bounds that follow from it."""

    stage: int
    stages: int
    tied: bool = False  # the last stage uses a copy of a matrix of the first
    ahead: int = 0  # see `schedule.stage_credits`
    micro_batches: int = MAX_MICRO_BATCHES  # bound for a flush that trains

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def sends_tied_weights(self) -> bool:
        """True if this stage sends its tied weight to another one."""
        return self.tied and self.first and not self.last

    @property
    def receives_tied_weights(self) -> bool:
        """True if this stage gets the tied weight from another one."""
        return self.tied and self.last and not self.first

    def sender_of(self, kind: type[Message]) -> int | None:
        """The only stage that may send this kind of message to this stage; None: no stage may."""
        upstream = None if self.first else self.stage - 1
        downstream = None if self.last else self.stage + 1
        return {
            Join: upstream,
            Ready: downstream,
            Begin: upstream,
            Activation: upstream,
            Verdict: upstream,
            Gradient: downstream,
            Report: downstream,
            TiedGradient: self.stages - 1 if self.sends_tied_weights else None,
            TiedWeights: 0 if self.receives_tied_weights else None,
        }[kind]

    def credits(self, micro_batches: int) -> int:
        """Largest number of micro-batches that this stage may hold."""
        return stage_credits(self.stages, micro_batches, self.ahead)[self.stage]

    def credits_upstream(self, micro_batches: int) -> int:
        """Largest number of micro-batches that the previous stage may hold, and so may have sent to this stage."""
        return stage_credits(self.stages, micro_batches, self.ahead)[self.stage - 1]


class Inbox:
    """The messages of one flush."""

    def __init__(self, place: StagePosition) -> None:
        self.forwarded = self.backwarded = 0  # by this stage
        self.reported = False
        self._place = place
        self._messages: dict[tuple[type, int], Message] = {}
        self._seen: set[tuple[type, int]] = set()
        self._arrived = self._targets = self._places = 0  # micro-batches, their targets that count, and all of them

    def check(self, sender: int, message: Message) -> None:
        """Raise `PeerMisbehaved` if `sender` may not send this message, or not now, or has sent it before."""
        key = (type(message), number_of(message))
        what = f"stage {sender} sent stage {self._place.stage} {key[0].__name__} {key[1]} of flush {message.flush}"
        if sender != self._place.sender_of(key[0]):
            raise PeerMisbehaved(f"stage {sender} may not send {key[0].__name__} to stage {self._place.stage}")
        if key in self._seen:
            raise PeerMisbehaved(f"{what} twice")
        if problem := self._problem(message):
            raise PeerMisbehaved(f"{what} {problem}")

    def put(self, message: Message) -> None:
        """Keep a checked message, or one that this stage sends to itself."""
        key = (type(message), number_of(message))
        self._seen.add(key)
        self._messages[key] = message
        if isinstance(message, Activation):
            self._arrived += 1
            self._targets += _count_targets(message)
            self._places += message.targets_BT.numel()

    def _problem(self, message: Message) -> str:
        begin = self.get(Begin)
        if isinstance(message, Begin):
            evaluated = self._place.credits_upstream(MAX_MICRO_BATCHES)
            most = self._place.micro_batches if message.anchor is None else evaluated
            allowed = 1 <= message.micro_batches <= most
            return "" if allowed else f"of {message.micro_batches} micro-batches; allowed are 1 to {most}"
        if isinstance(message, TiedWeights):
            return ""  # it may overtake `Begin`, since it travels on another link
        if begin is None:
            return "before it began"
        if isinstance(message, Activation):
            most = self.backwarded + self._place.credits_upstream(begin.micro_batches)
            allowed = 0 <= message.micro_batch < min(most, begin.micro_batches)
            return "" if allowed else "without credit"
        if begin.anchor is not None and not isinstance(message, Report):
            return "in an evaluation"
        if isinstance(message, Gradient):
            sent = self.backwarded <= message.micro_batch < self.forwarded
            return "" if sent else "for a micro-batch that this stage has not sent"
        if isinstance(message, Report | TiedGradient):
            return "" if self.forwarded == begin.micro_batches else "before all micro-batches were sent"
        return "" if self.reported else "before this stage reported"  # a verdict needs the reports of all stages

    def check_targets(self, sender: int, message: Activation) -> None:
        """Raise `PeerMisbehaved` if the targets of a micro-batch contradict the total in `Begin`.

        The last stage scales gradients by that total before all micro-batches have arrived. No stage reports before all
        have arrived.
        """
        if problem := self._miscount(message):
            raise PeerMisbehaved(
                f"stage {sender} sent stage {self._place.stage} micro-batch {message.micro_batch} of flush "
                f"{message.flush} {problem}"
            )

    def _miscount(self, message: Activation) -> str:
        begin = self.get(Begin)
        assert begin is not None
        count, places = _count_targets(message), message.targets_BT.numel()
        if begin.targets is None:
            if count < places:
                return f"with {places - count} targets that do not count, in a flush whose targets all count"
            unlike = self._places != self._arrived * places
            return "of another size than the micro-batches before it" if unlike else ""
        told, found = begin.targets, self._targets + count
        wrong = found > told or (found < told and self._arrived + 1 == begin.micro_batches)
        return f"with {count} targets: the flush has {found} with these, and was to have {told}" if wrong else ""

    def has(self, kind: type[Message], number: int = 0) -> bool:
        return (kind, number) in self._messages

    def get(self, kind: type[M], number: int = 0) -> M | None:
        found = self._messages.get((kind, number))
        return found if isinstance(found, kind) else None

    def pop(self, kind: type[M], number: int = 0) -> M:
        """Remove and return a message. `check` still refuses a second one."""
        found = self._messages.pop((kind, number))
        assert isinstance(found, kind)
        return found


def _count_targets(message: Activation) -> int:
    return int((message.targets_BT != IGNORED).sum())


def number_of(message: Message) -> int:
    """Micro-batch of the message; 0 for messages that come once per flush."""
    return message.micro_batch if isinstance(message, Activation | Gradient) else 0
