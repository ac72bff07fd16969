"""How fast to send, from what was delivered: an estimate of our uplink and its shares. Pure.

Unpaced senders that share a link fill its queue, lose packets together and reach half of it; paced a little below the
link, 0.93 (measured). So the shell cuts time into windows of a few round trips and tells what the other sides
acknowledged in each. A window counts while somebody had more to send than went out. The estimate is the mean of the
best three of the last windows. At first all together get what most links carry, and twice as much after each window in
which they got through, until they do not: a start that fills the link's queue at once makes cubic leave slow start
early, and connections that begin a little later crawl for the rest of the exchange. Then senders share a little less
than the estimate, and now and then one window asks for more, in growing steps as long as more comes. What was seen is
forgotten after two such turns, so that the estimate follows the link both ways.

A connection that gets through far less than it was given is held up elsewhere (its path, its receiver): it keeps a
little more than it uses, and the others have the rest.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

CRUISE_FRACTION = 0.95  # of the estimate
PROBE_FACTORS = (1.15, 1.25, 1.5, 2.0)  # of the estimate, one window each, while it grows
CRUISE_WINDOWS = 7  # between two probes
MEMORY_WINDOWS = 16
START_BYTES_PER_SECOND = 4e6  # bytes per second, of all senders together in the first window
START_STEP = 2.0  # times that in the next, as long as the last got through
MIN_DELIVERED_FRACTION = 0.8  # of what was given: acknowledgements of a step are late
BEST_WINDOWS = 3  # windows whose mean is the estimate: the best alone is mostly noise
MIN_GROWTH_OVER_ESTIMATE = 1.05  # what counts as more in a probe
MIN_GROWTH_OVER_CRUISE = (
    1.1  # and over what was delivered just before it: acknowledgements of a window are late, so few reach the other
)
MIN_GROWTH_AT_START = 1.1  # what counts as more at the start
PATH_LIMITED_BELOW = 0.7  # of what it was given: a connection that delivers less has its limit elsewhere
PATH_LIMIT_USED_FROM = 0.9  # of its limit: whatever held it up does so no more
PATH_HEADROOM = 1.25  # what such a connection gets, of what it delivered
MIN_BYTES_PER_SECOND = 64 * 1024.0  # bytes per second; nobody is starved

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class WindowSample:
    """One connection in one window."""

    delivered: int  # bytes that the other side acknowledged
    backlogged: bool  # it had more to send all the time, and the other side's window was not what stopped it
    busy: float = 1.0  # share of the window in which it had more to send


@dataclass(frozen=True, slots=True)
class UplinkEstimate:
    """What is known of our side's link to all others."""

    recent: tuple[float, ...] = ()  # bytes per second in the last windows that counted, the newest last
    started: bool = False
    first: float = START_BYTES_PER_SECOND  # what all together may send before that
    cruised: int = 0  # windows since the last probe
    probe: int | None = None  # the step of `PROBE_FACTORS` that is going on

    @property
    def rate(self) -> float:
        """Bytes per second that it carries; infinite while nothing is known."""
        best = sorted(self.recent)[-BEST_WINDOWS:]
        return sum(best) / len(best) if self.started else math.inf

    @property
    def budget(self) -> float:
        """What all senders together may send in the next window, bytes per second."""
        if not self.started:
            return self.first
        return self.rate * (CRUISE_FRACTION if self.probe is None else PROBE_FACTORS[self.probe])

    def observe(self, seconds: float, sent: Sequence[WindowSample], *, is_link_bound: bool = True) -> UplinkEstimate:
        """After one more window of `seconds`; `is_link_bound`: not all that waited waited for one of several peers."""
        rate = sum(one.delivered for one in sent) / seconds
        busy = max((one.busy for one in sent), default=0.0)
        if (
            not self.started and busy and rate / busy >= MIN_DELIVERED_FRACTION * self.first
        ):  # whoever it was, and in bursts, too
            return UplinkEstimate(first=START_STEP * self.first)
        if not is_link_bound or not any(one.backlogged for one in sent):  # no measure of our uplink, but a lower bound
            return self._at_least(rate) if self.started and rate > self.rate else self
        if not self.started:
            return self._begin(rate)
        recent = (*self.recent, rate)[-MEMORY_WINDOWS:]
        if self.probe is not None:
            cruised = self.recent[-CRUISE_WINDOWS:]
            grew = rate > self.rate * MIN_GROWTH_OVER_ESTIMATE or rate > MIN_GROWTH_OVER_CRUISE * sum(cruised) / len(
                cruised
            )
            return UplinkEstimate(recent, True, probe=min(self.probe + 1, len(PROBE_FACTORS) - 1) if grew else None)
        due = self.cruised + 1 >= CRUISE_WINDOWS
        return UplinkEstimate(recent, True, cruised=0 if due else self.cruised + 1, probe=0 if due else None)

    def _begin(self, rate: float) -> UplinkEstimate:
        """After a window of the start: two in a row that did not get through, nor grew, are what the link carries.

        Or what a busy machine gave in these windows: so the next one asks for more at once.
        """
        recent = (*self.recent, rate)[-2:]
        if len(recent) == 2 and rate <= recent[0] * MIN_GROWTH_AT_START:
            return UplinkEstimate(recent, True, probe=0)
        return replace(self, recent=recent)

    def _at_least(self, rate: float) -> UplinkEstimate:
        """With `rate` in the place of the lowest window."""
        lowest = min(range(len(self.recent)), key=lambda i: self.recent[i])
        return replace(self, recent=(*self.recent[:lowest], rate, *self.recent[lowest + 1 :]))


@dataclass(frozen=True, slots=True)
class PathEstimate:
    """What is known of one connection beyond our uplink."""

    limit: float = math.inf  # bytes per second worth giving it
    last: float = 0.0  # delivered in the window before

    @property
    def rate(self) -> float:
        """Bytes per second that it carries; infinite: as much as it was ever given."""
        return self.limit / PATH_HEADROOM

    def observe(self, seconds: float, sent: WindowSample, given: float) -> PathEstimate:
        """After a window in which it was `given` so many bytes per second."""
        rate = sent.delivered / seconds
        if not sent.backlogged or math.isinf(given):
            return replace(self, last=rate)
        still = rate <= self.last * PATH_HEADROOM  # a connection that grows is only starting
        if rate < PATH_LIMITED_BELOW * given and still:
            return PathEstimate(max(rate * PATH_HEADROOM, MIN_BYTES_PER_SECOND), rate)
        return PathEstimate(self.limit * 2 if rate >= PATH_LIMIT_USED_FROM * self.limit else self.limit, rate)


def fair_shares(budget: float, limits: Mapping[Key, float]) -> dict[Key, float]:
    """Share `budget` equally; pass on what a limit leaves. Each share is at least `MIN_BYTES_PER_SECOND`."""
    if math.isinf(budget):
        return dict.fromkeys(limits, math.inf)
    given: dict[Key, float] = {}
    left = budget
    for position, key in enumerate(sorted(limits, key=lambda key: limits[key])):
        share = min(limits[key], left / (len(limits) - position))
        left -= share
        given[key] = max(share, MIN_BYTES_PER_SECOND)
    return given
