"""What the other stages of a route have sent to one of them, checked when it comes. Pure.

At most two flushes are open at a time: the one under way and the beginning of the next, which a neighbour may start
as soon as it has stepped. So what can wait here is bounded by the credits of the stage upstream, whatever a peer
sends.
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

MAX_MICRO_BATCHES = 2**16

M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class StagePosition:
    """Where on its route a stage stands."""

    stage: int
    stages: int
    tied: bool = False  # the last stage borrows a matrix of the first
    ahead: int = 0  # see `schedule.stage_credits`
    micro_batches: int = MAX_MICRO_BATCHES  # of a flush that trains, at most

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.stages - 1

    @property
    def sends_tied_weights(self) -> bool:
        """Whether a matrix of this stage travels to another one."""
        return self.tied and self.first and not self.last

    @property
    def receives_tied_weights(self) -> bool:
        """Whether it comes from another one."""
        return self.tied and self.last and not self.first

    def sender_of(self, kind: type[Message]) -> int | None:
        """The only stage that may send this here."""
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
        """How many micro-batches this stage may hold."""
        return stage_credits(self.stages, micro_batches, self.ahead)[self.stage]

    def credits_upstream(self, micro_batches: int) -> int:
        """How many of them the stage before may hold, and so have on their way here."""
        return stage_credits(self.stages, micro_batches, self.ahead)[self.stage - 1]


class Inbox:
    """The messages of one flush."""

    def __init__(self, place: StagePosition) -> None:
        self.forwarded = self.backwarded = 0  # by this stage
        self.reported = False
        self._place = place
        self._messages: dict[tuple[type, int], Message] = {}
        self._seen: set[tuple[type, int]] = set()

    def check(self, sender: int, message: Message) -> None:
        """Raises `PeerMisbehaved` for what `sender` may not say, or not now, or not again."""
        key = (type(message), number_of(message))
        what = f"stage {sender} sent stage {self._place.stage} {key[0].__name__} {key[1]} of flush {message.flush}"
        if sender != self._place.sender_of(key[0]):
            raise PeerMisbehaved(f"{what}, which is another one's to say")
        if key in self._seen:
            raise PeerMisbehaved(f"{what} twice")
        if problem := self._problem(message):
            raise PeerMisbehaved(f"{what} {problem}")

    def put(self, message: Message) -> None:
        """Keep what was checked, or what this stage tells itself."""
        key = (type(message), number_of(message))
        self._seen.add(key)
        self._messages[key] = message

    def _problem(self, message: Message) -> str:
        begin = self.get(Begin)
        if isinstance(message, Begin):
            evaluated = self._place.credits_upstream(MAX_MICRO_BATCHES)
            most = self._place.micro_batches if message.anchor is None else evaluated
            return "" if 1 <= message.micro_batches <= most else f"of {message.micro_batches}"
        if isinstance(message, TiedWeights):
            return ""  # it may overtake the beginning
        if begin is None:
            return "before it began"
        if isinstance(message, Activation):
            most = self.backwarded + self._place.credits_upstream(begin.micro_batches)
            return "" if 0 <= message.micro_batch < min(most, begin.micro_batches) else "without credit"
        if begin.anchor is not None and not isinstance(message, Report):
            return "in an evaluation"
        if isinstance(message, Gradient):
            sent = self.backwarded <= message.micro_batch < self.forwarded
            return "" if sent else "for a micro-batch that is not there"
        if isinstance(message, Report | TiedGradient):
            return "" if self.forwarded == begin.micro_batches else "before all micro-batches were sent"
        return "" if self.reported else "before this stage reported"  # a verdict: it is made of all reports

    def has(self, kind: type[Message], number: int = 0) -> bool:
        return (kind, number) in self._messages

    def get(self, kind: type[M], number: int = 0) -> M | None:
        found = self._messages.get((kind, number))
        return found if isinstance(found, kind) else None

    def pop(self, kind: type[M], number: int = 0) -> M:
        """Take it out; another one like it will be refused all the same."""
        found = self._messages.pop((kind, number))
        assert isinstance(found, kind)
        return found


def number_of(message: Message) -> int:
    """Its micro-batch; 0 for what comes once a flush."""
    return message.micro_batch if isinstance(message, Activation | Gradient) else 0
