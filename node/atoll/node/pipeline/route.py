"""A node's place on a route of its plan. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.errors import NotPermitted
from atoll.core.plan import Plan


@dataclass(frozen=True)
class RoutePlace:
    """One stage of one route."""

    plan_version: int  # the plan that introduced the route
    route: int  # number of the route in that plan
    peers: tuple[str, ...]  # peer ids in the order of the stages
    stage: int  # this node's stage, from 0

    @classmethod
    def of(cls, plan: Plan, peer_id: str) -> RoutePlace | None:
        """Find a node's place in a plan; None if it is on no route or is a replica."""
        for number, peers in enumerate(plan.routes):
            if peer_id in peers and len(peers) > 1:
                return cls(*plan.name_of(number), peers, peers.index(peer_id))
        return None

    @property
    def stages(self) -> int:
        return len(self.peers)

    @property
    def route_key(self) -> tuple[int, int]:
        """Plan version and route number, which identify the route in messages together with its incarnation."""
        return self.plan_version, self.route

    def stage_of(self, peer_id: str) -> int:
        """Stage of a peer. Raises `NotPermitted` for a peer that is not on the route."""
        if peer_id not in self.peers:
            raise NotPermitted(f"{peer_id} is not on route {self.route} of plan {self.plan_version}")
        return self.peers.index(peer_id)
