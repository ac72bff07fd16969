"""Keeps every connection at its share of what our uplink carries; the sums are in `rates.py`.

Only connections that leave the building are measured and paced: where a round trip takes less than two milliseconds,
TCP does well alone, and the processor, not the link, is what is measured.

What was sent is acknowledged a round trip later, which is about the time of a look. So a window begins anew when
somebody has sent for that long, and of each connection only looks after that say what it carries: else every begin
would look like a slow link, and like a path that carries less than it was given.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from atoll.core import log
from atoll.core.clock import Clock
from atoll.node.direct import rates, tcp
from atoll.node.direct.hosts import is_ip_address

LOCAL_RTT_SECONDS = 0.002
SAMPLES_PER_WINDOW = 4  # in a window
MIN_WINDOW_SECONDS, MAX_WINDOW_SECONDS = 0.08, 2.0
WINDOW_ROUND_TRIPS = 4
WINDOW_BYTES = 1024 * 1024  # of each sender, once the uplink is known: of less the best windows are the luckiest
SLOW_WINDOW_SECONDS = 0.24  # to wait for them, at most
SETTLING_SAMPLES = 2  # from the first that finds it sending to the first whose acknowledgements are all of a full pace
IDLE_SECONDS = 1.5  # in which nobody sends: go to sleep
IDLE_BYTES_PER_SECOND = 200e3  # bytes per second of a connection that says something now and then
_AFTER_A_FAULT = 1.0  # seconds

_log = log.get("direct")


class Paced(Hashable, Protocol):
    """A connection."""

    @property
    def peer_id(self) -> str:
        """Whom it leads to; an IP address where that is all we know."""

    @property
    def sock(self) -> tcp.SocketOptions:
        """For the kernel's figures, and for its pace."""


@dataclass
class _SteadySample:
    """What is known of a connection in a window, where it had sent long enough."""

    looks: int = 0
    seconds: float = 0.0
    delivered: int = 0
    given: float = 0.0  # bytes that its pace allowed, a look before


@dataclass
class _ConnectionState:
    """One connection between two windows."""

    path: rates.PathEstimate = field(default_factory=rates.PathEstimate)
    given: float = math.inf
    given_before: float = math.inf  # in the look before: what is acknowledged in this one was sent then
    far: bool = False  # it leaves the building, as far as we saw
    near: bool = False  # at the last look it did not
    last_info: tcp.TcpInfo | None = None  # at the last look
    delivered: int = 0  # in this window
    steady: _SteadySample = field(default_factory=_SteadySample)
    streak: int = 0  # looks without a break at which it had something to send
    backlogged_samples: int = 0  # looks in this window at which it had something to send
    receiver_limited_samples: int = 0  # of them, those at which the other side took no more
    sends: bool = False  # at the last look it had more to send


