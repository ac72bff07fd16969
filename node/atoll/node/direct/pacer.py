"""Pacer: limits every connection of a host to its share of the uplink, as `rates.py` estimates it.

The pacer reads TCP_INFO of all connections four times a window, estimates the uplink and each path from the
acknowledged bytes, and sets the kernel's pacing rate of each connection.

Only connections with a round trip of 2 ms or more are measured and paced. On a local network TCP does well alone, and
the CPU, not the link, would be measured.

Data is acknowledged a round trip after it was sent, which is about the time between two samples. So a window restarts
when some connection has sent for that long, and only later samples of a connection count. Otherwise every start would
look like a slow link, or like a path that carries less than its rate.
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
SAMPLES_PER_WINDOW = 4
MIN_WINDOW_SECONDS, MAX_WINDOW_SECONDS = 0.08, 2.0
WINDOW_ROUND_TRIPS = 4
WINDOW_BYTES = 1024 * 1024  # a window holds this much of each sender: the best of smaller windows are noise
SLOW_WINDOW_SECONDS = 0.24  # on a slow link a window is not longer than this
# samples after a connection starts to send, until all acknowledgements are of data sent at a full rate
SETTLING_SAMPLES = 2
IDLE_SECONDS = 1.5  # seconds without a sender, after which the pacer sleeps
IDLE_BYTES_PER_SECOND = 200e3  # a connection below this rate, with nothing unsent, does not count as sending
_AFTER_A_FAULT = 1.0  # pause in seconds after an error

_log = log.get("direct")


class Paced(Hashable, Protocol):
    """A TCP connection that the pacer can measure and pace."""

    @property
    def peer_id(self) -> str:
        """The peer at the other end, or its IP address if the peer is unknown."""

    @property
    def sock(self) -> tcp.SocketOptions:
        """The socket, for TCP_INFO and for the pacing rate."""


@dataclass
class _SteadySample:
    """Sum of the samples of a window in which a connection had sent long enough."""

    samples: int = 0
    seconds: float = 0.0
    delivered: int = 0
    allowed_bytes: float = 0.0  # bytes that the pacing rate of one sample earlier allowed


@dataclass
class _ConnectionState:
    """State of one connection."""

    path: rates.PathEstimate = field(default_factory=rates.PathEstimate)
    given_bytes_per_second: float = math.inf  # its pacing rate, bytes per second
    given_before: float = math.inf  # the pacing rate one sample earlier, at which the data acknowledged now was sent
    far: bool = False  # whether any sample showed a round trip of 2 ms or more
    near: bool = False  # whether the last sample showed a shorter round trip
    last_info: tcp.TcpInfo | None = None  # of the last sample
    delivered: int = 0  # bytes in this window
    steady: _SteadySample = field(default_factory=_SteadySample)
    streak: int = 0  # samples in a row with unsent data
    backlogged_samples: int = 0  # samples of this window with unsent data
    receiver_limited_samples: int = 0  # samples of this window in which the receive window stopped it
    sends: bool = False  # whether the last sample had unsent data


class Pacer:
    """Measures and paces all connections of a host."""

    def __init__(self, clock: Clock) -> None:
        self.uplink = rates.UplinkEstimate()
        self._clock = clock
        self._watched: dict[Paced, _ConnectionState] = {}
        self._busy = asyncio.Event()
        self._seconds = 0.0  # seconds since the window began
        self._samples = 0  # in this window
        self._quiet = 0.0  # seconds in which no connection sent
        self._task = asyncio.create_task(self._run()) if tcp.PACING_SUPPORTED else None

    def add(self, connection: Paced) -> None:
        """Start to watch a connection."""
        self._watched[connection] = _ConnectionState()

    def remove(self, connection: Paced) -> None:
        """Stop watching a connection."""
        self._watched.pop(connection, None)

    def wake(self) -> None:
        """Resume sampling, because a connection sends."""
        self._busy.set()

    async def close(self) -> None:
        """Stop sampling for good."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        """Sample until cancelled. After an error, unpace all connections, so that none keeps an old rate."""
        while True:
            try:
                await self._watch()
            except Exception as error:
                _log.error("pacing failed", reason=repr(error))
                self.uplink = rates.UplinkEstimate()
                for connection, state in self._watched.items():
                    state.given_bytes_per_second = math.inf
                    tcp.set_pacing_rate(connection.sock, math.inf)
                await asyncio.sleep(_AFTER_A_FAULT)

    async def _watch(self) -> None:
        while True:
            await self._busy.wait()
            self._busy.clear()
            for state in self._watched.values():
                state.last_info = None
            self._begin_window()
            self._quiet, sampled_at = 0.0, self._clock.monotonic()
            while self._quiet < IDLE_SECONDS:
                await asyncio.sleep(self._window_seconds() / SAMPLES_PER_WINDOW)
                now = self._clock.monotonic()
                self._sample(now - sampled_at)
                sampled_at = now

    def _sample(self, seconds: float) -> None:
        """Take a sample, `seconds` after the last one; at the end of a window, update the estimates."""
        known = any(state.last_info is not None for state in self._watched.values())
        was_steady = self._is_steady
        self._quiet = 0.0 if self._read(seconds) else self._quiet + seconds
        # before the first estimate, early samples count too
        begins = self._is_steady and not was_steady and self.uplink.started
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
        """Return whether all data that is acknowledged from now on was sent at a full rate."""
        return any(state.streak >= SETTLING_SAMPLES for state in self._watched.values())

    def _begin_window(self) -> None:
        self._seconds, self._samples = 0.0, 0
        for state in self._watched.values():
            state.delivered = state.backlogged_samples = state.receiver_limited_samples = 0
            state.steady = _SteadySample()

    def _read(self, seconds: float) -> bool:
        """Read TCP_INFO of all connections and return whether any of them sends."""
        sends = changes = False
        for connection, state in self._watched.items():
            now = tcp.info(connection.sock)
            state.near = now is not None and 0 < now.min_rtt_seconds < LOCAL_RTT_SECONDS
            if now is None or now.min_rtt_seconds < LOCAL_RTT_SECONDS:
                changes |= state.sends  # earlier samples showed that the connection is far
                state.sends, state.streak = False, 0
                continue
            before, state.last_info, state.far = state.last_info, now, True
            if before is None:
                continue
            delivered = now.delivered_since(before)
            state.delivered += delivered
            if state.streak >= SETTLING_SAMPLES:
                state.steady.samples += 1
                state.steady.seconds += seconds
                state.steady.delivered += delivered
                state.steady.allowed_bytes += state.given_before * seconds
            state.given_before = state.given_bytes_per_second
            state.streak = state.streak + 1 if now.unsent_bytes else 0
            state.backlogged_samples += now.unsent_bytes > 0
            state.receiver_limited_samples += now.receiver_limited_seconds > before.receiver_limited_seconds
            moves = now.unsent_bytes > 0 or delivered > IDLE_BYTES_PER_SECOND * seconds
            sends |= moves
            before_that, state.sends = state.sends, now.unsent_bytes > 0
            # the share of a connection that has finished goes to the others at once
            changes |= state.sends != before_that
        if changes:
            self._set_rates()
        return sends

    def _update_estimates(self, seconds: float) -> None:
        sent = {
            connection: rates.WindowSample(
                state.delivered,
                backlogged=state.steady.samples >= SAMPLES_PER_WINDOW
                and 2 * state.receiver_limited_samples < SAMPLES_PER_WINDOW,
                busy=min(1.0, state.backlogged_samples / SAMPLES_PER_WINDOW),
            )
            for connection, state in self._watched.items()
            if state.last_info is not None
        }
        busy = _far_ends(connection for connection, figures in sent.items() if figures.backlogged)
        known = self.uplink.started  # until then, a slow connection may still be starting
        is_link_bound = len(busy) > 1 or len(_far_ends(self._watched)) == 1
        allowed = sum(state.steady.allowed_bytes for state in self._watched.values()) / seconds
        fits = (
            min(1.0, self.uplink.bytes_per_second / allowed) if known and allowed else 1.0
        )  # a probe's rates may be more than the link carries
        self.uplink = self.uplink.observe(seconds, tuple(sent.values()), is_link_bound=is_link_bound)
        for connection, figures in sent.items():
            state, steady = self._watched[connection], self._watched[connection].steady
            if known and steady.seconds >= seconds / 2:
                given = fits * steady.allowed_bytes / steady.seconds
                state.path = state.path.observe(steady.seconds, replace(figures, delivered=steady.delivered), given)
            else:
                state.path = state.path.observe(seconds, replace(figures, backlogged=False), math.inf)
        self._set_rates()

    def _set_rates(self) -> None:
        """Set the rate of every connection: a sender gets its share, an idle one the share of one more sender.

        If none sends, each peer counts as one sender: an exchange uses one connection in each direction at a time.
        """
        far = {connection: state for connection, state in self._watched.items() if state.far}
        senders = {connection: state.path.limit_bytes_per_second for connection, state in far.items() if state.sends}
        given = rates.fair_shares(self.uplink.budget_bytes_per_second, senders)
        beginners = len(senders) + 1 if senders else max(1, len(_far_ends(far)))
        others = max(self.uplink.budget_bytes_per_second / beginners, rates.MIN_BYTES_PER_SECOND)
        for connection, state in far.items():
            rate = given.get(connection, others)
            if rate != state.given_bytes_per_second:
                state.given_bytes_per_second = rate
                tcp.set_pacing_rate(connection.sock, rate)

    @property
    def uplink_bytes_per_second(self) -> float:
        """The measured rate of the uplink, at least 1; 0 while it is unknown."""
        return max(self.uplink.bytes_per_second, 1.0) if math.isfinite(self.uplink.bytes_per_second) else 0.0

    def bytes_per_second_to(self, peer_id: str) -> float:
        """Measured rate to a peer that is the only receiver. Infinite for a peer on the local network. 0: unknown."""
        if any(state.near for connection, state in self._watched.items() if connection.peer_id == peer_id):
            return math.inf
        paths = [state.path for connection, state in self._watched.items() if connection.peer_id == peer_id]
        return min(self.uplink_bytes_per_second, max((path.bytes_per_second for path in paths), default=math.inf))

    def path_limits_bytes_per_second(self) -> dict[str, float]:
        """Measured rates to the peers whose path is slower than this node's uplink."""
        found: dict[str, float] = {}
        for connection, state in self._watched.items():
            if math.isfinite(state.path.limit_bytes_per_second):
                found[connection.peer_id] = max(found.get(connection.peer_id, 0.0), state.path.last_bytes_per_second)
        return found

    def _window_seconds(self) -> float:
        round_trip = max(
            (state.last_info.min_rtt_seconds for state in self._watched.values() if state.last_info), default=0.0
        )
        senders = max(1, sum(state.sends for state in self._watched.values()))
        filled = min(
            WINDOW_BYTES * senders / max(self.uplink.bytes_per_second, rates.MIN_BYTES_PER_SECOND), SLOW_WINDOW_SECONDS
        )
        return min(max(MIN_WINDOW_SECONDS, WINDOW_ROUND_TRIPS * round_trip, filled), MAX_WINDOW_SECONDS)


def _far_ends(connections: Iterable[Paced]) -> set[str]:
    """Return the peers of these connections.

    p2pd's connections, known by IP address only, count only if there are no others: they mostly lead to the same peers.
    """
    known = {connection.peer_id for connection in connections}
    return {peer for peer in known if not is_ip_address(peer)} or known
