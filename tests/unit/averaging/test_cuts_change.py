"""A round's layers follow the plan's cuts: what was shown for other layers must not stand in the way for ever."""

from __future__ import annotations

import pytest
from support.machine_plans import GENESIS, make_plan
from support.machine_world import World

from atoll.core.plan import Base
from atoll.node.averaging import round_types as rt

REPLICAS, ROUTE = ("p0", "p1"), ("p2", "p3")
ROUTES = [[("p0", 0, 2)], [("p1", 0, 2)], [("p2", 0, 1), ("p3", 2, 2)]]


@pytest.mark.xfail(
    strict=True,
    reason="replicas that were in an exchange of some layers may bring nothing else at that head; where a plan without "
    "that cut follows within seconds, and the opener is gone, nobody has anything to bring",
)
def test_replicas_average_on_when_a_route_leaves_in_the_middle_of_its_round() -> None:
    world = World(4, seed=0, routes=ROUTES)
    world.run(8)

    def exchanging() -> bool:
        following = [world.nodes[peer].machine._following for peer in REPLICAS]
        return all(it is not None and it.phase is rt.Phase.EXCHANGING and it.opener == ROUTE[0] for it in following)

    for _ in range(6000):
        world.run(0.02)
        if exchanging():
            break
    head = world.nodes[REPLICAS[0]].machine.head.round
    world.kill(ROUTE[0])

    def plan_the_rest() -> None:
        world.kill(ROUTE[1])
        base = Base(GENESIS.hash, (*REPLICAS, *ROUTE))
        world.issue(make_plan(list(REPLICAS), 2, base), list(REPLICAS))

    world.at(1.5, plan_the_rest)
    world.run(200)
    assert world.nodes[REPLICAS[0]].machine.head.round > head + 1
