"""Sending rates: estimates of the uplink and of each path from acknowledged bytes, and fair shares. Pure.

Why: unpaced senders that share a link fill its queue, lose packets together and reach half of its rate. Paced a little
below the link's rate they reach 0.93 of it (measured).

The pacer cuts time into windows of a few round trips and passes the bytes acknowledged in each. A window counts if some
connection had unsent data all the time. The uplink estimate is the mean of the best three of the last 16 windows.

- Start: all senders together get 4 MB/s, and twice as much after each window in which that got through, until it does
  not. A start that fills the link's queue at once makes TCP cubic leave slow start early; connections that begin a
  little later then stay slow for the rest of the exchange.
- Cruise: senders share 0.95 of the estimate. After seven windows one window probes a higher rate, in growing steps as
  long as more is delivered. The 16 windows cover two such turns, so the estimate follows the link up and down.
- Path: a connection that delivers far less than its rate is limited elsewhere (its path, its receiver). It gets a
  little more than it uses, and the other connections share the rest.
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
START_BYTES_PER_SECOND = 4e6  # of all senders together in the first window
START_STEP = 2.0  # factor of the next window, as long as the last one got through
MIN_DELIVERED_FRACTION = 0.8  # of the rate, for a window of the start to have got through: acknowledgements are late
BEST_WINDOWS = 3  # windows whose mean is the estimate: the best alone is mostly noise
MIN_GROWTH_OVER_ESTIMATE = 1.05  # a probe found more if it delivered more than this factor of the estimate,
MIN_GROWTH_OVER_CRUISE = 1.1  # or of the mean before it: its acknowledgements are late, so few probes reach the former
MIN_GROWTH_AT_START = 1.1  # factor between two windows of the start below which the link is full
PATH_LIMITED_BELOW = 0.7  # of its rate: a connection that delivers less is limited by its path or receiver
PATH_LIMIT_USED_FROM = 0.9  # of its limit: a connection that delivers more gets a higher limit
PATH_HEADROOM = 1.25  # limit of such a connection, as a factor of its delivered rate
MIN_BYTES_PER_SECOND = 64 * 1024.0  # lowest rate of a connection, where the link has that much for each
MANY = 8  # connections: fewer have `MIN_BYTES_PER_SECOND` each on any link, so that they notice when it recovers

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class WindowSample:
    """Measurements of one connection in one window."""

    delivered: int  # bytes that the peer acknowledged
    backlogged: bool  # it had unsent data all the time, and the peer's receive window did not stop it
    busy: float = 1.0  # fraction of the window in which it had unsent data


@dataclass(frozen=True, slots=True)
class UplinkEstimate:
    """Estimate of this node's uplink to all peers together."""

    recent: tuple[float, ...] = ()  # bytes per second in the last windows that counted, the newest last
    started: bool = False  # the start is over and the rate is known
    start_bytes_per_second: float = START_BYTES_PER_SECOND  # budget of the current window of the start
    cruised: int = 0  # windows since the last probe
    probe: int | None = None  # index into `PROBE_FACTORS` while probing

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second that the uplink carries; infinite while unknown."""
        best = sorted(self.recent)[-BEST_WINDOWS:]
        return sum(best) / len(best) if self.started else math.inf

    @property
    def budget_bytes_per_second(self) -> float:
        """Bytes per second that all senders together may use in the next window."""
        if not self.started:
            return self.start_bytes_per_second
        return self.bytes_per_second * (CRUISE_FRACTION if self.probe is None else PROBE_FACTORS[self.probe])

    def observe(self, seconds: float, sent: Sequence[WindowSample], *, is_link_bound: bool = True) -> UplinkEstimate:
        """Return the estimate after one more window of `seconds`.

        `is_link_bound`: the backlog can be due to the uplink, because it is not all for one of several peers.
        """
        rate = sum(sample.delivered for sample in sent) / seconds
        busy = max((sample.busy for sample in sent), default=0.0)
        if (
            not self.started and busy and rate / busy >= MIN_DELIVERED_FRACTION * self.start_bytes_per_second
        ):  # bursts count as well
            return UplinkEstimate(start_bytes_per_second=START_STEP * self.start_bytes_per_second)
        # otherwise the rate is only a lower bound of the uplink's
        if not is_link_bound or not any(sample.backlogged for sample in sent):
            return self._at_least(rate) if self.started and rate > self.bytes_per_second else self
        if not self.started:
            return self._begin(rate)
        recent = (*self.recent, rate)[-MEMORY_WINDOWS:]
        if self.probe is not None:
            cruised = self.recent[-CRUISE_WINDOWS:]
            grew = rate > self.bytes_per_second * MIN_GROWTH_OVER_ESTIMATE or rate > MIN_GROWTH_OVER_CRUISE * sum(
                cruised
            ) / len(cruised)
            return UplinkEstimate(recent, True, probe=min(self.probe + 1, len(PROBE_FACTORS) - 1) if grew else None)
        due = self.cruised + 1 >= CRUISE_WINDOWS
        return UplinkEstimate(recent, True, cruised=0 if due else self.cruised + 1, probe=0 if due else None)

    def _begin(self, rate: float) -> UplinkEstimate:
        """Return the estimate after a window of the start that did not get through.

        After two such windows without growth, their rate is the link's. It may also be the rate of a busy machine, so
        the next window probes.
        """
        recent = (*self.recent, rate)[-2:]
        if len(recent) == 2 and rate <= recent[0] * MIN_GROWTH_AT_START:
            return UplinkEstimate(recent, True, probe=0)
        return replace(self, recent=recent)

    def _at_least(self, rate: float) -> UplinkEstimate:
        """Replace the lowest window by `rate`."""
        lowest = min(range(len(self.recent)), key=lambda i: self.recent[i])
        return replace(self, recent=(*self.recent[:lowest], rate, *self.recent[lowest + 1 :]))


@dataclass(frozen=True, slots=True)
class PathEstimate:
    """Estimate of the path of one connection beyond the uplink."""

    limit_bytes_per_second: float = math.inf  # bytes per second that it can use, with headroom
    last_bytes_per_second: float = 0.0  # bytes per second delivered in the last window

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second that the path carries; infinite if it never limited the connection."""
        return self.limit_bytes_per_second / PATH_HEADROOM

    def observe(self, seconds: float, sent: WindowSample, given: float) -> PathEstimate:
        """Return the estimate after a window with a pacing rate of `given` bytes per second."""
        rate = sent.delivered / seconds
        if not sent.backlogged or math.isinf(given):
            return replace(self, last_bytes_per_second=rate)
        # a connection whose rate still grows is only starting
        still = rate <= self.last_bytes_per_second * PATH_HEADROOM
        if rate < PATH_LIMITED_BELOW * given and still:
            return PathEstimate(max(rate * PATH_HEADROOM, MIN_BYTES_PER_SECOND), rate)
        return PathEstimate(
            self.limit_bytes_per_second * 2
            if rate >= PATH_LIMIT_USED_FROM * self.limit_bytes_per_second
            else self.limit_bytes_per_second,
            rate,
        )


def fair_shares(budget: float, limits: Mapping[Key, float]) -> dict[Key, float]:
    """Divide `budget` (bytes per second) equally; what a share has above its limit goes to the other keys.

    Each share is at least `MIN_BYTES_PER_SECOND`. Where more than `MANY` connections would exceed the budget with that,
    each gets at least an equal share of the budget instead.
    """
    if math.isinf(budget):
        return dict.fromkeys(limits, math.inf)
    given: dict[Key, float] = {}
    left = budget
    least = min(MIN_BYTES_PER_SECOND, max(budget, MANY * MIN_BYTES_PER_SECOND) / max(1, len(limits)))
    for position, key in enumerate(sorted(limits, key=lambda key: limits[key])):
        share = min(limits[key], left / (len(limits) - position))
        left -= share
        given[key] = max(share, least)
    return given
