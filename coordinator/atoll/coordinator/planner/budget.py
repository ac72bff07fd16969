"""How long a solver may go on: by the clock that it is given, or by a count of steps where a result must repeat."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.clock import Clock


@dataclass
class Budget:
    """From `start` to `deadline` (monotonic seconds of `clock`), and no more than so many steps."""

    clock: Clock
    start: float
    deadline: float
    steps: int | None = None
    taken: int = 0

    @classmethod
    def of_seconds(cls, clock: Clock, seconds: float, steps: int | None = None) -> Budget:
        """From now on."""
        now = clock.monotonic()
        return cls(clock, now, now + seconds, steps)

    def over(self) -> bool:
        """Counts a step."""
        self.taken += 1
        return self.spent() >= 1

    def spent(self) -> float:
        """Which share of it is gone."""
        now, span = self.clock.monotonic(), self.deadline - self.start
        of_time = (now - self.start) / span if span > 0 else 1.0
        return max(of_time, self.taken / self.steps if self.steps else 0.0)

    def part(self, share: float) -> Budget:
        """That share of what is left; its steps are its own."""
        now = self.clock.monotonic()
        left = None if self.steps is None else max(1, int(share * (self.steps - self.taken)))
        return Budget(self.clock, now, now + share * (self.deadline - now), left)
