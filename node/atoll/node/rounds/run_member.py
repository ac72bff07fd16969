"""Who this node is in a run, and how it reaches the other members."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.clock import Clock
from atoll.core.identity import Identity
from atoll.core.run_spec import RunSpec
from atoll.node.wire.transport import Network


@dataclass(frozen=True)
class RunMember:
    """What everything that takes part in the run's rounds must know of its own node."""

    identity: Identity
    spec: RunSpec
    operator_key: bytes
    network: Network
    clock: Clock

    @property
    def peer_id(self) -> str:
        """How others call this node."""
        return self.identity.peer_id
