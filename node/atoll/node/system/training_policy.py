"""Policy that decides when a volunteer's node may train, from the owner's limits and an observation. Pure.

`limits.enforcer` calls `decide` every few seconds with a new observation and the previous decision. A limit pauses
training at once. Training resumes on battery limits only after mains power has been back for a while, and on the in-use
limit only after the idle time, so that a loose plug or a moved mouse does not stop and start training again and again:
each pause makes a new plan necessary.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from enum import Enum

from atoll.core.errors import ConfigError
from atoll.core.units import duration_text

MAINS_POWER_SETTLE_TIME = timedelta(seconds=60)  # training resumes after mains power has been back for this long
_HOURS = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)\s*-\s*([01]?\d|2[0-3]|24):([0-5]\d)")
_DAY = timedelta(days=1)


class PauseCause(Enum):
    """Limits that pause training, in order of precedence: the first active one is reported."""

    MONTH = "month"
    HOURS = "hours"
    BATTERY = "battery"
    IN_USE = "in use"


@dataclass(frozen=True)
class Hours:
    """A window of the local day. `end` before `start` crosses midnight; `end` equal to `start` is the whole day."""

    start: time
    end: time

    def contains(self, now: time) -> bool:
        if self.start < self.end:
            return self.start <= now < self.end
        return now >= self.start or now < self.end


@dataclass(frozen=True)
class TrainingPolicy:
    """The owner's limits on *when* to train. Zero and empty mean no limit."""

    hours: tuple[Hours, ...] = ()
    monthly_bytes: float = 0.0
    pause_on_battery: bool = True
    idle_seconds: float = 0.0


@dataclass(frozen=True)
class MachineObservation:
    """State of the machine at one moment."""

    local: datetime  # the owner's wall clock
    monotonic: float
    month_bytes: int = 0
    on_battery: bool = False
    seconds_since_use: float = float("inf")  # since a person or another program last used the machine


@dataclass(frozen=True)
class TrainingDecision:
    """A decision to train or to pause, with its reason and, if known, the time when training resumes."""

    train: bool = True
    cause: PauseCause | None = None
    reason: str = ""
    until: datetime | None = None  # local time
    battery_last_seen_monotonic: float | None = None  # when the machine last ran on battery


def decide(
    policy: TrainingPolicy, seen: MachineObservation, last: TrainingDecision, overruled: Collection[PauseCause] = ()
) -> TrainingDecision:
    """Decide whether to train now.

    `last` is the previous decision (at first `TrainingDecision()`); limits in `overruled` are ignored.
    """
    for decision in _blocking_decisions(policy, seen):
        if decision.cause not in overruled:
            return decision
    if last.battery_last_seen_monotonic is not None and not last.train and last.cause not in overruled:
        left = last.battery_last_seen_monotonic + MAINS_POWER_SETTLE_TIME.total_seconds() - seen.monotonic
        if left > 0:
            again = seen.local + timedelta(seconds=left)
            return TrainingDecision(
                False,
                last.cause,
                "mains power is back; training resumes in a minute",
                again,
                last.battery_last_seen_monotonic,
            )
    return TrainingDecision()


def active_causes(policy: TrainingPolicy, seen: MachineObservation) -> frozenset[PauseCause]:
    """Return all limits that would pause training now."""
    return frozenset(decision.cause for decision in _blocking_decisions(policy, seen) if decision.cause is not None)


def _blocking_decisions(policy: TrainingPolicy, seen: MachineObservation) -> Iterator[TrainingDecision]:
    if policy.monthly_bytes and seen.month_bytes >= policy.monthly_bytes:
        resumes = next_month(seen.local)
        spent = f"this month's {policy.monthly_bytes / 1e9:g} GB are used up"
        yield TrainingDecision(False, PauseCause.MONTH, f"{spent}; training resumes on {resumes:%Y-%m-%d}", resumes)
    if policy.hours and not any(window.contains(seen.local.time()) for window in policy.hours):
        resumes = min(_next_time_of_day(window.start, seen.local) for window in policy.hours)
        yield TrainingDecision(
            False, PauseCause.HOURS, f"outside its hours; training resumes at {resumes:%H:%M}", resumes
        )
    if policy.pause_on_battery and seen.on_battery:
        yield TrainingDecision(False, PauseCause.BATTERY, "on battery", battery_last_seen_monotonic=seen.monotonic)
    if seen.seconds_since_use < policy.idle_seconds:
        resumes = seen.local + timedelta(seconds=policy.idle_seconds - seen.seconds_since_use)
        reason = f"the machine is in use; training resumes after {duration_text(policy.idle_seconds)} without use"
        yield TrainingDecision(False, PauseCause.IN_USE, reason, resumes)


def parse_hours(text: str) -> tuple[Hours, ...]:
    """Parse windows such as `"22:00-07:00, 12:30-13:00"`; an empty text gives none. Raises `ConfigError`."""
    return tuple(_window(part.strip()) for part in text.split(",")) if text.strip() else ()


def month_of(local: datetime) -> str:
    """Return the calendar month for which traffic is counted, for example `"2026-11"`."""
    return f"{local:%Y-%m}"


def next_month(local: datetime) -> datetime:
    """Return the first moment of the next calendar month."""
    first = local.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    return (first + 31 * _DAY).replace(day=1)


def _window(text: str) -> Hours:
    match = _HOURS.fullmatch(text)
    if match is None or (match[3] == "24" and match[4] != "00"):
        raise ConfigError(
            f"{text[:40]!r} is not a window of the day (HH:MM-HH:MM)", "write for example 22:00-07:00,12:30-13:00"
        )
    start, end = time(int(match[1]), int(match[2])), time(int(match[3]) % 24, int(match[4]))
    return Hours(start, end)


def _next_time_of_day(start: time, local: datetime) -> datetime:
    today = local.replace(hour=start.hour, minute=start.minute, second=0, microsecond=0)
    return today if today > local else today + _DAY
