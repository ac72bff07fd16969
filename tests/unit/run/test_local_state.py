"""What a node of a few layers holds, after a cut and after its run went back to an earlier round."""

import asyncio
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import cast

import pytest
import torch
from support.donors import ANN, BOB, CLEO, GENESIS, OFFSETS, OPERATOR, DonorSwarm, commit, history, plan_of, state_of

from atoll.core.clock import SystemClock
from atoll.core.errors import Unreachable
from atoll.core.membership import MembershipVerifier
from atoll.core.run_spec import parse_run_spec
from atoll.node.control.directives import Directives
from atoll.node.run.local_state import LocalState, StateSources
from atoll.node.state.anchor import AnchorState
from atoll.node.state.checkpoint import CheckpointState, CheckpointStore
from atoll.node.state.checkpoint_writer import CheckpointWriter
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.tensor_file import LayerLayout
from atoll.node.trainer.trainer import Trainer
from atoll.v1 import plan_pb2

SPEC = parse_run_spec(
    'version = 1\n[run]\nname = "r"\nstop_tokens = 1000\n[data]\npath = "corpus"\n[sync]\nround_tokens = 100\n'
)
TABLE = plan_pb2.LayerTable(
    layers=[plan_pb2.LayerInfo(name=f"layer.{i}", parameters=OFFSETS[i + 1] - OFFSETS[i]) for i in range(4)]
)
VOTERS = [ANN, BOB, CLEO]
STATES = {number: state_of(float(number)) for number in (1, 2, 3)}
HEADS = {1: commit(STATES[1], 1, VOTERS, after=GENESIS)}
HEADS[2] = commit(STATES[2], 2, VOTERS, after=HEADS[1])
HEADS[3] = commit(STATES[3], 3, VOTERS, after=HEADS[2])
PLAN = plan_of(*VOTERS)
OURS, THEIRS = range(2, 4), range(2)


def part(number: int, layers: range) -> AnchorState:
    whole, own = STATES[number], slice(OFFSETS[layers.start], OFFSETS[layers.stop])
    return AnchorState(whole.anchor_E[own].clone(), OFFSETS, layers, whole.momentum_E[own].clone())


@dataclass
class Facts:
    layers: plan_pb2.LayerTable = field(default_factory=lambda: TABLE)
    layer_offsets: tuple[int, ...] = OFFSETS
    held_layers: range = OURS


class Device:
    """Where a trainer would keep its anchor."""

    def __init__(self, layers: range = OURS) -> None:
        self.facts = Facts(held_layers=layers)
        self.anchor = torch.full((OFFSETS[layers.stop] - OFFSETS[layers.start],), torch.nan)


class Node:
    def __init__(self, folder, *rounds: int) -> None:
        """One whose last process wrote checkpoints of these rounds."""
        self.donor_swarm = DonorSwarm(folder / "reef")
        self.store = CheckpointStore(folder / "checkpoints", SPEC, keep=3)
        for number in rounds:
            it = part(number, OURS)
            self.store.write(CheckpointState(HEADS[number], LayerLayout.of(TABLE, OURS), it.anchor_E, it.momentum_E))
        self.directives = Directives(cast(MembershipVerifier, None), lambda *_: None, lambda _: None, folder / "plan")
        self.holdings = LocalState(
            StateSources(
                self.donor_swarm.network,
                "r",
                folder,
                OPERATOR.public_key,
                ManifestStore(folder / "manifests", "r"),
                CheckpointWriter(self.store, timedelta(seconds=60), SystemClock()),
                self.directives,
                self.directives.wake,
            )
        )

    async def load(self) -> Device:
        device = Device()
        await self.holdings.hold(cast(Trainer, device))
        return device

    def holds(self, number: int) -> bool:
        state, true = self.holdings.state, part(number, OURS)
        return torch.equal(state.anchor_E, true.anchor_E) and torch.equal(state.momentum_E, true.momentum_E)


@pytest.fixture
async def make(tmp_path):
    made = []

    def node(*rounds: int) -> Node:
        made.append(Node(tmp_path, *rounds))
        return made[-1]

    yield node
    for item in made:
        await item.donor_swarm.hub.close()


async def test_a_node_that_came_back_behind_fetches_what_others_have(make):
    node = make(1)
    for donor in (ANN, BOB):
        node.donor_swarm.serve(donor, history(HEADS[1], HEADS[2]), STATES[2])
    await node.load()
    assert node.holds(1)
    assert (await node.holdings.synchronise(PLAN)).round == 2
    assert node.holds(2)
    assert not node.holdings.lost


async def test_layers_that_nobody_has_as_they_are_now_are_called_lost(make):
    node = make(1)
    for donor in (ANN, BOB):
        node.donor_swarm.serve(donor, history(HEADS[1], HEADS[2]), part(2, THEIRS))
    await node.load()
    with pytest.raises(Unreachable):
        await node.holdings.synchronise(PLAN)
    assert node.holdings.lost == {3}  # the other has no parameters


