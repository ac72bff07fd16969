"""This node's identity in a run, and its network to the other members."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.clock import Clock
from atoll.core.identity import Identity
from atoll.core.run_spec import RunSpec
from atoll.node.wire.transport import Network


@dataclass(frozen=True)
class RunMember:
    """What every part of the rounds needs to know of its own node."""

    identity: Identity
    spec: RunSpec
    operator_key: bytes
    network: Network
    clock: Clock

    @property
    def peer_id(self) -> str:
        """This node's peer id."""
        return self.identity.peer_id
