"""A member's last report of the tokens trained since the head, and a forecast of its next tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_INTERVAL = 0.1  # seconds between two reports


@dataclass(frozen=True)
class LastReport:
    """A member's last token report."""

    tokens: int
    when: float
    leaving: bool
    step_seconds: float
    full: bool  # more tokens would not be counted
    since: tuple[int, float]  # its first report at this head: tokens and time
    gap: float  # seconds since the previous report

    @classmethod
    def after(
        cls, before: LastReport | None, tokens: int, now: float, *, leaving: bool, step_seconds: float, full: bool
    ) -> LastReport:
        """The report that follows `before`."""
        if before is None or tokens < before.tokens:  # fewer tokens: the member began again
            return cls(tokens, now, leaving, step_seconds, full, since=(tokens, now), gap=0.0)
        return cls(tokens, now, leaving, step_seconds, full, before.since, now - before.when)

    def coming(self, now: float, lead: float) -> float:
        """Tokens that the member probably adds within `lead` seconds from now, if its next report is on time."""
        tokens, when = self.since
        if self.when - when < LEAST_INTERVAL:
            return 0.0
        return (self.tokens - tokens) / (self.when - when) * (min(now - self.when, self.gap) + lead)
