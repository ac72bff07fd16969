"""When a volunteer's node may train: the owner's limits against what the machine says. Pure.

`decide` is asked every few seconds with what was observed and with its own last answer. It objects at once and
consents only after what it objected to has been away for a while, so that a loose plug or somebody who moves the
mouse now and then does not stop and start training all the time: each pause costs the others a plan.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from enum import Enum

from atoll.core.errors import ConfigError
from atoll.core.units import duration_text

MAINS_POWER_SETTLE_TIME = timedelta(seconds=60)  # mains power must be back for so long
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]|24):([0-5]\d)")
_DAY = timedelta(days=1)


class PauseCause(Enum):
    """Why a node does not train; the first that holds is the one that is told."""

    MONTH = "month"
    HOURS = "hours"
    BATTERY = "battery"
    IN_USE = "in use"


@dataclass(frozen=True)
class Hours:
    """A window of the local day; `end` before `start` means over midnight, equal means the whole day."""

    start: time
    end: time

    def contains(self, now: time) -> bool:
        if self.start < self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end


@dataclass(frozen=True)
class TrainingPolicy:
    """The owner's limits on *when*. Zero and empty mean none."""

    hours: tuple[Hours, ...] = ()
    monthly_bytes: float = 0.0
    pause_on_battery: bool = True
    idle_seconds: float = 0.0


@dataclass(frozen=True)
class MachineObservation:
    """What the machine says now."""

    local: datetime  # of the owner's wall clock
    monotonic: float
    month_bytes: int = 0
    on_battery: bool = False
    seconds_since_use: float = float("inf")  # since somebody or something else last used the machine


@dataclass(frozen=True)
class TrainingDecision:
    """Train, or not, why, and until when if that is known."""

    train: bool = True
    cause: PauseCause | None = None
    reason: str = ""
    until: datetime | None = None  # local
    battery_last_seen_monotonic: float | None = None  # monotonic time at which the battery was last in use


def decide(
    policy: TrainingPolicy, seen: MachineObservation, last: TrainingDecision, overruled: Collection[PauseCause] = ()
) -> TrainingDecision:
    """Decide whether to train now. `last` is the previous answer (at first `TrainingDecision()`)."""
    for verdict in _blocking_decisions(policy, seen):
        if verdict.cause not in overruled:
            return verdict
    if last.battery_last_seen_monotonic is not None and not last.train and last.cause not in overruled:
        left = last.battery_last_seen_monotonic + MAINS_POWER_SETTLE_TIME.total_seconds() - seen.monotonic
        if left > 0:
            again = seen.local + timedelta(seconds=left)
            return TrainingDecision(
                False,
                last.cause,
                "mains power is back; trains again in a minute",
                again,
                last.battery_last_seen_monotonic,
            )
    return TrainingDecision()


def active_causes(policy: TrainingPolicy, seen: MachineObservation) -> frozenset[PauseCause]:
    """All limits that would keep the node from training now."""
    return frozenset(verdict.cause for verdict in _blocking_decisions(policy, seen) if verdict.cause is not None)


def _blocking_decisions(policy: TrainingPolicy, seen: MachineObservation) -> Iterator[TrainingDecision]:
    if policy.monthly_bytes and seen.month_bytes >= policy.monthly_bytes:
        turns = next_month(seen.local)
        spent = f"this month's {policy.monthly_bytes / 1e9:g} GB are spent"
        yield TrainingDecision(False, PauseCause.MONTH, f"{spent}; trains again on {turns:%Y-%m-%d}", turns)
    if policy.hours and not any(window.contains(seen.local.time()) for window in policy.hours):
        opens = min(_next_time_of_day(window.start, seen.local) for window in policy.hours)
        yield TrainingDecision(False, PauseCause.HOURS, f"outside its hours; trains again at {opens:%H:%M}", opens)
    if policy.pause_on_battery and seen.on_battery:
        yield TrainingDecision(False, PauseCause.BATTERY, "on battery", battery_last_seen_monotonic=seen.monotonic)
    if seen.seconds_since_use < policy.idle_seconds:
        left = policy.idle_seconds - seen.seconds_since_use
        again = seen.local + timedelta(seconds=left)
        reason = f"the machine is in use; trains again after {duration_text(policy.idle_seconds)} of rest"
        yield TrainingDecision(False, PauseCause.IN_USE, reason, again)


def parse_hours(text: str) -> tuple[Hours, ...]:
    """`"22:00-07:00, 12:30-13:00"`; empty: no windows. Raises `ConfigError`."""
    return tuple(_window(part.strip()) for part in text.split(",")) if text.strip() else ()


def month_of(local: datetime) -> str:
    """`"2026-11"`: what a monthly allowance is counted against."""
    return f"{local:%Y-%m}"


def next_month(local: datetime) -> datetime:
    """The first moment of the next calendar month."""
    first = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + 31 * _DAY).replace(day=1)


def _window(text: str) -> Hours:
    match = _HOURS.fullmatch(text)
    if match is None or (match[3] == "24" and match[4] != "00"):
        raise ConfigError(f"{text[:40]!r} is no window of the day", "write for example 22:00-07:00,12:30-13:00")
    start, end = time(int(match[1]), int(match[2])), time(int(match[3]) % 24, int(match[4]))
    return Hours(start, end)


def _next_time_of_day(start: time, local: datetime) -> datetime:
    today = local.replace(hour=start.hour, minute=start.minute, second=0, microsecond=0)
    return today if today > local else today + _DAY
