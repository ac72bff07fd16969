"""While a majority of the seats lives and can talk, no commit is long in coming, whatever the others do.

The bound is three times the deadline that applies, which is what one attempt may take by the policy's ceilings:

    open_timeout       until the next in the order opens, where the one before it is silent
    ready_timeout      Open → Ready of every member that is worth waiting for
    exchange_timeout   Start → the parts
    decision_timeout   Settle → Commit

Three, because one attempt may be under way with a member that dies in it; its opener, or one that the quorum hears and
that does not hear the quorum, may take a second one with it; and the third is the quorum's own.
"""

import pytest
from support.commit_gaps import GapMeter, lasting_faults
from support.machine_plans import POLICY
from support.machine_world import World

DEADLINE = sum(
    timeout.total_seconds()
    for timeout in (POLICY.open_timeout, POLICY.ready_timeout, POLICY.exchange_timeout, POLICY.decision_timeout)
)
BOUND = 3 * DEADLINE


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_no_gap_is_longer_than_three_deadlines(first, record_property):
    gaps = [lasting_faults(seed) for seed in range(first, first + 10)]
    longest = max(gaps, key=lambda gap: gap.seconds)
    record_property("longest", str(longest))
    assert longest.seconds <= BOUND, longest
    assert sum(gap.rounds for gap in gaps) > 100
    assert longest.seconds > 0


def test_the_meter_sees_a_majority_that_commits_nothing():
    world = World(3, seed=1)
    meter = GapMeter(world)
    world.run(20)
    quick = meter.longest
    world.network.drop = lambda *_: True  # nobody is told that, and all could talk
    world.run(2 * BOUND)
    assert quick < DEADLINE
    assert meter.longest > BOUND


@pytest.mark.parametrize("fault", ["killed", "frozen", "one way"])
def test_the_meter_does_not_count_time_without_a_majority(fault):
    world = World(3, seed=1)
    meter = GapMeter(world)
    world.run(20)
    first, second, third = world.peers
    for peer in (second, third):
        if fault == "killed":
            world.kill(peer)
        elif fault == "frozen":
            world.freeze(peer)
        else:
            world.network.deaf |= {(first, peer), (peer, second if peer == third else third)}
    before = world.rounds()
    world.run(2 * BOUND)
    assert world.rounds() <= before + 1
    assert meter.longest < DEADLINE


@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("hears", [True, False], ids=["it hears all", "all hear it"])
def test_rounds_go_on_though_the_opener_speaks_or_hears_only_one_way(size, hears):
    world = World(size, seed=size)
    world.run(20)
    opener = world.nodes[world.peers[0]].machine.openers[0]
    others = [peer for peer in world.peers if peer != opener]
    world.network.deaf = {(opener, peer) if hears else (peer, opener) for peer in others}
    meter, before = GapMeter(world), world.rounds()
    world.run(200)
    assert world.rounds() > before + 10
    assert meter.longest <= BOUND


@pytest.mark.parametrize("seed", range(3))
def test_a_member_that_fetches_for_as_long_as_many_rounds_holds_nobody_up_and_comes_back(seed):
    world = World(4, seed)
    world.run(20)
    world.fetch_seconds = lambda: 25.0
    slow = world.peers[1]
    world.freeze(slow)
    world.run(15)
    world.thaw(slow)
    meter, before = GapMeter(world), world.rounds()
    world.run(100)
    assert any(peer == slow for peer, _ in world.caught_up)
    assert world.rounds() > before + 10
    assert meter.longest <= DEADLINE
    world.fetch_seconds = lambda: 1.0
    assert world.run(200, until=lambda: slow in world.committed[world.rounds()].present)
