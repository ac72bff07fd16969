"""Traffic shaper: computes when each packet arrives, or why it is dropped. Pure: the caller passes time and packets.

A packet waits in its sender's uplink buffer, crosses the path (half the round trip, jitter, loss), waits in the
receiver's downlink buffer, and arrives. A full buffer drops new packets (drop-tail). Packets between two hosts stay in
order. A packet of many segments is not delayed twice by its size: its first segment crosses while the others are still
being sent.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NamedTuple, cast

from atoll.lab.wan.packets import Packet, without_segments
from atoll.lab.wan.topology import Host, Route, Topology, end_to_end

JITTER_STEP_SECONDS = 0.05  # interval between two random delays within the jitter
_MBIT_BYTES = 1e6 / 8


class Drop(StrEnum):
    """Reason for which a packet did not arrive."""

    UPLINK_FULL = "uplink_full"
    DOWNLINK_FULL = "downlink_full"
    LOST = "lost"
    CUT = "cut"
    NAT = "nat"
    DEVICE_FULL = "device_full"


@dataclass
class LinkCounters:
    """Traffic of a host or a directed pair. Bytes are of IP packets of at most 1500 bytes."""

    sent_bytes: int = 0
    sent_segments: int = 0
    received_bytes: int = 0
    received_segments: int = 0
    dropped_segments: dict[str, int] = field(default_factory=dict)

    def sent(self, packet: Packet) -> None:
        self.sent_bytes += packet.wire_bytes
        self.sent_segments += packet.segments

    def count_received(self, packet: Packet) -> None:
        self.received_bytes += packet.wire_bytes
        self.received_segments += packet.segments

    def dropped(self, why: Drop, segments: int) -> None:
        self.dropped_segments[why] = self.dropped_segments.get(why, 0) + segments


class JitterProcess:
    """A delay between 0 and `amplitude`, linearly interpolated between random values."""

    def __init__(self, amplitude: float, chance: random.Random) -> None:
        self._amplitude = amplitude
        self._chance = chance
        self._since = -math.inf
        self._values = (0.0, 0.0)

    def at(self, now: float) -> float:
        """Return the delay in seconds. `now` must not decrease."""
        if not self._amplitude:
            return 0.0
        passed = now - self._since
        if passed >= JITTER_STEP_SECONDS:
            start = self._values[1] if passed < 2 * JITTER_STEP_SECONDS else self._draw()
            self._values = (start, self._draw())
            self._since = now
            passed = 0.0
        start, end = self._values
        return start + (end - start) * passed / JITTER_STEP_SECONDS

    def _draw(self) -> float:
        return self._chance.uniform(0.0, self._amplitude)


class _Link:
    """A host's access link, with the time at which the buffer of each direction is empty."""

    def __init__(self, host: Host) -> None:
        self.up_free = self.down_free = 0.0
        self.set(host)

    def set(self, host: Host) -> None:
        """Change the link. Packets in its buffers keep their times."""
        self.host = host
        self.up_rate = host.uplink_mbit * _MBIT_BYTES  # bytes per second
        self.down_rate = host.downlink_mbit * _MBIT_BYTES
        self.queue = host.queue_ms / 1000


class _Path:
    """The path from one host to another, without the two access links."""

    def __init__(self, delay: float, jitter: float, loss: float, chance: random.Random) -> None:
        self.delay = delay
        self.wander = JitterProcess(jitter, chance)
        self.last_arrival = -math.inf
        self._loss = loss
        self._chance = chance
        self._good = self._draw()

    def lost(self, segments: int) -> frozenset[int]:
        """Return which of the next segments are lost, independently of each other; numbered from 0."""
        if not self._loss:
            return frozenset()
        lost = set()
        while self._good < segments:
            lost.add(self._good)
            self._good += 1 + self._draw()
        self._good -= segments
        return frozenset(lost)

    def _draw(self) -> int:
        """Draw how many segments pass before the next loss (geometric distribution)."""
        return int(math.log(1.0 - self._chance.random()) / math.log(1.0 - self._loss)) if self._loss else 0


class _Event(NamedTuple):
    """A packet whose first segment reaches a downlink, or that has left it. Ordered by time, then number."""

    at: float
    number: int
    source: str
    target: str
    packet: Packet
    last_arrival: float | None  # arrival of the last segment at the downlink; None: the packet has left it


