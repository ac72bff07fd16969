"""A host behind NAT takes no flow that it did not open.

No address is translated: each host has an address that nobody else has, so what remains of NAT is what peers feel, and
that is this filter. It is the strictest common kind (address- and port-dependent, RFC 4787): an answer must come from
exactly the address and port that was called. As ports are kept, two such hosts that call each other at one time do
meet, which is how hole punching works through most home routers. Some give every call another port (symmetric NAT), and
then it does not: with `hole_punching = false` on either side, nothing that opens a connection comes in. Pure: time is
handed in.
"""

from __future__ import annotations

from atoll.lab.wan.packets import TCP, Flow

TCP_IDLE_SECONDS = 7440.0  # RFC 5382 asks for two hours and four minutes at least
OTHER_IDLE_SECONDS = 60.0  # what home routers give UDP and echoes
_SWEEP_SECONDS = 30.0


class FlowTable:
    """The flows that one host opened, as that host sees them, with when each was last used."""

    def __init__(self) -> None:
        self._last_used: dict[Flow, float] = {}
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return len(self._last_used)

    def sent(self, flow: Flow | None, now: float) -> None:
        """The host sends: its flow is open from now on."""
        if flow is not None:
            self._last_used[flow] = now
        if now >= self._next_sweep:
            self._next_sweep = now + _SWEEP_SECONDS
            self._last_used = {flow: used for flow, used in self._last_used.items() if _is_open(flow, used, now)}

    def admits(self, flow: Flow | None, now: float) -> bool:
        """Whether a packet from outside may come in; one that may keeps its flow open."""
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
