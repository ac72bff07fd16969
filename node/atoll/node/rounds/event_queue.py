"""The queue of events for the round machine: any number of this node's own, and a limited number from each peer.

A peer that sends more has to wait, and so do its streams. Other peers do not wait.
"""

from __future__ import annotations

import asyncio

from atoll.node.rounds.types import Event

PLACES = 4  # of each peer; a parsed message takes thirty times its size


class EventQueue:
    """A queue of events in the order of arrival."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[tuple[Event, asyncio.Semaphore | None]] = asyncio.Queue()
        self._places: dict[str, asyncio.Semaphore] = {}
        self._closed = False

    def put(self, event: Event) -> None:
        """Queue an event of this node."""
        self._events.put_nowait((event, None))

    async def put_from(self, peer: str, event: Event) -> None:
        """Queue an event of a peer. Returns when there was room for it, or when the queue is closed."""
        places = self._places.setdefault(peer, asyncio.Semaphore(PLACES))
        await places.acquire()
        if self._closed:
            places.release()  # for the next waiting task
        else:
            self._events.put_nowait((event, places))

    async def get(self) -> Event:
        """The next event. Its place becomes free."""
        event, places = await self._events.get()
        if places is not None:
            places.release()
        return event

    def close(self) -> None:
        """Stop taking events. Waiting senders return, and their events are lost."""
        self._closed = True
        for places in self._places.values():
            places.release()
