"""Where nodes hold some layers each, a run goes on from the newest round that all layers are left of."""

from __future__ import annotations

import pytest
from unit.coordinator.routed import LAYERS, RoutedWorld
from unit.coordinator.world import RUN, hash_of, round_report

from atoll.coordinator.runs import departure, recovery
from atoll.core.errors import InvalidRequest, InvalidTransition
from atoll.core.quorum import COORDINATOR
from atoll.v1 import membership_pb2 as mb
from atoll.v1 import plan_pb2

STAGES = ("ann", "bob")


@pytest.fixture
def pair() -> RoutedWorld:
    return pair_of_stages()


def pair_of_stages() -> RoutedWorld:
    """A route of two stages after twelve rounds."""
    world = RoutedWorld()
    world.begin(ann=6, bob=6)
    for _ in range(12):
        go_on(world)
    return world


def go_on(world: RoutedWorld) -> None:
    run, commits = world.run, world.state.memory[RUN].committed
    report = round_report(
        run.head_round + 1,
        commits[run.head_round].manifest_hash,
        [world.identities[name] for name in STAGES],
        committed_before=run.committed_tokens,
        layers=LAYERS,
        fragments=2,
        epoch=world.plan.base.since_version,
    )
    for name in STAGES:
        world.heads[name] = (report.round.number, hash_of(report))
    world.say(STAGES[0], rounds=[report])
    world.say(STAGES[1])


def hash_at(world: RoutedWorld, number: int) -> bytes:
    return world.state.memory[RUN].committed[number].manifest_hash


def tell(world: RoutedWorld, name: str, *rounds: int, span: tuple[int, int] | None = None) -> None:
    """That a node has checkpoints of its layers."""
    first, last = span or world.spans()[name]
    held = [
        mb.CheckpointInfo(
            round=number, manifest_hash=hash_at(world, number), bytes=1, layers=plan_pb2.Span(first=first, last=last)
        )
        for number in rounds
    ]
    world.say(name, checkpoints=held, checkpoints_changed=True)


def power_cut(world: RoutedWorld, **back_to: int) -> None:
    """Each is back with a checkpoint of that round; who is behind says that nobody has its layers any more."""
    for name, number in back_to.items():
        world.heads[name] = (number, hash_at(world, number))
        if number < max(back_to.values()):
            first, last = world.spans()[name]
            world.lost[name] = list(range(first, last + 1))
        world.say(name)


def test_after_a_power_cut_the_newest_complete_round_is_recovered(pair: RoutedWorld) -> None:
    before = pair.spans()
    tell(pair, "ann", 12, 8, 4)
    tell(pair, "bob", 10, 8, 4)
    power_cut(pair, ann=12, bob=10)
    pair.wait(pair.policy.lost_layers_seconds - 1)
    assert pair.plan.version == 1  # perhaps they are found yet
    pair.wait(3)
    assert pair.plan.base.round == 8
    assert pair.plan.base.manifest_hash == hash_at(pair, 8)
    assert pair.plan.base.seats == (*pair.plan.members, COORDINATOR)
    assert pair.spans() == before
    assert pair.run.head_round == 8
    (told,) = pair.told("run.recovered")
    assert "rounds 9 to 12 are void" in told


def test_when_all_nodes_are_behind_their_common_round_is_recovered(pair: RoutedWorld) -> None:
    tell(pair, "ann", 11, 7)
    tell(pair, "bob", 9, 7)
    for name, number in (("ann", 11), ("bob", 9)):
        pair.heads[name] = (number, hash_at(pair, number))
        pair.say(name)
    pair.wait(pair.policy.recover_seconds + 2)
    assert pair.plan.base.round == 7


def test_layers_that_another_holder_has_are_not_lost(pair: RoutedWorld) -> None:
    pair.cards(whale=12)
    pair.wait(5)
    assert pair.spans()["whale"] == (0, LAYERS - 1)
    version = pair.plan.version
    pair.heads["whale"] = pair.heads["ann"]
    pair.say("whale")
    tell(pair, "ann", 8)
    tell(pair, "bob", 8)
    power_cut(pair, ann=12, bob=8)
    pair.wait(2 * pair.policy.lost_layers_seconds)
    assert pair.plan.version == version


def test_no_recovery_starts_while_an_absent_node_may_hold_the_layers(pair: RoutedWorld) -> None:
    tell(pair, "ann", 8)
    tell(pair, "bob", 8)
    power_cut(pair, ann=12, bob=8)
    pair.wait(pair.policy.lost_layers_seconds / 2)
    pair.hang_up("ann")
    pair.wait(pair.policy.lost_after_seconds - 2)
    assert pair.plan.base.round == 0