class Shaper:
    """The network between a topology's hosts. Times are seconds on the caller's clock and must not decrease."""

    def __init__(self, topology: Topology, seed: int = 0) -> None:
        self._topology = topology
        self._chance = random.Random(seed)
        self._links = {host.name: _Link(host) for host in topology.hosts}
        self._routes: dict[frozenset[str], Route] = {}
        self._paths: dict[tuple[str, str], _Path] = {}
        self._events: list[_Event] = []
        self._number = 0
        self._cut: set[str] = set()
        self._group: dict[str, int] = {}
        self.hosts = {host.name: LinkCounters() for host in topology.hosts}
        self.pairs: dict[tuple[str, str], LinkCounters] = {}

    # --- packets -------------------------------------------------------------------------------------

    def send(self, source: str, target: str, packet: Packet, now: float) -> None:
        """Queue a packet on its source's uplink, or drop it."""
        pair = (source, target)
        counters = self.pairs.get(pair) or self.pairs.setdefault(pair, LinkCounters())
        self.hosts[source].sent(packet)
        counters.sent(packet)
        link = self._links[source]
        start = max(now, link.up_free)
        if not self.connected(source, target):
            self._drop(pair, Drop.CUT, packet.segments)
            return
        if start - now > link.queue:
            self._drop(pair, Drop.UPLINK_FULL, packet.segments)
            return
        link.up_free = start + packet.wire_bytes / link.up_rate
        way = self._paths.get(pair) or self._path_between(pair)
        lost = way.lost(packet.segments)
        if lost:
            self._drop(pair, Drop.LOST, len(lost))
        delay = way.delay + way.wander.at(start)
        for piece in without_segments(packet, lost) if lost else (packet,):
            first = max(way.last_arrival, start + piece.first_bytes / link.up_rate + delay)
            last = first + (piece.wire_bytes - piece.first_bytes) / link.up_rate
            way.last_arrival = last
            start += piece.wire_bytes / link.up_rate
            self._push(first, source, target, piece, last)

    def next_event_at(self) -> float:
        """Return the time of the next event for `pop_arrived`; infinity if no packet is in flight."""
        return self._events[0].at if self._events else math.inf

    def pop_arrived(self, now: float) -> list[tuple[str, str, Packet]]:
        """Return the packets (source, target, packet) that have arrived by `now`, in order."""
        arrived = []
        while self._events and self._events[0].at <= now:
            event = heapq.heappop(self._events)
            if not self.connected(event.source, event.target):
                self._drop((event.source, event.target), Drop.CUT, event.packet.segments)
            elif event.last_arrival is None:
                arrived.append((event.source, event.target, event.packet))
            else:
                self._enter_downlink(event, event.last_arrival)
        return arrived

    def count_received(self, source: str, target: str, packet: Packet) -> None:
        """Count a packet that the target's device accepted."""
        self.hosts[target].count_received(packet)
        self.pairs[source, target].count_received(packet)

    def refused(self, source: str, target: str, packet: Packet, why: Drop) -> None:
        """Count a packet that arrived but was refused."""
        self._drop((source, target), why, packet.segments)

    def _enter_downlink(self, event: _Event, last_arrival: float) -> None:
        link, packet = self._links[event.target], event.packet
        waiting = max(0.0, link.down_free - event.at)
        if waiting > link.queue:
            self._drop((event.source, event.target), Drop.DOWNLINK_FULL, packet.segments)
            return
        # The first segment has arrived. No segment leaves before it has arrived.
        alone = event.at + waiting + packet.wire_bytes / link.down_rate
        link.down_free = max(alone, last_arrival + packet.first_bytes / link.down_rate)
        self._push(link.down_free, event.source, event.target, packet, None)

    def _push(self, at: float, source: str, target: str, packet: Packet, last_arrival: float | None) -> None:
        self._number += 1
        heapq.heappush(self._events, _Event(at, self._number, source, target, packet, last_arrival))

    def _drop(self, pair: tuple[str, str], why: Drop, segments: int) -> None:
        self.pairs[pair].dropped(why, segments)
        at_the_target = why in (Drop.DOWNLINK_FULL, Drop.NAT, Drop.DEVICE_FULL)
        self.hosts[pair[at_the_target]].dropped(why, segments)

    def _path_between(self, pair: tuple[str, str]) -> _Path:
        one, other = (self._links[name].host for name in pair)
        route = self._routes.get(frozenset(pair)) or self._topology.route(one, other)
        met = end_to_end(one, other, route)
        old = self._paths.get(pair)
        way = _Path(met.rtt_ms / 2000, met.jitter_ms / 1000, met.loss, self._chance)
        way.last_arrival = old.last_arrival if old else -math.inf
        self._paths[pair] = way
        return way

    # --- changes while it runs ------------------------------------------------------------------------

    def host(self, name: str) -> Host:
        """Return a host with its current settings. Raises `TopologyError`."""
        self._topology.host(name)
        return self._links[name].host

    def set_host(self, name: str, changes: Mapping[str, float]) -> None:
        """Change settings of a host's link for later packets. Raises `TopologyError`."""
        self._links[name].set(replace(self.host(name), **cast(dict[str, Any], changes)))
        self._rebuild_paths(pair for pair in self._paths if name in pair)

    def set_route(self, one: str, other: str, changes: Mapping[str, float]) -> None:
        """Change the route between two hosts. Raises `TopologyError`."""
        ends = frozenset((one, other))
        now = self._routes.get(ends) or self._topology.route(self.host(one), self.host(other))
        self._routes[ends] = replace(now, **changes)
        self._rebuild_paths(pair for pair in self._paths if frozenset(pair) == ends)

    def cut(self, name: str) -> None:
        """Drop all packets to and from a host, including those in flight. Raises `TopologyError`."""
        self._cut.add(self.host(name).name)

    def restore(self, name: str) -> None:
        """Undo `cut`. Raises `TopologyError`."""
        self._cut.discard(self.host(name).name)

    def partition(self, groups: Iterable[Iterable[str]]) -> None:
        """Let only hosts of one group reach each other. Hosts in no group form one more group.

        Replaces an earlier partition. Raises `TopologyError`.
        """
        self._group = {self.host(name).name: number for number, names in enumerate(groups) for name in names}

    def heal(self) -> None:
        """Undo `partition`."""
        self._group = {}

    def connected(self, one: str, other: str) -> bool:
        """Return whether neither a cut nor a partition separates two hosts."""
        if self._cut and (one in self._cut or other in self._cut):
            return False
        return not self._group or self._group.get(one) == self._group.get(other)

    def _rebuild_paths(self, pairs: Iterable[tuple[str, str]]) -> None:
        for pair in tuple(pairs):
            self._path_between(pair)
