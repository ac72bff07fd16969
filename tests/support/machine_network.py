"""The network of a simulated run: who can talk, how long it takes, what is lost or comes twice."""

import random
from collections.abc import Callable, Iterator

from atoll.v1 import dataplane_pb2 as dp


class Network:
    """Quiet unless told otherwise."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.cut: set[frozenset[str]] = set()  # pairs that cannot talk
        self.deaf: set[tuple[str, str]] = set()  # what the first of these says does not reach the second
        self.loss = self.duplicate = 0.0  # probabilities, of one message
        self.delay = (0.01, 0.08)  # seconds, at least and at most
        self.drop: Callable[[str, str, dp.RoundMessage], bool] = lambda *_: False

    def part(self, *groups: list[str]) -> None:
        """Only peers of one group can talk."""
        self.cut = {
            frozenset((a, b)) for one in groups for other in groups if one is not other for a in one for b in other
        }

    def heal(self) -> None:
        """Nothing is cut off or lost any more."""
        self.cut, self.deaf, self.loss, self.duplicate = set(), set(), 0.0, 0.0

    def connects(self, sender: str, to: str) -> bool:
        """Whether a message arrives."""
        return (not self.cut or frozenset((sender, to)) not in self.cut) and (sender, to) not in self.deaf

    def answers(self, a: str, b: str) -> bool:
        """Whether one can ask and the other answer, as a transfer needs."""
        return self.connects(a, b) and self.connects(b, a)

    def latency(self) -> float:
        return self._rng.uniform(*self.delay)

    def loses(self) -> bool:
        return self._rng.random() < self.loss

    def copies(self, sender: str, to: str, message: dp.RoundMessage) -> Iterator[tuple[float, dp.RoundMessage]]:
        """What arrives of a message, and after how many seconds."""
        if self.drop(sender, to, message) or not self.connects(sender, to):
            return
        for _ in range(2 if self._rng.random() < self.duplicate else 1):
            if not self.loses():
                copy = dp.RoundMessage.FromString(message.SerializeToString())
                yield self.latency(), copy
