"""Traffic accounting and limits: every byte to and from peers is counted here and, if the owner asks, slowed down.

A `RateLimiter` hands out time slots in the order of requests. Senders request one small piece at a time, so that
concurrent senders take turns. Small frames (votes, hellos, requests) are charged but do not wait behind bulk data,
because a late vote costs a round. DHT calls are counted and not slowed. The overhead of libp2p, TLS and TCP, about 3 to
7 %, is not counted.

The owner's monthly allowance is enforced here too. Once it is spent, no frame with a body (a part, a slice of state) is
sent or accepted on any stream. Frames without a body (votes, heads, hellos) still pass.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from atoll.core.clock import Clock
from atoll.core.errors import Busy
from atoll.core.frames import Buffer

SMALL_FRAME_BYTES = 4 * 1024
_PIECE_SECONDS = 0.05  # how long one stream may use the whole rate before another stream's turn
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 4 * 1024, 256 * 1024
_BURST_SECONDS = 0.1  # how many seconds of the rate an idle limiter accumulates
DOWNLINK_WINDOW_SECONDS = 2.0
DOWNLINK_MEMORY_SECONDS = 3600.0


class RateLimiter:
    """The rate limit of one direction, and its reserved slots."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bytes_per_second = 0.0
        self._reserved_until = 0.0  # monotonic time at which the last reserved slot ends

    @property
    def bytes_per_second(self) -> float:
        """The limit; 0 means none."""
        return self._bytes_per_second

    @property
    def limited(self) -> bool:
        return self._bytes_per_second > 0

    def set_rate(self, bytes_per_second: float) -> None:
        """Use another rate from now on, 0 for none. Slots that were reserved at the old rate are dropped."""
        if bytes_per_second != self._bytes_per_second:
            self._bytes_per_second, self._reserved_until = bytes_per_second, self._clock.monotonic()

    def slot_start(self, count: int, *, small: bool) -> float:
        """Reserve a slot for `count` bytes and return the monotonic time at which it begins.

        A `small` frame is charged but may pass at once.
        """
        now = self._clock.monotonic()
        if not self.limited:
            return now
        begins = max(self._reserved_until, now - _BURST_SECONDS)
        self._reserved_until = begins + count / self._bytes_per_second
        return now if small else begins

    def cancel_slot(self, count: int) -> None:
        """Return `count` reserved bytes that will not be sent or received."""
        if self.limited:
            self._reserved_until -= count / self._bytes_per_second

    async def sleep_until(self, slot_start: float) -> None:
        """Wait until a slot begins."""
        if (seconds := slot_start - self._clock.monotonic()) > 0:
            await asyncio.sleep(seconds)

    async def wait(self, count: int, *, small: bool) -> None:
        """Wait until `count` more bytes may be sent or received."""
        await self.sleep_until(self.slot_start(count, small=small))

    def pieces(self, buffers: Iterable[Buffer], max_bytes: int) -> Iterator[Buffer]:
        """Split buffers into pieces of one turn each; without a limit, into pieces of at most `max_bytes`."""
        size = max_bytes
        if self.limited:
            turn = int(max(_MIN_PIECE_BYTES, self._bytes_per_second * _PIECE_SECONDS))
            size = min(size, turn, _MAX_PIECE_BYTES)
        for buffer in buffers:
            if len(buffer) > size:
                view = memoryview(buffer)
                yield from (view[start : start + size] for start in range(0, len(view), size))
            else:
                yield buffer


class DownlinkEstimate:
    """A lower bound of this node's download rate, from all peers together. Pure: the caller passes the time.

    A node cannot measure its downlink alone, and peers send only when they have data. So this takes the second-best
    window of two seconds of the last hour. It ignores the best window, because data that waited while this process
    stood still arrives in one window. It ignores the largest piece of each window, because most of it may have arrived
    before the window began.
    """

    def __init__(self) -> None:
        self._window_start = float("-inf")
        self._bytes = self._largest_piece = 0
        most = int(DOWNLINK_MEMORY_SECONDS / DOWNLINK_WINDOW_SECONDS)
        self._windows: deque[tuple[float, float]] = deque(maxlen=most)  # start, bytes per second

    def record(self, count: int, now: float) -> None:
        """Count bytes that were read at once."""
        if now - self._window_start >= DOWNLINK_WINDOW_SECONDS:
            self._end_window()
            self._window_start, self._bytes, self._largest_piece = now, 0, 0
        self._bytes += count
        self._largest_piece = max(self._largest_piece, count)

    def bytes_per_second(self, now: float) -> float:
        """Return the estimate; 0 if almost nothing came."""
        if now - self._window_start >= DOWNLINK_WINDOW_SECONDS:
            self._end_window()
            self._bytes = self._largest_piece = 0
        rates = sorted(rate for start, rate in self._windows if now - start <= DOWNLINK_MEMORY_SECONDS)
        return rates[-2] if len(rates) > 1 else 0.0

    def _end_window(self) -> None:
        rate = (self._bytes - self._largest_piece) / DOWNLINK_WINDOW_SECONDS
        if rate > 0:
            self._windows.append((self._window_start, rate))


class Traffic:
    """The byte counters and rate limiters of one host."""

    def __init__(self, clock: Clock) -> None:
        self.sent: Counter[str] = Counter()  # bytes by protocol
        self.received: Counter[str] = Counter()
        self.up, self.down = RateLimiter(clock), RateLimiter(clock)
        self.bulk_send_callbacks: list[Callable[[], None]] = []  # called when more than a small frame is sent
        self._clock = clock
        self._downlink = DownlinkEstimate()
        self._allowed_total = math.inf

    @property
    def bytes_total(self) -> int:
        """Bytes sent and received so far."""
        return self.sent.total() + self.received.total()

    @property
    def downlink_bytes_per_second(self) -> float:
        """Highest recent rate on direct connections from all peers together; 0 if almost nothing came."""
        return self._downlink.bytes_per_second(self._clock.monotonic())

    def count_sent(self, protocol: str, count: int) -> None:
        """Count bytes that were handed to p2pd or to the kernel."""
        self.sent[protocol] += count
        if count > SMALL_FRAME_BYTES:
            for tell in self.bulk_send_callbacks:
                tell()

    def count_arrived(self, count: int) -> None:
        """Count bytes that arrived on a direct connection, read or not."""
        self._downlink.record(count, self._clock.monotonic())

    def limit(self, upload_bytes_per_second: float, download_bytes_per_second: float) -> None:
        """Set both rates; 0 removes a limit."""
        self.up.set_rate(upload_bytes_per_second)
        self.down.set_rate(download_bytes_per_second)

    def set_remaining_bytes(self, more_bytes: float) -> None:
        """Let frames with a body pass until `more_bytes` more bytes are counted, sent and received together."""
        self._allowed_total = self.bytes_total + more_bytes

    def check_allowance(self, body_bytes: int) -> None:
        """Raise `Busy` for a frame with a body when the allowance is spent."""
        if body_bytes and self.bytes_total >= self._allowed_total:
            raise Busy("this node's monthly traffic allowance is spent; ask another member")
