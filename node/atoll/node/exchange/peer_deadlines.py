"""Wait for a peer's next frame with a timeout that does not count time in which this process was stopped.

A wait has several slices. A process that stops (SIGSTOP, a suspended laptop, a busy machine) uses up only the current
slice; the next slice receives the frames that arrived meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta

from atoll.core.errors import AtollError, DeadlineExceeded, FrameInvalid, Unreachable
from atoll.core.frames import Frame
from atoll.node.wire.transport import Stream

WAIT_SLICES = 4


def _never() -> bool:
    return False


async def next_frame(stream: Stream, frame_timeout: timedelta, should_give_up: Callable[[], bool] = _never) -> Frame:
    """Receive the next frame. Raises `DeadlineExceeded`, `FrameInvalid`, and `Unreachable` for every other end.

    After half of `frame_timeout`, `should_give_up` may end the wait. A peer's refusal becomes `Unreachable` too: its
    claim is unverified and must not count as a fault of this node or of the peer.
    """
    for slice_number in range(1, WAIT_SLICES + 1):
        try:
            return await stream.receive(frame_timeout / WAIT_SLICES)
        except DeadlineExceeded:
            if 2 * slice_number >= WAIT_SLICES and should_give_up():
                break
        except (FrameInvalid, Unreachable):
            raise
        except AtollError as error:
            raise Unreachable(f"the stream ended: {error}") from error
    raise DeadlineExceeded(f"peer {stream.peer_id} sent nothing within {frame_timeout}")


async def wait_for_event(event: asyncio.Event, frame_timeout: timedelta) -> bool:
    """Wait for `event`; returns whether it was set within `frame_timeout`."""
    for _ in range(WAIT_SLICES):
        try:
            async with asyncio.timeout((frame_timeout / WAIT_SLICES).total_seconds()):
                return await event.wait()
        except TimeoutError:
            continue
    return event.is_set()
