"""Where a node stands on a route of its plan. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from atoll.core.errors import NotPermitted
from atoll.core.plan import Plan


@dataclass(frozen=True)
class RoutePlace:
    """One stage of one route."""

    plan_version: int  # that the route began under
    route: int  # its number among the routes of that plan
    peers: tuple[str, ...]  # in the order of the stages
    stage: int  # ours

    @classmethod
    def of(cls, plan: Plan, peer_id: str) -> RoutePlace | None:
        """Where the plan has a node; None when it stands on no route, or holds all layers by itself."""
        for number, peers in enumerate(plan.routes):
            if peer_id in peers and len(peers) > 1:
                return cls(*plan.name_of(number), peers, peers.index(peer_id))
        return None

    @property
    def stages(self) -> int:
        return len(self.peers)

    @property
    def name(self) -> tuple[int, int]:
        """What messages call the route, but for its incarnation."""
        return self.plan_version, self.route

    def stage_of(self, peer_id: str) -> int:
        """Raises `NotPermitted` for a peer that is not on the route."""
        if peer_id not in self.peers:
            raise NotPermitted(f"{peer_id} is not on route {self.route} of plan {self.plan_version}")
        return self.peers.index(peer_id)
