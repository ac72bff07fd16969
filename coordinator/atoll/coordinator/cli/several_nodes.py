"""Orders for several nodes. If one is refused, the others are still carried out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from atoll.core.errors import Ambiguous, AtollError, Banned, InvalidTransition, NotFound, NotPermitted, UsageError
from atoll.core.output import print_to_stderr

T = TypeVar("T")


@dataclass(frozen=True)
class Carried(Generic[T]):
    """The answers to the orders that were carried out, and how many were refused."""

    answers: list[T]
    refused: int
    verb: str  # as in "were not moved"

    def raise_if_refused(self) -> None:
        """Raise `UsageError` if some orders were refused. Print the answers before this call."""
        if self.refused:
            count = self.refused + len(self.answers)
            raise UsageError(f"{self.refused} of {count} nodes were not {self.verb}", "see above")


def carry_out(order: Callable[[str], T], nodes: Iterable[str], verb: str) -> Carried[T]:
    """Send the order to each node, once. Raises the first refusal if all are refused."""
    answers: list[T] = []
    refused: list[AtollError] = []
    for node in dict.fromkeys(nodes):
        try:
            answers.append(order(node))
        except (Ambiguous, Banned, InvalidTransition, NotFound, NotPermitted) as error:
            refused.append(error)
            print_to_stderr(f"not {verb}: {error}")
    if refused and not answers:
        raise refused[0]
    return Carried(answers, len(refused), verb)
