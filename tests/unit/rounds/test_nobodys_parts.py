"""A round that lost every part is tried again: a commit would count everybody's training and take none of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support import machine_world
from support.machine_plans import POLICY, make_plan
from support.machine_world import World

from atoll.core.errors import PeerMisbehaved
from atoll.core.plan import Plan
from atoll.core.round_id import RoundId
from atoll.node.exchange.codecs import CODECS
from atoll.node.rounds import types as rt
from atoll.node.rounds.decide import build_start, check_settle, parts_total
from atoll.v1 import dataplane_pb2 as dp


@pytest.mark.parametrize("size", [2, 4])
def test_a_round_of_which_nobody_has_any_part_spends_nothing(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one member sums all parts, as where only one can be dialled, and dies while others wait for them."""

    def one_reducer(members: list[str], **rest: Any) -> Plan:
        plan = make_plan(members, **rest)
        share = {peer: 1 if peer == "p0" else 0 for peer in members}
        assigned = tuple(replace(it, max_reduce_bytes_per_second=share[it.peer_id]) for it in plan.assignments)
        return replace(plan, assignments=assigned)

    monkeypatch.setattr(machine_world, "make_plan", one_reducer)
    world = World(size, seed=1, first=["p1"])
    waiting = world.nodes["p1"].machine

    def sums() -> bool:
        following = waiting._attendance.following
        return following is not None and following.phase is rt.Phase.EXCHANGING and following.opener != "p0"

    assert world.run(60, until=lambda: world.rounds() >= 1)
    assert world.run(60, until=sums)
    before = world.rounds()
    world.kill("p0")
    assert world.run(60, until=lambda: world.rounds() > before)
    after = [head.manifest for number, head in world.committed.items() if number > before]
    assert all(manifest.parts_zeroed < manifest.parts_total for manifest in after)
    assert all(item.peer_id != "p0" for manifest in after for item in manifest.contributions)
    assert any("nobody has any part" in report.reason for report in world.reports if report.manifest is None)


def test_exchanges_in_which_nobody_had_the_time_for_any_part_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that grew slow fails again and again else."""
    world = World(3, seed=1)
    assert world.run(200, until=lambda: world.rounds() >= 12)

    def nothing(_round: RoundId, _peer: str, start: dp.Start) -> tuple[tuple[bytes, ...], tuple[()]]:
        return (b"",) * parts_total(start), ()

    def timeout_seconds() -> float:
        paces = [node.machine._at.paces_by_fragment[0] for node in world.nodes.values()]
        return sum(it.exchange(CODECS["int4"].number).timeout_seconds for it in paces)

    before, failed = timeout_seconds(), len(world.reports)
    monkeypatch.setattr(world._exchanges, "parts", nothing)
    assert world.run(200, until=lambda: len(world.reports) >= failed + 6)
    assert "nobody has any part" in world.reports[-1].reason
    assert timeout_seconds() > before


def test_a_settle_that_gives_up_everything_is_refused() -> None:
    ready = {peer: dp.Ready(tokens=100, samples=10) for peer in ("p0", "p1")}
    plan = make_plan(["p0", "p1"])
    number = RoundId("r", 1, 1, 0, 0)
    start = build_start(POLICY, plan, number, ready, codec=CODECS["int4"], unix_ms=0, exchange_seconds=5)
    total = parts_total(start)
    settle = dp.Settle(present=[it.peer_id for it in start.contributions], digests=[b""] * total, parts_zeroed=total)
    for holds_parts in (True, False):
        with pytest.raises(PeerMisbehaved, match="gives up every part"):
            check_settle(start, settle, holds_parts=holds_parts)
    settle.digests[0] = bytes(32)
    with pytest.raises(PeerMisbehaved, match="gives up every part"):
        check_settle(start, settle, holds_parts=True)
    settle.parts_zeroed = max(0, total - 2)
    with pytest.raises(PeerMisbehaved, match="miscounts"):
        check_settle(start, settle, holds_parts=True)
    settle.parts_zeroed = total - 1
    check_settle(start, settle, holds_parts=True)
