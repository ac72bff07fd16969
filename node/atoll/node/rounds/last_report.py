"""What a member said last of the tokens that it trained since the head, and what it most likely trains next. Pure."""

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
    full: bool  # more would not be counted
    since: tuple[int, float]  # its first at this head: tokens, and when
    gap: float  # seconds since the report before

    @classmethod
    def after(
        cls, before: LastReport | None, tokens: int, now: float, *, leaving: bool, step_seconds: float, full: bool
    ) -> LastReport:
        """The next one, after the report `before`."""
        if before is None or tokens < before.tokens:  # the latter: it began anew
            return cls(tokens, now, leaving, step_seconds, full, since=(tokens, now), gap=0.0)
        return cls(tokens, now, leaving, step_seconds, full, before.since, now - before.when)

    def coming(self, now: float, lead: float) -> float:
        """Tokens that it most likely trains by `lead` seconds from now, were its next report not overdue."""
        tokens, when = self.since
        if self.when - when < LEAST_INTERVAL:
            return 0.0
        return (self.tokens - tokens) / (self.when - when) * (min(now - self.when, self.gap) + lead)
