"""Waiting for a peer's next frame, fairly: it is the peer that must have been silent, not this node asleep.

A wait is cut into slices. When this process stood still (SIGSTOP, a suspended laptop, a busy machine) only the slice
that it stood still in is lost; what arrived meanwhile is taken in the next.
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
    """The next frame. Raises `DeadlineExceeded` when none came, `FrameInvalid`, and `Unreachable` for every other end.

    From half of the patience on, `should_give_up` may end it. What a peer says when it refuses us is its own view; it
    does not become a fault of ours or of the peer's.
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
    """Whether `event` is set in time."""
    for _ in range(WAIT_SLICES):
        try:
            async with asyncio.timeout((frame_timeout / WAIT_SLICES).total_seconds()):
                return await event.wait()
        except TimeoutError:
            continue
    return event.is_set()
