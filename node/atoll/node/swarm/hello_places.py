"""HelloPlaces: bounds on the hellos of strangers in progress at once, and on their number a second.

A peer id costs an attacker nothing, so a place that is taken in silence must not be lost to newcomers. When places are
short, the newest hello takes the place of an earlier one that has not been admitted: the oldest from the address that
holds the most. A member's hello arrives within a round trip and is admitted at once, so only silent and invalid hellos
lose their places. A peer that lost its place gets no new one for a second while places are short. Members that this
node has admitted, or knows by their address records, take no place.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from atoll.core.clock import Clock

MAX_AT_ONCE = 256  # each costs a descriptor and 4 KiB
MAX_AT_ONCE_PER_PEER = 2
HELLOS_PER_SECOND = 200.0  # verified per second; one verification takes 0.2 ms
BURST = 400.0
PAUSE_SECONDS = 1.0  # after a peer lost its place
_MAX_REMEMBERED = 4096
_IP4, _IP4_BYTES = 0x04, 4  # multiaddr codes, and the number of address bytes that identify a host
_IP6, _IP6_BYTES = 0x29, 8  # one host has a network of 64 bits


@dataclass(eq=False)
class Place:
    """A hello in progress. `abort` ends its stream."""

    peer_id: str
    host: bytes
    abort: Callable[[], None]
    counts: bool  # whether it counts against the bounds: the peer was not admitted when it came, or is not yet


class HelloPlaces:
    """Places of hellos in progress, by peer and by host."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._places: OrderedDict[Place, None] = OrderedDict()  # of strangers, oldest first
        self._by_peer: Counter[str] = Counter()
        self._by_host: Counter[bytes] = Counter()  # of strangers
        self._lost: OrderedDict[str, float] = OrderedDict()  # peers that lost a place, and when
        self._tokens = BURST
        self._filled = clock.monotonic()

    def take(self, peer_id: str, address: bytes, *, known: bool, abort: Callable[[], None]) -> Place | None:
        """Take a place, or return None if this peer gets none; after a place, `leave` must follow.

        `known`: a member.
        """
        if self._by_peer[peer_id] >= MAX_AT_ONCE_PER_PEER:
            return None
        if not known and len(self._places) >= MAX_AT_ONCE:
            if self._lost_recently(peer_id):
                return None
            self._evict()
        place = Place(peer_id, host_of(address), abort, counts=not known)
        self._by_peer[peer_id] += 1
        if place.counts:
            self._places[place] = None
            self._by_host[place.host] += 1
        return place

    def may_verify(self, place: Place) -> bool:
        """Return whether a hello that has arrived may be verified now; this consumes a token of the rate limit."""
        if not place.counts:
            return True
        now = self._clock.monotonic()
        self._tokens = min(BURST, self._tokens + (now - self._filled) * HELLOS_PER_SECOND)
        self._filled = now
        if self._tokens < 1 or (self._tokens < BURST / 2 and self._lost_recently(place.peer_id)):
            return False
        self._tokens -= 1
        return True

    def admitted(self, place: Place) -> None:
        """Record that the peer is a member: its hello can no longer lose its place."""
        self._free(place)
        self._lost.pop(place.peer_id, None)

    def leave(self, place: Place) -> None:
        """Give the place back."""
        if place.counts:
            self._remember(place.peer_id)
        self._free(place)
        self._by_peer[place.peer_id] -= 1
        self._by_peer += Counter()  # drop peers without places

    def _evict(self) -> None:
        host = max(self._by_host, key=self._by_host.__getitem__)
        oldest = next(place for place in self._places if place.host == host)
        self._remember(oldest.peer_id)
        self._free(oldest)
        oldest.abort()

    def _free(self, place: Place) -> None:
        if place.counts:
            place.counts = False
            del self._places[place]
            self._by_host[place.host] -= 1
            self._by_host += Counter()  # drop hosts without places

    def _remember(self, peer_id: str) -> None:
        self._lost.pop(peer_id, None)
        self._lost[peer_id] = self._clock.monotonic()
        if len(self._lost) > _MAX_REMEMBERED:
            self._lost.popitem(last=False)

    def _lost_recently(self, peer_id: str) -> bool:
        return self._clock.monotonic() - self._lost.get(peer_id, float("-inf")) < PAUSE_SECONDS


def host_of(address: bytes) -> bytes:
    """Return the part of a peer's binary multiaddr that identifies its host; all of it without an IP address."""
    length = {_IP4: _IP4_BYTES, _IP6: _IP6_BYTES}.get(address[0] if address else 0)
    return address if length is None else address[: 1 + length]
