"""A route whose stages share one process: the transport of tests, and of a node that holds several spans.

Messages of one link arrive in order. Which link delivers next, or which stage works next, is for `pick` to say, so
tests can try every order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from atoll.core.errors import InvalidTransition
from atoll.node.pipeline.flush_machine import FlushMachine, FlushResult
from atoll.node.pipeline.messages import Message
from atoll.node.pipeline.stage_loop import micro_batches

Link = tuple[int, int]  # from stage, to stage; from a stage to itself: its next action
Pick = Callable[[Sequence[Link]], Link]


def oldest(links: Sequence[Link]) -> Link:
    """What has waited longest."""
    return links[0]


def as_it_is(message: Message) -> Message:
    """A link that changes nothing."""
    return message


class InProcessRoute:
    """Runners in the order of their stages, and what is on its way between them; `carry` is what links do to it."""

    def __init__(
        self,
        machines: Sequence[FlushMachine],
        pick: Pick = oldest,
        carry: Callable[[Message], Message] = as_it_is,
        document_masks: bool = False,
    ) -> None:
        self.machines, self._pick, self._carry = tuple(machines), pick, carry
        self._document_masks = document_masks
        self._links: dict[Link, deque[Message]] = {}  # with something on its way, or that may be able to work
        self._incarnation = 0
        self.reconnect()

    def flush(self, tokens: Sequence[Tensor], anchor: int | None = None) -> FlushResult:
        """One optimiser step over micro-batches of tokens [B, T+1], or an evaluation. Raises what a stage raises."""
        flush = self.begin(tokens, anchor)
        while any(machine.last_flush < flush for machine in self.machines):
            self._go_on(f"flush {flush}")
        flushed = self.machines[0].last_result
        assert flushed is not None
        return flushed

    def begin(self, tokens: Sequence[Tensor], anchor: int | None = None) -> int:
        """Feed the driver when all stages are ready; the flush's number."""
        self.settle()
        flush = self.machines[0].begin_flush(micro_batches(tokens, self._document_masks), anchor)
        self._wake(0)
        return flush

    def settle(self) -> None:
        """Until all stages know what became of the flush before, and are ready."""
        while not self.machines[0].ready:
            self._go_on("an incarnation")

    def reconnect(self) -> None:
        """All that was on its way is lost, the flush under way with it unless it is decided, and links begin anew."""
        self._incarnation += 1
        self._links.clear()
        for machine in self.machines:
            machine.begin(self._incarnation)
            self._wake(machine.place.stage)

    def _go_on(self, what: str) -> None:
        if not self.turn():
            raise InvalidTransition(f"{what} stands still: every stage waits for another")

    def turn(self) -> bool:
        """Carry out one action or deliver one message; False if there is nothing to do."""
        waiting = list(self._links)
        if not waiting:
            return False
        link = sender, receiver = self._pick(waiting)
        if sender == receiver:
            self._work(receiver)
            return True
        message = self._links[link].popleft()
        if not self._links[link]:
            del self._links[link]
        self.machines[receiver].deliver(sender, message)
        self._wake(receiver)
        return True

    def _work(self, stage: int) -> None:
        sent = self.machines[stage].advance()
        if sent is None:
            del self._links[stage, stage]
        for receiver, message in sent or ():
            self._links.setdefault((stage, receiver), deque()).append(self._carry(message))

    def _wake(self, stage: int) -> None:
        self._links.setdefault((stage, stage), deque())
