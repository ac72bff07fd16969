"""hivemind's DHT for a member that is measured beside ours; in hivemind's own environment."""

from __future__ import annotations

from typing import Any

import hivemind


class HivemindDht:
    """A member's DHT, from when it first meets the others."""

    dht: hivemind.DHT | None = None

    def __init__(self, address: str) -> None:
        """`address`: of its host in the lab."""
        self._address = address

    def connect(self, contacts: list[Any]) -> list[str]:
        """Start, where the first of those known is whom it asks; returns where it is."""
        if self.dht is None:
            self.dht = hivemind.DHT(
                host_maddrs=[f"/ip4/{self._address}/tcp/0"],
                initial_peers=contacts[0] or [],
                use_auto_relay=False,
                start=True,
            )
        return [str(address) for address in self.dht.get_visible_maddrs()]
