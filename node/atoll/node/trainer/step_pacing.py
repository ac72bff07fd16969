"""When inner steps may begin, and how fast they came. Pure: it is told the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

RECENT_STEPS = 32
TIMED_STEPS = 8  # whose computing is told: what else the machine does changes


@dataclass(frozen=True)
class WorkTime:
    """What a piece of work took. Where others want the same cores it waits, too: neither computing nor rest."""

    seconds: float = 0.0
    computed: float = 0.0  # of these seconds

    def with_rest(self, share: float) -> float:
        """Seconds until computing had no more than that share of the time."""
        return max(self.seconds, self.computed / share)


class StepPacer:
    """Over the last steps. Between two pieces of work there is a rest, so that computing has its share of the time."""

    def __init__(self, minimum_step_seconds: float, compute_share: float = 1.0) -> None:
        self.minimum_step_seconds = minimum_step_seconds
        self.compute_share = compute_share
        self._rest_until = 0.0
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=RECENT_STEPS)  # began, tokens, loss
        self._busy: deque[tuple[list[WorkTime], int]] = deque(maxlen=TIMED_STEPS)  # and tokens
        self._worked: list[WorkTime] = []  # in the step under way
        self._first = True  # step of this process: it warms kernels and memory
        self._next_step_at = 0.0
        self._began = 0.0

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began, self._worked = now, []
        self._next_step_at = now + self.minimum_step_seconds

    def record_work(self, began: float, work: WorkTime) -> None:
        """A piece of a step, or all of it, is done."""
        self._rest_until = began + work.with_rest(self.compute_share)
        self._worked.append(work)

    def end(self, tokens: int, loss: float) -> None:
        """It is done."""
        self._steps.append((self._began, tokens, loss))
        if self._worked and not self._first:
            self._busy.append((self._worked, tokens))
        self._first = False

    def clear_recent_steps(self) -> None:
        """Training was interrupted: the gap is not a slow step."""
        self._steps.clear()  # what its steps computed stands

    def wait_seconds(self, now: float) -> float:
        """Until the next step may begin."""
        return max(self.rest_seconds(now), self._next_step_at - now)

    def rest_seconds(self, now: float) -> float:
        """Until anything may be computed."""
        return max(0.0, self._rest_until - now)

    def step_seconds(self, now: float) -> float:
        """Mean time from the beginning of one recent step to that of the next."""
        if not self._steps:
            return 0.0
        return max(now, self._next_step_at, self._rest_until) / len(self._steps) - self._steps[0][0] / len(self._steps)

    def tokens_per_step(self) -> float:
        return sum(tokens for _, tokens, _ in self._steps) / max(1, len(self._steps))

    def busy_seconds_per_token(self) -> float:
        """That recent steps computed, and would rest at the present share; no other waiting is in it. 0: not known."""
        seconds = sum(work.with_rest(self.compute_share) for works, _ in self._busy for work in works)
        return seconds / max(1, sum(tokens for _, tokens in self._busy))

    def loss(self) -> float:
        """Mean of the recent steps."""
        return sum(loss for _, _, loss in self._steps) / max(1, len(self._steps))