async def test_when_the_run_goes_back_each_takes_its_own_checkpoint_of_that_round(make):
    """Nobody else holds these layers."""
    node = make(1, 3)
    for donor in (ANN, BOB):
        node.donor_swarm.serve(donor, history(HEADS[1]), part(1, THEIRS))
    await node.load()
    assert node.holds(3)
    back = plan_of(*VOTERS, version=2, base=HEADS[1])
    assert (await node.holdings.synchronise(back)).round == 1
    assert node.holds(1)
    assert node.holdings.checkpoint_state().head.hash == HEADS[1].hash
    assert not node.holdings.lost


async def test_without_a_checkpoint_of_that_round_it_is_fetched(make):
    node = make(3)
    for donor in (ANN, BOB):
        node.donor_swarm.serve(donor, history(HEADS[1]), STATES[1])
    await node.load()
    back = plan_of(*VOTERS, version=2, base=HEADS[1])
    assert (await node.holdings.synchronise(back)).round == 1
    assert node.holds(1)


def follow(node: Node) -> asyncio.Task[None]:
    return asyncio.create_task(node.holdings.prefetcher.run())


async def test_a_spare_with_an_old_checkpoint_is_not_prepared_before_it_has_what_is_true_now(make):
    """As a node that was drained, and comes back."""
    node = make(1)
    for donor in (ANN, BOB):
        node.donor_swarm.serve(donor, history(HEADS[1], HEADS[2], HEADS[3]), STATES[3])
    await node.load()
    node.directives.plan = plan_of(ANN, BOB, seats=VOTERS)
    prefetcher, running = node.holdings.prefetcher, follow(node)
    node.directives.prepare = OURS
    node.directives.wake()
    async with asyncio.timeout(60):
        await node.directives.until(lambda: prefetcher.span == OURS)
    assert prefetcher.round == 3
    assert prefetcher.held
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_what_was_prepared_is_taken_over_whatever_head_the_node_has(make):
    """Who held the layers is gone by then."""
    node = make(1)
    holdings = [node.donor_swarm.serve(donor, history(HEADS[1], HEADS[2], HEADS[3]), STATES[3]) for donor in (ANN, BOB)]
    await node.load()
    node.directives.plan = plan_of(ANN, BOB, seats=VOTERS)
    prefetcher, running = node.holdings.prefetcher, follow(node)
    node.directives.prepare = OURS
    node.directives.wake()
    async with asyncio.timeout(60):
        await node.directives.until(lambda: prefetcher.span == OURS)
    for holding in holdings:
        holding.state = part(3, THEIRS)
    node.directives.plan = replace(plan_of(ANN, BOB, CLEO, version=2, seats=VOTERS), base=PLAN.base)
    node.directives.prepare = range(0)
    node.directives.wake()
    bodies = sum(node.donor_swarm.bodies.values())
    assert (await node.holdings.synchronise(node.directives.plan)).round == 3
    assert node.holds(3)
    assert not node.holdings.lost
    assert sum(node.donor_swarm.bodies.values()) == bodies
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_when_nobody_answers_nothing_is_called_lost(make):
    node = make(1)
    await node.load()
    back = plan_of(*VOTERS, version=2, base=HEADS[3])
    with pytest.raises(Unreachable):
        await node.holdings.synchronise(back)
    assert not node.holdings.lost


async def test_a_former_member_is_asked_for_bytes_and_not_for_its_word(make):
    node = make(1)
    node.donor_swarm.serve(ANN, history(HEADS[1], HEADS[2]), part(2, THEIRS))
    node.donor_swarm.serve(BOB, history(HEADS[1], HEADS[2]), STATES[2])
    await node.load()
    plan = replace(plan_of(ANN, CLEO, version=2, seats=VOTERS), base=PLAN.base)
    with pytest.raises(Unreachable):
        await node.holdings.synchronise(plan)
    assert node.holdings.lost
    assert (await node.holdings.synchronise(replace(plan, former=(BOB.peer_id,)))).round == 2
    assert node.holds(2)
    assert not node.holdings.lost


async def test_a_copy_is_given_out_for_as_long_as_it_is_true(make):
    """Also while it is not wanted; an older one would hide that layers are lost."""
    node = make(2)
    await node.load()
    holdings = node.holdings
    assert holdings.head is not None
    assert holdings.head.round == 2
    for where in ("held", "set_aside"):
        setattr(holdings.prefetcher, where, ((HEADS[1], part(1, THEIRS)),))
        assert THEIRS not in [state.layers for _, state in holdings._idle_states()]
        setattr(holdings.prefetcher, where, ((HEADS[2], part(2, THEIRS)),))
        assert THEIRS in [state.layers for _, state in holdings._idle_states()]
        setattr(holdings.prefetcher, where, ())