class Pacer:
    """One for all connections of a host."""

    def __init__(self, clock: Clock) -> None:
        self.uplink = rates.UplinkEstimate()
        self._clock = clock
        self._watched: dict[Paced, _ConnectionState] = {}
        self._busy = asyncio.Event()
        self._seconds = 0.0  # of the window
        self._samples = 0  # in it
        self._quiet = 0.0  # seconds without a byte sent by anybody
        self._task = asyncio.create_task(self._run()) if tcp.PACING_SUPPORTED else None

    def add(self, connection: Paced) -> None:
        """Watch a new connection."""
        self._watched[connection] = _ConnectionState()

    def remove(self, connection: Paced) -> None:
        """It is gone."""
        self._watched.pop(connection, None)

    def wake(self) -> None:
        """Somebody sends: look again."""
        self._busy.set()

    async def close(self) -> None:
        """Stop looking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """A fault of ours here must not leave anybody at whatever rate it had."""
        while True:
            try:
                await self._watch()
            except Exception as error:
                _log.error("pacing failed", reason=repr(error))
                self.uplink = rates.UplinkEstimate()
                for connection, one in self._watched.items():
                    one.given = math.inf
                    tcp.set_pacing_rate(connection.sock, math.inf)
                await asyncio.sleep(_AFTER_A_FAULT)

    async def _watch(self) -> None:
        while True:
            await self._busy.wait()
            self._busy.clear()
            for one in self._watched.values():
                one.last_info = None
            self._begin_window()
            self._quiet, looked = 0.0, self._clock.monotonic()
            while self._quiet < IDLE_SECONDS:
                await asyncio.sleep(self._window() / SAMPLES_PER_WINDOW)
                now = self._clock.monotonic()
                self._sample(now - looked)
                looked = now

    def _sample(self, seconds: float) -> None:
        """Read all figures, `seconds` after the last time; judge when a window is over."""
        known = any(one.last_info is not None for one in self._watched.values())
        was_steady = self._is_steady
        self._quiet = 0.0 if self._read(seconds) else self._quiet + seconds
        begins = self._is_steady and not was_steady and self.uplink.started  # a start asks who got through at all
        if begins or not known:
            self._begin_window()
            return
        self._seconds += seconds
        self._samples += 1
        if self._samples == SAMPLES_PER_WINDOW:
            self._update_estimates(self._seconds)
            self._begin_window()

    @property
    def _is_steady(self) -> bool:
        """Whether what is acknowledged from now on was sent at a full pace."""
        return any(one.streak >= SETTLING_SAMPLES for one in self._watched.values())

    def _begin_window(self) -> None:
        self._seconds, self._samples = 0.0, 0
        for one in self._watched.values():
            one.delivered = one.backlogged_samples = one.receiver_limited_samples = 0
            one.steady = _SteadySample()

    def _read(self, seconds: float) -> bool:
        """All figures; whether anybody sends."""
        sends = changes = False
        for connection, one in self._watched.items():
            now = tcp.info(connection.sock)
            one.near = now is not None and 0 < now.min_rtt_seconds < LOCAL_RTT_SECONDS
            if now is None or now.min_rtt_seconds < LOCAL_RTT_SECONDS:
                changes |= one.sends  # it was far, as far as we saw
                one.sends, one.streak = False, 0
                continue
            before, one.last_info, one.far = one.last_info, now, True
            if before is None:
                continue
            delivered = now.delivered_since(before)
            one.delivered += delivered
            if one.streak >= SETTLING_SAMPLES:
                one.steady.looks += 1
                one.steady.seconds += seconds
                one.steady.delivered += delivered
                one.steady.given += one.given_before * seconds
            one.given_before = one.given
            one.streak = one.streak + 1 if now.unsent_bytes else 0
            one.backlogged_samples += now.unsent_bytes > 0
            one.receiver_limited_samples += now.receiver_limited_seconds > before.receiver_limited_seconds
            moves = now.unsent_bytes > 0 or delivered > IDLE_BYTES_PER_SECOND * seconds
            sends |= moves
            before_that, one.sends = one.sends, now.unsent_bytes > 0
            changes |= one.sends != before_that  # who has sent all leaves its share to the others at once
        if changes:
            self._set_rates()
        return sends

    def _update_estimates(self, seconds: float) -> None:
        sent = {
            connection: rates.WindowSample(
                one.delivered,
                backlogged=one.steady.looks >= SAMPLES_PER_WINDOW
                and 2 * one.receiver_limited_samples < SAMPLES_PER_WINDOW,
                busy=min(1.0, one.backlogged_samples / SAMPLES_PER_WINDOW),
            )
            for connection, one in self._watched.items()
            if one.last_info is not None
        }
        busy = _far_ends(connection for connection, figures in sent.items() if figures.backlogged)
        known = self.uplink.started  # while it is not, who gets through less is only starting
        is_link_bound = len(busy) > 1 or len(_far_ends(self._watched)) == 1
        asked = sum(one.steady.given for one in self._watched.values()) / seconds
        fits = min(1.0, self.uplink.rate / asked) if known and asked else 1.0  # a probe asks for more than is there
        self.uplink = self.uplink.observe(seconds, tuple(sent.values()), is_link_bound=is_link_bound)
        for connection, figures in sent.items():
            one, steady = self._watched[connection], self._watched[connection].steady
            if known and steady.seconds >= seconds / 2:
                given = fits * steady.given / steady.seconds
                one.path = one.path.observe(steady.seconds, replace(figures, delivered=steady.delivered), given)
            else:
                one.path = one.path.observe(seconds, replace(figures, backlogged=False), math.inf)
        self._set_rates()

    def _set_rates(self) -> None:
        """Set every sender's rate; who does not send may begin at what one more would get.

        If nobody sends, one connection with each peer may begin: exchanges use one of the two in a direction at a time.
        """
        far = {connection: one for connection, one in self._watched.items() if one.far}
        senders = {connection: one.path.limit for connection, one in far.items() if one.sends}
        given = rates.fair_shares(self.uplink.budget, senders)
        beginners = len(senders) + 1 if senders else max(1, len(_far_ends(far)))
        others = max(self.uplink.budget / beginners, rates.MIN_BYTES_PER_SECOND)
        for connection, one in far.items():
            rate = given.get(connection, others)
            if rate != one.given:
                one.given = rate
                tcp.set_pacing_rate(connection.sock, rate)

    @property
    def uplink_bytes_per_second(self) -> float:
        """What was measured while we sent to others, at least 1; 0 while nothing is known."""
        return max(self.uplink.rate, 1.0) if math.isfinite(self.uplink.rate) else 0.0

    def bytes_per_second_to(self, peer_id: str) -> float:
        """Bytes per second to a peer if we sent to nobody else, as measured; infinite: near, 0: nothing is known."""
        if any(one.near for connection, one in self._watched.items() if connection.peer_id == peer_id):
            return math.inf
        paths = [one.path for connection, one in self._watched.items() if connection.peer_id == peer_id]
        return min(self.uplink_bytes_per_second, max((path.rate for path in paths), default=math.inf))

    def path_limits_bytes_per_second(self) -> dict[str, float]:
        """Bytes per second to those whose path, and not our uplink, is what limits us."""
        found: dict[str, float] = {}
        for connection, one in self._watched.items():
            if math.isfinite(one.path.limit):
                found[connection.peer_id] = max(found.get(connection.peer_id, 0.0), one.path.last)
        return found

    def _window(self) -> float:
        round_trip = max(
            (one.last_info.min_rtt_seconds for one in self._watched.values() if one.last_info), default=0.0
        )
        senders = max(1, sum(one.sends for one in self._watched.values()))
        filled = min(WINDOW_BYTES * senders / max(self.uplink.rate, rates.MIN_BYTES_PER_SECOND), SLOW_WINDOW_SECONDS)
        return min(max(MIN_WINDOW_SECONDS, WINDOW_ROUND_TRIPS * round_trip, filled), MAX_WINDOW_SECONDS)


def _far_ends(connections: Iterable[Paced]) -> set[str]:
    """To whom these lead. p2pd's count where there are no others: most likely they lead to the same peers."""
    known = {connection.peer_id for connection in connections}
    return {peer for peer in known if not is_ip_address(peer)} or known
