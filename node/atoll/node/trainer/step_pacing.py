"""Pacing of inner steps and their recent speed. Pure: callers pass the time.

The owner of a machine may limit training with `minimum_step_seconds` and with `compute_share`, the share of the time in
which training computes. `StepPacer` computes when the next step or action may begin, and the speed of recent steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RECENT_STEPS = 32
TIMED_STEPS = 8  # recent timed steps behind `busy_seconds_per_token`; few, since the machine's other load changes


@dataclass(frozen=True)
class WorkTime:
    """Duration of a step or of one action of it.

    `seconds` also contains waiting for a CPU core, which counts neither as computing nor as rest.
    """

    seconds: float = 0.0
    computed: float = 0.0  # the part of `seconds` spent computing

    def with_rest(self, share: float) -> float:
        """Seconds from the start of the work to the end of its rest, of which at most `share` may be computing."""
        return max(self.seconds, self.computed / share)


class StepPacer:
    """Decides when work may begin, and measures recent steps.

    A rest follows each piece of work to keep `compute_share`.
    """

    def __init__(self, minimum_step_seconds: float, compute_share: float = 1.0) -> None:
        self.minimum_step_seconds = minimum_step_seconds
        self.compute_share = compute_share
        self._rest_until = 0.0
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=RECENT_STEPS)  # began, tokens, loss
        self._busy: deque[tuple[list[WorkTime], int]] = deque(maxlen=TIMED_STEPS)  # work of a step, tokens
        self._worked: list[WorkTime] = []  # work of the running step
        self._first = True  # the first step of a process warms up kernels and memory; it does not count
        self._next_step_at = 0.0
        self._began = 0.0

    def begin(self, now: float) -> None:
        """Record that a step begins."""
        self._began, self._worked = now, []
        self._next_step_at = now + self.minimum_step_seconds

    def record_work(self, began: float, work: WorkTime) -> None:
        """Record a finished step, or one finished action of a step."""
        self._rest_until = began + work.with_rest(self.compute_share)
        self._worked.append(work)

    def end(self, tokens: int, loss: float) -> None:
        """Record that the step is finished."""
        self._steps.append((self._began, tokens, loss))
        if self._worked and not self._first:
            self._busy.append((self._worked, tokens))
        self._first = False

    def clear_recent_steps(self) -> None:
        """Forget the recent steps after an interruption, so that it does not count as a slow step."""
        self._steps.clear()  # `_busy` stays: compute times are still valid

    def wait_seconds(self, now: float) -> float:
        """Seconds until the next step may begin."""
        return max(self.rest_seconds(now), self._next_step_at - now)

    def rest_seconds(self, now: float) -> float:
        """Seconds until the next action may begin."""
        return max(0.0, self._rest_until - now)

    def step_seconds(self, now: float) -> float:
        """Mean seconds from the start of one recent step to the start of the next; 0 without steps."""
        if not self._steps:
            return 0.0
        return max(now, self._next_step_at, self._rest_until) / len(self._steps) - self._steps[0][0] / len(self._steps)

    def tokens_per_step(self) -> float:
        """Mean tokens of the recent steps."""
        return sum(tokens for _, tokens, _ in self._steps) / max(1, len(self._steps))

    def busy_seconds_per_token(self) -> float:
        """Compute time of recent steps plus the rest that the current share requires, no other waits. 0: unknown."""
        seconds = sum(work.with_rest(self.compute_share) for works, _ in self._busy for work in works)
        return seconds / max(1, sum(tokens for _, tokens in self._busy))

    def loss(self) -> float:
        """Mean loss of the recent steps."""
        return sum(loss for _, _, loss in self._steps) / max(1, len(self._steps))
