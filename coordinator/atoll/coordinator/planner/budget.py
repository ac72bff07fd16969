"""Budget of a solver: a time limit by the clock passed in, and a step limit if results must be reproducible."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.clock import Clock


@dataclass
class Budget:
    """Time from `start` to `deadline` (monotonic seconds of `clock`), and at most `steps` steps."""

    clock: Clock
    start: float
    deadline: float
    steps: int | None = None
    taken: int = 0

    @classmethod
    def of_seconds(cls, clock: Clock, seconds: float, steps: int | None = None) -> Budget:
        """Start a budget now."""
        now = clock.monotonic()
        return cls(clock, now, now + seconds, steps)

    def over(self) -> bool:
        """Count a step and return whether the budget is spent."""
        self.taken += 1
        return self.spent() >= 1

    def spent(self) -> float:
        """Share of the budget that is spent."""
        now, span = self.clock.monotonic(), self.deadline - self.start
        of_time = (now - self.start) / span if span > 0 else 1.0
        return max(of_time, self.taken / self.steps if self.steps else 0.0)

    def part(self, share: float) -> Budget:
        """A new budget with that share of the remaining time and steps; its steps are counted separately."""
        now = self.clock.monotonic()
        left = None if self.steps is None else max(1, int(share * (self.steps - self.taken)))
        return Budget(self.clock, now, now + share * (self.deadline - now), left)
