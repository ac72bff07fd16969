"""What the round machine has yet to hear: events of our own as they come, and of each peer as many as it has places.

A peer that says more than is taken has to wait, and its streams with it. Nobody else does.
"""

from __future__ import annotations

import asyncio

from atoll.node.rounds.types import Event

PLACES = 4  # of each peer; a word takes thirty times its size when it is parsed


class EventQueue:
    """A queue of events, in the order in which they came in."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[tuple[Event, asyncio.Semaphore | None]] = asyncio.Queue()
        self._places: dict[str, asyncio.Semaphore] = {}
        self._closed = False

    def put(self, event: Event) -> None:
        """An event of our own."""
        self._events.put_nowait((event, None))

    async def put_from(self, peer: str, event: Event) -> None:
        """What a peer said or did; returns when there was room for it, or when nobody takes events any more."""
        places = self._places.setdefault(peer, asyncio.Semaphore(PLACES))
        await places.acquire()
        if self._closed:
            places.release()  # for the next one who waits
        else:
            self._events.put_nowait((event, places))

    async def get(self) -> Event:
        """The next event; its place is free again."""
        event, places = await self._events.get()
        if places is not None:
            places.release()
        return event

    def close(self) -> None:
        """No event is taken any more: who waits goes on, and what it says is lost."""
        self._closed = True
        for places in self._places.values():
            places.release()
