"""The one place where bytes to and from peers are counted and, where the owner wants it, slowed down.

A line hands out slots of time in the order of asking. Senders ask for a small piece at a time, so those that are busy
at once take turns. Small frames (votes, hellos, questions) are charged but do not wait behind bulk: a late vote costs a
round. The DHT's calls are counted and not slowed. What libp2p, TLS and TCP add, about 3 to 7 %, is not seen here.

The owner's monthly allowance ends here too: once it is spent, no frame with a body (a part, a slice of state) is sent
or taken on any stream. Frames without one, votes, heads and hellos, still pass.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from atoll.core.clock import Clock
from atoll.core.errors import Busy
from atoll.core.frames import Buffer
from atoll.node.wire.downlink import Downlink

SMALL_FRAME_BYTES = 4 * 1024
_PIECE_SECONDS = 0.05  # how long one stream may have the line before the next one's turn
_MIN_PIECE_BYTES, _MAX_PIECE_BYTES = 4 * 1024, 256 * 1024
_BURST_SECONDS = 0.1  # what an idle line saves up


class RateLimiter:
    """One direction: a rate, and what of it is promised already."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._bytes_per_second = 0.0
        self._reserved_until = 0.0  # when all that was promised will have passed

    @property
    def bytes_per_second(self) -> float:
        """0: no limit."""
        return self._bytes_per_second

    @property
    def limited(self) -> bool:
        return self._bytes_per_second > 0

    def set_rate(self, bytes_per_second: float) -> None:
        """Another rate from now on, 0 for none; what was promised at the old one is forgotten."""
        if bytes_per_second != self._bytes_per_second:
            self._bytes_per_second, self._reserved_until = bytes_per_second, self._clock.monotonic()

    def slot_start(self, count: int, *, small: bool) -> float:
        """Reserve a slot for `count` bytes; the monotonic time at which it begins. What is small may go at once."""
        now = self._clock.monotonic()
        if not self.limited:
            return now
        begins = max(self._reserved_until, now - _BURST_SECONDS)
        self._reserved_until = begins + count / self._bytes_per_second
        return now if small else begins

    def cancel_slot(self, count: int) -> None:
        """Bytes of a slot that will not pass."""
        if self.limited:
            self._reserved_until -= count / self._bytes_per_second

    async def sleep_until(self, slot_start: float) -> None:
        """Return when that slot begins."""
        if (seconds := slot_start - self._clock.monotonic()) > 0:
            await asyncio.sleep(seconds)

    async def wait(self, count: int, *, small: bool) -> None:
        """Return when `count` more bytes may pass."""
        await self.sleep_until(self.slot_start(count, small=small))

    def pieces(self, buffers: Iterable[Buffer]) -> Iterator[Buffer]:
        """The same bytes in pieces of one turn each; as they are without a limit."""
        size = int(min(_MAX_PIECE_BYTES, max(_MIN_PIECE_BYTES, self._bytes_per_second * _PIECE_SECONDS)))
        for buffer in buffers:
            if self.limited and len(buffer) > size:
                view = memoryview(buffer)
                yield from (view[start : start + size] for start in range(0, len(view), size))
            else:
                yield buffer


class Traffic:
    """Counters and lines of one host."""

    def __init__(self, clock: Clock) -> None:
        self.sent: Counter[str] = Counter()  # bytes by protocol
        self.received: Counter[str] = Counter()
        self.up, self.down = RateLimiter(clock), RateLimiter(clock)
        self.bulk_send_callbacks: list[Callable[[], None]] = []  # told when more than a small frame is sent
        self._clock = clock
        self._downlink = Downlink()
        self._allowed_total = math.inf

    @property
    def bytes_total(self) -> int:
        """Both ways, so far."""
        return self.sent.total() + self.received.total()

    @property
    def downlink_bytes_per_second(self) -> float:
        """The most that came in lately on direct connections, of all peers together; 0: next to nothing did."""
        return self._downlink.bytes_per_second(self._clock.monotonic())

    def count_sent(self, protocol: str, count: int) -> None:
        """So many bytes are handed on, to p2pd or the kernel."""
        self.sent[protocol] += count
        if count > SMALL_FRAME_BYTES:
            for tell in self.bulk_send_callbacks:
                tell()

    def count_arrived(self, count: int) -> None:
        """So many bytes are here, read or not."""
        self._downlink.record(count, self._clock.monotonic())

    def limit(self, upload_bytes_per_second: float, download_bytes_per_second: float) -> None:
        """Change the rates; 0 lifts a limit."""
        self.up.set_rate(upload_bytes_per_second)
        self.down.set_rate(download_bytes_per_second)

    def set_remaining_bytes(self, more_bytes: float) -> None:
        """Bodies may pass until that many bytes more were counted, both ways."""
        self._allowed_total = self.bytes_total + more_bytes

    def check_allowance(self, body_bytes: int) -> None:
        """Raise `Busy` for a frame with a body when the allowance is spent."""
        if body_bytes and self.bytes_total >= self._allowed_total:
            raise Busy("this month's traffic is spent here; ask somebody else")
