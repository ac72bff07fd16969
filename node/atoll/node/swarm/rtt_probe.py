"""How far other members are, measured all the time and told to the coordinator, which plans by it.

A probe is a few small frames there and back, and the least of their times counts: whatever waits on the way makes a
round trip longer and nothing makes it shorter. A node measures the few members that are its own by a hash of both
names, so that a large swarm is measured evenly and sparsely; in a small one everybody measures everybody. How fast a
path is, is learnt from what travels on it anyway (`direct/pacer.py`): only a path that is slower than the sender's
uplink is worth a figure.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta

from atoll.core import log
from atoll.core.clock import Clock
from atoll.core.errors import AtollError, PeerMisbehaved, Unreachable
from atoll.core.frames import FrameKind
from atoll.node.wire.transport import Network, Stream

PROTOCOL = "/atoll/probe/1"
ECHO_BYTES = 16
MAX_PEERS = 16  # that one node measures
REMEASURE_AFTER = timedelta(minutes=2)  # a measurement is renewed after that
_ECHOES_PER_PROBE = 4  # of one probe
_MAX_ECHOES_PER_STREAM = 16  # that one stream is answered
_ECHO_TIMEOUT = timedelta(seconds=10)
_PROBE_TIMEOUT = timedelta(seconds=15)  # all of one
_PROBE_INTERVAL = timedelta(seconds=1)  # between two probes: nothing of ours is a flood

_log = log.get("probe")


@dataclass(frozen=True)
class PeerRtt:
    """One member's distance."""

    rtt_seconds: float
    at: float  # monotonic


def peers_to_measure(me: str, members: Collection[str], most: int = MAX_PEERS) -> tuple[str, ...]:
    """Whom `me` measures: the `most` members whose names, hashed together with ours, come first."""

    def place(peer: str) -> bytes:
        return hashlib.sha256(f"{me}/{peer}".encode()).digest()

    return tuple(sorted(set(members) - {me}, key=place)[:most])


def next_peer(peers: Collection[str], tried: Mapping[str, float], now: float) -> str | None:
    """Who is to be measured next: who never was, then whose turn was longest ago and is over."""
    waiting = [peer for peer in peers if now - tried.get(peer, float("-inf")) >= REMEASURE_AFTER.total_seconds()]
    return min(waiting, key=lambda peer: (tried.get(peer, float("-inf")), peer), default=None)


class PathProber:
    """Measures our members and answers theirs. `members` says who there is now."""

    def __init__(self, network: Network, members: Callable[[], Collection[str]], clock: Clock) -> None:
        self.rtts: dict[str, PeerRtt] = {}
        self._network, self._members, self._clock = network, members, clock
        self._tried: dict[str, float] = {}
        network.handle(PROTOCOL, self._answer)

    async def run(self) -> None:
        """Until cancelled. A member that does not answer keeps what was measured last, and its turn comes again."""
        while True:
            peers = peers_to_measure(self._network.peer_id, self._members())
            self.rtts = {peer: time for peer, time in self.rtts.items() if peer in peers}
            peer = next_peer(peers, self._tried, self._clock.monotonic())
            if peer is not None:
                self._tried[peer] = self._clock.monotonic()
                await self._measure(peer)
            await asyncio.sleep(_PROBE_INTERVAL.total_seconds())

    async def _measure(self, peer: str) -> None:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT.total_seconds()):
                rtt = await self._probe(peer)
        except (AtollError, TimeoutError) as error:
            _log.debug("not measured", peer=peer, reason=str(error))
        else:
            self.rtts[peer] = PeerRtt(rtt, self._clock.monotonic())

    async def _probe(self, peer: str) -> float:
        """Seconds of the shortest echo. Raises `Unreachable`, `PeerMisbehaved`."""
        stream = await self._network.open(peer, PROTOCOL, _ECHO_TIMEOUT)
        try:
            return min([await self._echo(stream) for _ in range(_ECHOES_PER_PROBE)])
        finally:
            await stream.close()

    async def _echo(self, stream: Stream) -> float:
        sent = os.urandom(ECHO_BYTES)  # nobody answers before it was asked
        began = self._clock.monotonic()
        await stream.send(FrameKind.MESSAGE, sent)
        answer = await stream.receive(_ECHO_TIMEOUT)
        took = self._clock.monotonic() - began
        if answer.header != sent:
            raise PeerMisbehaved("a probe was answered with other bytes than it sent")
        return took

    async def _answer(self, stream: Stream) -> None:
        for _ in range(_MAX_ECHOES_PER_STREAM):
            try:
                frame = await stream.receive(_ECHO_TIMEOUT)
            except Unreachable:
                return
            if len(frame.header) != ECHO_BYTES or frame.body:
                raise PeerMisbehaved(f"a probe has {ECHO_BYTES} bytes")
            await stream.send(FrameKind.MESSAGE, frame.header)
