"""Where the data stand after a round, and at genesis: drivers that are new get samples that nobody else has."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.machine_plans import GENESIS, POLICY, layers_after, make_plan, policies
from support.second_round import BACK, FRONT, HEAD, PLAN, RESULT, SECOND, WHOLE, committed, made, plan_of

from atoll.core.data_position import DataPosition, advance, goes_on, sample_count
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds.decide import build_start, manifest_payload, position_at
from atoll.node.rounds.types import RoundPolicy
from atoll.v1 import dataplane_pb2 as dp
from atoll.v1 import manifest_pb2


def with_data(plan: Plan, **ranges: tuple[tuple[int, int], ...]) -> Plan:
    given = (replace(item, data_ranges=ranges.get(item.peer_id, ())) for item in plan.assignments)
    return replace(plan, assignments=tuple(given))


def test_at_genesis_the_plan_says_who_holds_which_samples() -> None:
    plan = with_data(PLAN, p0=((10, 20), (40, 60)), p3=((20, 30),))
    assert position_at(GENESIS, plan, 8) == DataPosition(
        60, ((0, 10), (30, 40)), {WHOLE: ((10, 20), (40, 60)), SECOND: ((20, 30),)}
    )
    assert position_at(GENESIS, with_data(PLAN), 8) == DataPosition()


def newcomers(*names: tuple[int, int]) -> Plan:
    """Four routes, of which the last three have these names: of `BACK`, `FRONT` and `SECOND`."""
    plan = plan_of(6, [[(WHOLE, 0, 2)], [(BACK, 0, 2)], [(FRONT, 0, 2)], [(SECOND, 0, 2)]])
    return replace(plan, names=((5, 0), *names), routes_begun=9)


def head_with(data: DataPosition, fragments: int = 1) -> Head:
    manifest = manifest_pb2.Manifest.FromString(RESULT)
    manifest.data.CopyFrom(data.to_proto())
    manifest.fragments = fragments
    return committed(manifest.SerializeToString())


def test_drivers_that_are_new_get_a_first_lease_in_the_order_in_which_their_routes_began() -> None:
    plan = newcomers((6, 1), (6, 0), (5, 2))
    data = DataPosition(1000, ((95, 96),), {WHOLE: ((0, 90),), SECOND: ((90, 95),)})
    after = position_at(head_with(data), plan, 100)
    assert after.holdings == {**data.holdings, FRONT: ((95, 96), (1000, 1099)), BACK: ((1099, 1199),)}
    assert (after.cursor, after.returned) == (1199, ())
    after = position_at(head_with(data), plan, 1)
    assert after.holdings[BACK] == ((1000, 1001),)
    assert position_at(head_with(data), replace(plan, routes=plan.routes[:1], names=plan.names[:1]), 100) == data


def test_a_first_lease_stays_where_it_is_if_a_driver_that_began_before_leaves() -> None:
    plan = newcomers((6, 3), (6, 4), (5, 2))
    data = DataPosition(1000, (), {WHOLE: ((0, 90),), SECOND: ((90, 95),)}, routes_begun=3)
    head = head_with(data)
    before = position_at(head, plan, 100).holdings
    assert before == {**data.holdings, BACK: ((1000, 1100),), FRONT: ((1100, 1200),)}
    left = replace(plan, version=7, routes=(plan.routes[0], *plan.routes[2:]), names=(plan.names[0], *plan.names[2:]))
    assert position_at(head, left, 100).holdings[FRONT] == before[FRONT]


def test_a_driver_that_is_new_holds_samples_after_its_first_round() -> None:
    plan = newcomers((6, 1), (6, 0), (5, 2))
    before = position_at(HEAD, plan, 8).holdings
    _, payload = made(HEAD, plan=plan)
    after = committed(payload).data
    assert sample_count(before[BACK]) > 0
    assert goes_on(before[BACK], 0, after.holdings[BACK])
    assert after.routes_begun == 9


@pytest.mark.parametrize(("fragments", "lease"), [(0, 44), (1, 44), (2, 88), (3, 100)])
def test_a_first_lease_lasts_as_long_as_a_turn_of_all_fragments(fragments: int, lease: int) -> None:
    """Beside nine drivers: four rounds at their mean pace, and never more than a whole round of all."""
    peers = [f"p{number}" for number in range(10)]
    plan = replace(make_plan(peers, 2), names=(*((1, number) for number in range(9)), (2, 9)))
    data = DataPosition(1000, (), dict.fromkeys(peers[:9], ((0, 1),)))
    assert position_at(head_with(data, fragments), plan, 100).holdings["p9"] == ((1000, 1000 + lease),)


def test_the_length_of_an_epoch_goes_from_genesis_into_every_position() -> None:
    manifest = manifest_pb2.Manifest.FromString(GENESIS.committed.payload)
    manifest.data.CopyFrom(DataPosition(epoch_samples=500).to_proto())
    genesis = committed(manifest.SerializeToString())
    position = position_at(genesis, with_data(PLAN, p0=((10, 20),)), 8)
    assert position == DataPosition(20, ((0, 10),), {WHOLE: ((10, 20),)}, epoch_samples=500)
    assert advance(position, [WHOLE], {}, 8).epoch_samples == 500


def test_what_a_round_leaves_follows_the_number_of_cuts() -> None:
    """A member's samples count again after as many rounds as there are spans."""
    peers = [f"p{number}" for number in range(12)]
    routes = [[(peer, 0, 2)] for peer in peers[:-2]] + [[(peers[-2], 0, 1), (peers[-1], 2, 2)]]

    def lease(routes: Any) -> int:
        plan = make_plan(peers, routes=routes)
        policy: RoundPolicy = replace(policies(POLICY)(plan), round_samples=100)
        number = RoundId("r", 1, 0, 1, 0)
        ready = {peer: dp.Ready(tokens=10, samples=1) for peer in peers}
        start = build_start(policy, plan, number, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)
        order = [item.peer_id for item in start.contributions]
        plan = with_data(plan, p0=((0, 1),))
        payload = manifest_payload(
            policy, plan, GENESIS, start, dp.Settle(present=order), layers_after(policy, GENESIS, b"a" * 32)
        )
        return sum(end - start for start, end in committed(payload).data.holdings["p0"])

    assert lease(routes) == 2 * lease([[(peer, 0, 2)] for peer in peers[:-1]])  # it has eleven drivers, too