def test_a_node_that_finds_its_layers_cancels_the_recovery(pair: RoutedWorld) -> None:
    tell(pair, "ann", 8)
    tell(pair, "bob", 8)
    power_cut(pair, ann=12, bob=8)
    pair.wait(pair.policy.lost_layers_seconds / 2)
    pair.lost.clear()
    pair.heads["bob"] = pair.heads["ann"]
    pair.say("bob")
    pair.wait(2 * pair.policy.lost_layers_seconds)
    assert pair.plan.version == 1


def test_without_a_complete_round_no_recovery_starts_and_the_operator_is_refused(pair: RoutedWorld) -> None:
    tell(pair, "ann", 12, 9)
    tell(pair, "bob", 10, 8)
    power_cut(pair, ann=12, bob=10)
    pair.wait(2 * pair.policy.lost_layers_seconds)
    assert pair.plan.version == 1
    with pytest.raises(InvalidTransition, match="hold a complete state"):
        recovery.recover(pair.state, pair.now, RUN, force=True)


def test_one_claim_of_the_newest_round_stops_no_recovery(pair: RoutedWorld) -> None:
    """The layers are lost: whoever says that it has a checkpoint of that round has none that helps."""
    tell(pair, "ann", 12, 8)
    tell(pair, "bob", 12, 8)
    power_cut(pair, ann=12, bob=8)
    pair.wait(pair.policy.lost_layers_seconds + 3)
    assert pair.plan.base.round == 8


def test_if_the_recovered_round_is_lost_an_older_one_is_recovered(pair: RoutedWorld) -> None:
    tell(pair, "ann", 12, 8, 4)
    tell(pair, "bob", 10, 8, 4)
    power_cut(pair, ann=12, bob=10)
    pair.wait(pair.policy.lost_layers_seconds + 3)
    assert pair.plan.base.round == 8
    pair.lost["bob"] = [pair.spans()["bob"][0]]
    pair.say("bob")
    pair.wait(pair.policy.lost_layers_seconds + 3)
    assert pair.plan.base.round == 4


def test_checkpoints_of_nodes_outside_the_plan_do_not_count(pair: RoutedWorld) -> None:
    """Nobody would ask it."""
    pair.cards(spare=2)
    pair.wait(3)
    tell(pair, "ann", 12, 4)
    tell(pair, "bob", 10, 4)
    tell(pair, "spare", 8, span=(0, LAYERS - 1))
    power_cut(pair, ann=12, bob=10)
    pair.wait(pair.policy.lost_layers_seconds + 3)
    assert pair.plan.base.round == 4


def test_recovery_waits_for_absent_members_of_the_newest_round(pair: RoutedWorld) -> None:
    pair.cards(spare=6)
    pair.wait(3)
    for name in STAGES:
        tell(pair, name, 8)
    away = "bob"
    span = pair.spans()[away]
    pair.hang_up(away)
    pair.wait(pair.policy.lost_after_seconds + 4)
    assert pair.spans()["spare"] == span
    pair.lost["spare"] = list(range(span[0], span[1] + 1))
    pair.heads["spare"] = (8, hash_at(pair, 8))
    tell(pair, "spare", 8)
    pair.wait(3 * pair.policy.lost_layers_seconds)
    assert pair.plan.base.round == 0
    pair.take(departure.leave(pair.state, pair.now, pair.identities[away].peer_id, ""))  # for good
    pair.wait(pair.policy.lost_layers_seconds + 3)
    assert pair.plan.base.round == 8


@pytest.mark.parametrize("span", [(0, LAYERS), (7, 6), (0, 2**32 - 1)])
def test_checkpoints_with_invalid_layers_are_rejected(pair: RoutedWorld, span: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest):
        tell(pair, "ann", 8, span=span)


def test_more_lost_layers_than_there_are_are_refused(pair: RoutedWorld) -> None:
    pair.lost["ann"] = [1] * (LAYERS + 1)
    with pytest.raises(InvalidRequest):
        pair.say("ann")


def test_a_node_that_catches_up_may_hold_layers_of_an_earlier_plan() -> None:
    """Both say round 11, of which the layers of one are nowhere: only what lies on disks with its layers counts."""
    world = pair_of_stages()
    world.wait(1)
    first, second = (world.spans()[name] for name in ("ann", "bob"))
    tell(world, "ann", 11, 8)
    held = [
        mb.CheckpointInfo(
            round=number, manifest_hash=hash_at(world, number), bytes=1, layers=plan_pb2.Span(first=a, last=b)
        )
        for number, (a, b) in ((11, first), (8, second))
    ]
    world.say("bob", checkpoints=held, checkpoints_changed=True)
    for name in ("ann", "bob"):
        world.heads[name] = (11, hash_at(world, 11))
        world.say(name, mb.NODE_STATE_CATCHING_UP)
    world.wait(world.policy.recover_seconds + 3)
    assert world.plan.base.round == 8
