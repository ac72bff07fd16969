"""NAT filter: a host behind NAT receives only packets of flows that it opened.

The lab translates no addresses, because every host has a unique one. Peers notice only the filter of a NAT, which this
is. It is the strictest common type (address- and port-dependent, RFC 4787): an answer must come from exactly the
address and port that the host sent to. Ports are preserved, so two such hosts that call each other at the same time do
connect, as hole punching does through most home routers. Some routers use another port for every call (symmetric NAT),
and then hole punching fails: with `hole_punching = false` on either side, no packet that opens a connection is
admitted. Pure: the caller passes the time.
"""

from __future__ import annotations

from atoll.lab.wan.packets import TCP, Flow

TCP_IDLE_SECONDS = 7440.0  # the minimum of RFC 5382: two hours and four minutes
OTHER_IDLE_SECONDS = 60.0  # usual timeout of home routers for UDP and echoes
_SWEEP_SECONDS = 30.0


class FlowTable:
    """Open flows of one host, from its point of view, with the time of last use."""

    def __init__(self) -> None:
        self._last_used: dict[Flow, float] = {}
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return len(self._last_used)

    def sent(self, flow: Flow | None, now: float) -> None:
        """Record a sent packet, which opens its flow."""
        if flow is not None:
            self._last_used[flow] = now
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_SECONDS
            self._last_used = {flow: used for flow, used in self._last_used.items() if _is_open(flow, used, now)}

    def admits(self, flow: Flow | None, now: float) -> bool:
        """Return whether a packet from outside is admitted. An admitted packet keeps its flow open."""
        if flow is None:
            return False
        own = flow.reversed()
        used = self._last_used.get(own)
        if used is None or not _is_open(own, used, now):
            return False
        self._last_used[own] = now
        return True


def _is_open(flow: Flow, used: float, now: float) -> bool:
    return now - used < (TCP_IDLE_SECONDS if flow.protocol == TCP else OTHER_IDLE_SECONDS)
