"""A round's layers follow the plan's cuts: what was shown for other layers must not stand in the way for ever."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.machine_plans import make_plan
from support.machine_world import World

from atoll.node.rounds import types as rt
from atoll.v1 import dataplane_pb2 as dp

REPLICAS, ROUTE = ("p0", "p1"), ("p2", "p3")
ROUTES = [[("p0", 0, 2)], [("p1", 0, 2)], [("p2", 0, 1), ("p3", 2, 2)]]


def exchanging(world: World) -> Callable[[], bool]:
    """Whether the replicas are in an exchange of the route's cut, and the route's driver leads it."""

    def there() -> bool:
        following = [world.nodes[peer].machine._attendance.following for peer in REPLICAS]
        return all(it is not None and it.phase is rt.Phase.EXCHANGING and it.opener == ROUTE[0] for it in following)

    return there


def plan_the_rest(world: World) -> None:
    """The route is gone, and with it the cut."""
    for peer in ROUTE:
        world.kill(peer)
    world.issue(make_plan(list(REPLICAS), 2, world.plan.base), list(REPLICAS))


def test_replicas_average_on_when_a_route_leaves_in_the_middle_of_its_round() -> None:
    world = World(4, seed=0, routes=ROUTES, first=[ROUTE[0]])
    world.run(8)
    assert world.run(120, until=exchanging(world))
    head = world.nodes[REPLICAS[0]].machine.head.round
    world.kill(ROUTE[0])
    world.at(1.5, plan_the_rest, world)
    world.run(200)
    assert world.nodes[REPLICAS[0]].machine.head.round > head + 1


@pytest.mark.parametrize("voted", [False, True])
def test_what_others_committed_is_not_brought_again(voted: bool) -> None:
    """The replicas do not hear that it is committed, and the cut goes; who voted keeps what it trained since."""
    world = World(4, seed=0, routes=ROUTES, first=[ROUTE[0]])
    world.run(8)
    assert world.run(120, until=exchanging(world))
    one, deciding = world.nodes[REPLICAS[0]], world.nodes[REPLICAS[0]].machine.head.round + 1

    def lose(sender: str, to: str, message: dp.RoundMessage) -> bool:
        kind = message.WhichOneof("body")
        return kind == "commit" or (kind == "settle" and to == one.peer and not voted)

    def decided() -> bool:
        said = [bool(world.nodes[peer].machine.in_doubt) for peer in REPLICAS]
        return deciding in world.committed and said == [voted, True]

    world.network.drop = lose
    assert world.run(20, until=decided)
    plan_the_rest(world)
    world.network.drop = lambda *_: False
    installed: list[rt.Counted] = []
    install = world._install

    def watch(node, head, counted) -> None:
        if (node.peer, head.round) == (one.peer, deciding):
            installed.append(counted)
        install(node, head, counted)

    world._install = watch  # type: ignore[method-assign]
    world.run(200)
    assert installed == ([rt.Counted.SNAPSHOT] if voted else [])  # else it fetches that state
    assert one.machine.head.round > deciding + 1


def test_a_vote_that_decided_nothing_does_not_stand_in_the_way_of_the_only_holder() -> None:
    """One alone heard Settle and voted, its vote is lost, and under the next plan nobody else holds anything."""
    world = World(3, seed=0, routes=[[("p0", 0, 2)], [("p1", 0, 1), ("p2", 2, 2)]], first=["p2"])
    world.run(8)
    one = world.nodes["p0"]

    def lose(sender: str, to: str, message: dp.RoundMessage) -> bool:
        kind = message.WhichOneof("body")
        return kind == "commit" or (kind == "settle" and to != "p0") or (kind == "digest" and sender == "p0")

    def voted() -> bool:
        following = one.machine._attendance.following
        waits = following is not None and following.phase is rt.Phase.AWAITING_COMMIT
        return waits and following.opener == "p2" and not following.is_witness

    world.network.drop = lose
    assert world.run(200, until=voted)
    head = one.machine.head.round
    world.issue(make_plan(["p0", "p1", "p2"], 2, world.plan.base, [[("p0", 0, 2)]]))
    world.network.drop = lambda *_: False
    assert world.run(300, until=lambda: one.machine.head.round > head + 1)
