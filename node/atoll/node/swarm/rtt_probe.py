"""PathProber: measures round-trip times to other members; the coordinator plans with them.

A probe sends four small frames that the peer echoes, and the shortest time counts: queues make a round trip longer, and
nothing makes it shorter. A node measures up to 16 members, chosen by a hash of both peer ids, so that a large swarm is
measured evenly and sparsely. In a small swarm every member measures every other. The rate of a path comes from real
traffic (`direct/pacer.py`) and is reported only if the path is slower than the sender's uplink.
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
REMEASURE_AFTER = timedelta(minutes=2)
_ECHOES_PER_PROBE = 4
_MAX_ECHOES_PER_STREAM = 16  # the handler answers no more
_ECHO_TIMEOUT = timedelta(seconds=10)
_PROBE_TIMEOUT = timedelta(seconds=15)  # for all echoes of a probe
_PROBE_INTERVAL = timedelta(seconds=1)  # bounds the traffic of a node's probes

_log = log.get("probe")


@dataclass(frozen=True)
class PeerRtt:
    """The round-trip time to one member."""

    rtt_seconds: float
    at: float  # monotonic seconds


def peers_to_measure(me: str, members: Collection[str], most: int = MAX_PEERS) -> tuple[str, ...]:
    """Choose the members that `me` measures: the first `most` by the hash of both peer ids."""

    def place(peer: str) -> bytes:
        return hashlib.sha256(f"{me}/{peer}".encode()).digest()

    return tuple(sorted(set(members) - {me}, key=place)[:most])


def next_peer(peers: Collection[str], tried: Mapping[str, float], now: float) -> str | None:
    """Choose the peer to measure next: one never tried, or the one tried longest ago, at least two minutes."""
    waiting = [peer for peer in peers if now - tried.get(peer, float("-inf")) >= REMEASURE_AFTER.total_seconds()]
    return min(waiting, key=lambda peer: (tried.get(peer, float("-inf")), peer), default=None)


class PathProber:
    """Probes members and answers their probes. `members` returns the current members."""

    def __init__(self, network: Network, members: Callable[[], Collection[str]], clock: Clock) -> None:
        self.rtts: dict[str, PeerRtt] = {}
        self._network, self._members, self._clock = network, members, clock
        self._tried: dict[str, float] = {}
        network.handle(PROTOCOL, self._answer)

    async def run(self) -> None:
        """Probe until cancelled. A member that does not answer keeps its last measurement and is tried again later."""
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
            _log.debug("probe failed", peer=peer, reason=str(error))
        else:
            self.rtts[peer] = PeerRtt(rtt, self._clock.monotonic())

    async def _probe(self, peer: str) -> float:
        """Return the shortest echo time in seconds. Raises `Unreachable`, `PeerMisbehaved`."""
        stream = await self._network.open(peer, PROTOCOL, _ECHO_TIMEOUT)
        try:
            return min([await self._echo(stream) for _ in range(_ECHOES_PER_PROBE)])
        finally:
            await stream.close()

    async def _echo(self, stream: Stream) -> float:
        sent = os.urandom(ECHO_BYTES)  # random, so that a peer cannot answer in advance
        began = self._clock.monotonic()
        await stream.send(FrameKind.MESSAGE, sent)
        answer = await stream.receive(_ECHO_TIMEOUT)
        took = self._clock.monotonic() - began
        if answer.header != sent:
            raise PeerMisbehaved("the answer to a probe has other bytes than the probe")
        return took

    async def _answer(self, stream: Stream) -> None:
        for _ in range(_MAX_ECHOES_PER_STREAM):
            try:
                frame = await stream.receive(_ECHO_TIMEOUT)
            except Unreachable:
                return
            if len(frame.header) != ECHO_BYTES or frame.body:
                raise PeerMisbehaved(
                    f"a probe frame has a header of {len(frame.header)} bytes (must be {ECHO_BYTES}) and a body of "
                    f"{len(frame.body)} bytes (must be 0)"
                )
            await stream.send(FrameKind.MESSAGE, frame.header)
