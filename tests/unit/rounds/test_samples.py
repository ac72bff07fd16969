"""Which samples are whose: no two members get the same ones, whatever plans come at one head."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.machine_plans import make_plan

from atoll.core import protocol
from atoll.core.data_position import DataPosition, advance
from atoll.core.manifest import Head
from atoll.core.plan import Plan
from atoll.node.rounds.decide import position_at
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

ROUND = 100
PEERS = [f"p{number}" for number in range(8)]


def head_of(data: DataPosition) -> Head:
    manifest = manifest_pb2.Manifest(
        protocol=protocol.ours(), round=pb.RoundId(run_id="r", number=5, plan_version=1), data=data.to_proto()
    )
    return Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))


def plans_of(joins: list[list[str]], present: list[str]) -> list[Plan]:
    """A plan for each group that joins; routes keep the names with which they began."""
    names = {peer: (1, number) for number, peer in enumerate(present)}
    plans = []
    for version, group in enumerate(joins, 2):
        names |= {peer: (version, number) for number, peer in enumerate(group)}
        plan = make_plan(sorted(names), version)
        plans.append(replace(plan, names=tuple(names[route[0]] for route in plan.routes)))
    return plans


def samples_of(position: DataPosition) -> dict[str, set[int]]:
    return {peer: {n for start, end in ranges for n in range(start, end)} for peer, ranges in position.holdings.items()}


@given(st.permutations(PEERS), st.lists(st.integers(0, 3), max_size=4), st.integers(1, 4))
def test_plans_at_one_head_never_give_a_sample_to_two_members(order, sizes, first):
    present, rest = sorted(order[:first]), order[first:]
    joins = []
    for size in sizes:
        joins.append(rest[:size])
        rest = rest[size:]
    data = DataPosition(1000, ((960, 970),), {peer: ((100 * n, 100 * n + 60),) for n, peer in enumerate(present)})
    head, given_before = head_of(data), samples_of(data)
    for plan in plans_of(joins, present):
        position = position_at(head, plan, ROUND)
        samples = samples_of(position)
        assert all(samples[peer] for peer in plan.drivers)
        assert sum(map(len, samples.values())) == len(set().union(*samples.values()))
        assert all(samples[peer] == before for peer, before in given_before.items())  # nobody trains on others
        assert max(set().union(*samples.values())) < position.cursor
        given_before = samples


def test_who_joins_before_any_round_keeps_its_samples_when_another_joins():
    data = DataPosition(1000, (), {"a": ((0, 400),), "b": ((400, 1000),)})
    one, two = plans_of([["n"], ["c"]], ["a", "b"])
    before, after = (position_at(head_of(data), plan, ROUND).holdings for plan in (one, two))
    assert before["n"] == after["n"] == ((1000, 1100),)
    assert after["c"] == ((1100, 1200),)


def test_what_a_round_consumes_is_given_to_nobody_again():
    data = DataPosition(1000, (), {"a": ((0, 400),), "b": ((400, 1000),)})
    _, plan = plans_of([["n"], ["c"]], ["a", "b"])
    position = position_at(head_of(data), plan, ROUND)
    consumed = {"a": 50, "b": 60, "n": 30, "c": 100}
    after = advance(position, plan.drivers, consumed, ROUND)
    used = {n for peer, ranges in position.holdings.items() for n in list(range(*ranges[0]))[: consumed[peer]]}
    assert not used & set().union(*samples_of(after).values())
