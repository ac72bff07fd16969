"""Engines of nodes that hold different layers: routes cut at different places, averaged layer by layer."""

import asyncio
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
from support.machine_plans import make_plan
from support.memory_network import MemoryHub
from support.process_swarm import MODEL, SPEC
from support.scripted_trainer import STEP_SAMPLES, STEP_TOKENS, ScriptedTrainer

from atoll.core import protocol
from atoll.core.clock import SystemClock
from atoll.core.errors import Unreachable
from atoll.core.identity import Identity
from atoll.core.manifest import Head, changed_layers
from atoll.core.plan import Assignment, Base, Plan
from atoll.core.run_spec import parse_run_spec
from atoll.node.exchange.exchange_server import ExchangeServer
from atoll.node.exchange.exchange_streams import PROTOCOL as AVERAGE
from atoll.node.rounds import lookout
from atoll.node.rounds import types as rt
from atoll.node.rounds.callbacks import RoundCallbacks, RoundCounters
from atoll.node.rounds.engine import AveragingEngine
from atoll.node.rounds.installed_state import InstalledState
from atoll.node.rounds.member_streams import RoundLinks
from atoll.node.rounds.policy import policies
from atoll.node.rounds.run_member import RunMember
from atoll.node.rounds.snapshot_ledger import CountedShare
from atoll.node.state.anchor import AnchorState
from atoll.node.state.catchup import catch_up
from atoll.node.state.manifests import ManifestStore
from atoll.node.state.outer_step import layer_states, matches_digests
from atoll.node.state.state_server import StateServer
from atoll.node.state.vote_store import VoteStore
from atoll.node.training.sample_feed import SampleNumbers
from atoll.v1 import common_pb2 as pb
from atoll.v1 import manifest_pb2

OFFSETS = (0, 3000, 4000, 5000, 6000, 7000, 11000)
ADAPTED = (0, 0, 1000, 2000, 3000, 4000, 4000)  # nothing is trained of embedding and head
CUTS = (((0, 5),), ((0, 2), (3, 5)), ((0, 0), (1, 3), (4, 5)))  # three routes: their stages' layers
FRAGMENTS = 4  # between the cuts at 1, 3 and 4
TIMEOUT = 180.0
OPERATOR = Identity.generate()

pytestmark = pytest.mark.timeout(400)


async def nobody_to_ask(round_id, proposal) -> rt.CoordinatorVote:
    return rt.CoordinatorVote(round_id, proposal, False, None, None, "there is none")


class Stage:
    """One node's engine, above a trainer without a model."""

    def __init__(self, identity, layers, network, directory, seed):
        self.identity, self.layers, self.network, self.directory = identity, layers, network, directory
        self.trainer = ScriptedTrainer(OFFSETS, layers, seed)
        self.state = AnchorState(self.trainer.anchor, OFFSETS, layers)
        self.heads: list[Head] = []
        self.counters = RoundCounters()
        directory.mkdir()

    async def begin(self, spec, head: Head, plan: Plan) -> None:
        await self.trainer.load(ranges=plan.assignment(self.identity.peer_id).data_ranges, committed_tokens=0)
        await self.trainer.train()
        manifests, votes = ManifestStore(self.directory / "manifests", "reef"), VoteStore(self.directory)
        votes.begin()
        self.engine = AveragingEngine(
            RunMember(self.identity, spec, OPERATOR.public_key, self.network, SystemClock()),
            policies(spec, OFFSETS),
            self.trainer,
            InstalledState(head, self.state, manifests),
            plan,
            votes=votes,
            exchanges=ExchangeServer(self.network, timedelta(seconds=5)),
            counters=self.counters,
            callbacks=RoundCallbacks(
                committed=self.heads.append,
                report=lambda _: None,
                evaluated=lambda _: None,
                audited=lambda _: None,
                ask_coordinator=nobody_to_ask,
                plan_newer_than=lambda _: None,
                plan_shared=lambda _: None,
            ),
        )
        StateServer(
            self.network,
            "reef",
            manifests,
            lambda: None if self.engine.moving else (self.engine.head, self.state),
        )
        self.links = RoundLinks(self.network, self.engine.receive, self.engine.lost)
        self.running = asyncio.create_task(self.engine.run(self.links))

    async def reach(self, number: int) -> None:
        async with asyncio.timeout(TIMEOUT):
            while not self.heads or self.heads[-1].round < number:
                if self.running.done():
                    self.running.result()
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        await self.links.close()
        await self.trainer.stop()


@asynccontextmanager
async def swarm(tmp_path, passages, fault=None):
    """The stages of three routes at genesis, which is zero. `passages` takes who gave parts to whom."""

    async def watch(passage):
        if passage.protocol == AVERAGE:
            passages.add((passage.sender, passage.receiver))
        return await fault(passage) if fault else passage.frame

    text = SPEC.format(model=MODEL, nodes=6, tokens=10**9, corpus="nowhere.txt", round_tokens=4000, codec="int8")
    spec = parse_run_spec(text + "round_growth = 1000.0\nscreening = false\n")
    hub = MemoryHub(watch)
    routes = [[(Identity.generate(), first, last) for first, last in route] for route in CUTS]
    stages = []
    for seed, (identity, first, last) in enumerate(stage for route in routes for stage in route):
        network = hub.join(identity.peer_id)
        stages.append(Stage(identity, range(first, last + 1), network, tmp_path / str(seed), seed))
    zero_E = torch.zeros(OFFSETS[-1])
    payload = manifest_pb2.Manifest(
        protocol=protocol.ours(),
        round=pb.RoundId(run_id="reef"),
        layers=layer_states(zero_E, zero_E, OFFSETS, 0),
    ).SerializeToString()
    head = Head(manifest_pb2.CommittedManifest(payload=payload))
    named = [[(identity.peer_id, first, last) for identity, first, last in route] for route in routes]
    members = sorted(peer for route in named for peer, _, _ in route)
    made = make_plan(members, routes=named)
    plan = Plan("reef", 1, made.assignments, made.routes, Base(head.hash, made.base.seats))
    async with AsyncExitStack() as stack:
        for stage in stages:
            await stage.begin(spec, head, plan)
            stack.push_async_callback(stage.end)
        yield stages, plan, hub
        await stack.aclose()
        await hub.close()


@pytest.mark.parametrize("offsets", [OFFSETS, ADAPTED], ids=["all layers are trained", "adapters of blocks"])
async def test_each_layer_is_averaged_among_its_holders_and_all_stand_on_one_history(tmp_path, monkeypatch, offsets):
    monkeypatch.setattr(sys.modules[__name__], "OFFSETS", offsets)
    passages: set[tuple[str, str]] = set()
    async with swarm(tmp_path, passages) as (stages, plan, _):
        turns = 2 * FRAGMENTS
        await asyncio.gather(*(stage.reach(turns) for stage in stages))
        for stage in stages:
            await stage.end()
        history = [head for head in stages[0].heads if head.round <= turns]
        assert [head.round for head in history] == list(range(1, turns + 1))
        for stage in stages:
            assert [head.hash for head in stage.heads[:turns]] == [head.hash for head in history]
            head, layers = stage.heads[-1], stage.layers
            offsets = [offset - stage.state.start for offset in OFFSETS[layers.start : layers.stop + 1]]
            states = head.manifest.layers[layers.start : layers.stop]
            assert matches_digests(states, stage.state.anchor_E, stage.state.momentum_E, offsets, layers.start)
            assert stage.counters.committed + stage.counters.witnessed >= turns
            if len(layers) < 6:
                assert stage.counters.witnessed >= 2
        for head in history:
            manifest = head.manifest
            holders = plan.holders(changed_layers(manifest))
            assert len(holders) == 3
            brought = {item.peer_id for item in manifest.contributions if item.weight}
            assert brought == holders
            assert {item.peer_id for item in manifest.contributions} == set(plan.members)
            assert all(item.samples == 0 for item in manifest.contributions if item.peer_id not in plan.drivers)
            assert set(head.data.holdings) == set(plan.drivers)
        assert {layer.round for layer in history[-1].manifest.layers} == {5, 6, 7, 8}
        holding = {(a, b) for layer in range(6) for a in plan.holders(range(layer, layer + 1)) for b in plan.members}
        shared = {(a, b) for a, b in holding if any({a, b} <= plan.holders(range(at, at + 1)) for at in range(6))}
        assert passages <= shared  # nobody is sent parts of layers that it does not hold


async def test_a_stage_without_anything_trained_finds_the_head(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "OFFSETS", ADAPTED)
    async with swarm(tmp_path, set()) as (stages, plan, _):
        await asyncio.gather(*(stage.reach(FRAGMENTS) for stage in stages))
        nothing = AnchorState(torch.zeros(0), ADAPTED, range(1))
        fetched = await catch_up(stages[3].network, plan, nothing, None, operator_key=OPERATOR.public_key)
        assert fetched is not None
        assert fetched.head.round >= 1
        assert fetched.anchor_E.numel() == 0


async def test_rounds_go_on_among_those_that_are_left_when_a_stage_dies(tmp_path):
    passages: set[tuple[str, str]] = set()
    async with swarm(tmp_path, passages) as (stages, _, hub):
        await asyncio.gather(*(stage.reach(FRAGMENTS) for stage in stages))
        dead, rest = stages[1], [*stages[:1], *stages[2:]]
        await dead.end()
        await hub.cut(dead.identity.peer_id)
        reached = max(stage.heads[-1].round for stage in rest)
        await asyncio.gather(*(stage.reach(reached + 2 * FRAGMENTS) for stage in rest))
        shortest = min(len(stage.heads) for stage in rest)
        assert len({tuple(head.hash for head in stage.heads[:shortest]) for stage in rest}) == 1


async def test_a_stage_that_comes_back_fetches_its_own_layers_and_no_others(tmp_path):
    passages: set[tuple[str, str]] = set()
    async with swarm(tmp_path, passages) as (stages, plan, _):
        await asyncio.gather(*(stage.reach(FRAGMENTS) for stage in stages))
        middle = stages[4]
        newcomer = AnchorState(torch.zeros(3000), OFFSETS, range(1, 4))
        fetched = None
        async with asyncio.timeout(TIMEOUT):
            while fetched is None:
                try:
                    fetched = await catch_up(middle.network, plan, newcomer, None, operator_key=OPERATOR.public_key)
                except Unreachable:  # rounds race here as they never do between machines: nodes, too, ask again
                    await asyncio.sleep(0.1)
        states = fetched.head.manifest.layers[1:4]
        assert matches_digests(states, fetched.anchor_E, fetched.momentum_E, (0, 1000, 2000, 3000), 1)
        assert fetched.anchor_E.numel() == 3000


class RouteMembership(ScriptedTrainer):
    """Steps only while the first stage of its route has samples."""

    def __init__(self, offsets, layers, seed) -> None:
        super().__init__(offsets, layers, seed)
        self.driver = None  # a trainer; None: it stands on no route

    async def _walk(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            if self.driver is None or not self.driver.ranges:
                continue
            self.weights_E += 1e-3 * torch.randn(self.weights_E.shape, generator=self._random)
            self._progress.add(STEP_TOKENS, SampleNumbers((), STEP_SAMPLES if self is self.driver else 0))


@pytest.fixture
async def left_behind(tmp_path):
    """The engine of a stage that cannot tell what was counted of it, and three heads, one after the other."""
    async with swarm(tmp_path, set()) as (stages, _, _):
        await asyncio.gather(*(stage.reach(4) for stage in stages))
        for stage in stages:
            await stage.end()
        engine, (before, after, head, *_) = stages[0].engine, stages[0].heads
        engine._progress._accounted = (b"", rt.Counted.UNKNOWN)
        yield engine, before, after, head


async def test_a_round_without_the_votes_that_decide_it_says_nothing_of_our_progress(left_behind, monkeypatch):
    engine, before, after, head = left_behind
    manifest = manifest_pb2.Manifest.FromString(after.committed.payload)
    del manifest.contributions[:]
    forged = Head(manifest_pb2.CommittedManifest(payload=manifest.SerializeToString()))
    honest = max(peer for peer in engine.plan.members if peer != engine._progress._me)
    told: dict[str, Head] = {}

    async def tells(network, peer, run_id, number):
        return told.get(peer, forged)

    monkeypatch.setattr(lookout, "fetch_manifest", tells)
    assert await engine._catching_up._share_after(before, head) == CountedShare(rt.Counted.UNKNOWN)
    told[honest] = after
    monkeypatch.setattr(engine._machine, "counted", lambda manifest: manifest)
    assert (await engine._catching_up._share_after(before, head)).counted == after.manifest


async def test_the_head_itself_says_what_it_holds_of_our_progress_where_it_is_the_next(left_behind, monkeypatch):
    engine, before, after, _ = left_behind
    monkeypatch.setattr(lookout, "fetch_manifest", None)  # nobody is asked
    monkeypatch.setattr(engine._machine, "counted", lambda manifest: manifest)
    share = await engine._catching_up._share_after(before, after)
    assert share.counted == after.manifest
    assert (
        share.samples
        == next(it.samples for it in after.manifest.contributions if it.peer_id == engine._progress._me)
        > 0
    )


async def test_who_is_in_a_round_with_what_an_earlier_life_brought_skips_no_sample(tmp_path, monkeypatch):
    async with swarm(tmp_path, set()) as (stages, _, _):
        whole = stages[0]
        await whole.reach(2)
        ahead: list[tuple[int, int]] = []
        rebase = whole.trainer.rebase

        async def watched(**how):
            before = whole.trainer.ahead[0][0]
            await rebase(**how)
            if how["consumed_samples"]:
                ahead.append((before, whole.trainer.ahead[0][0]))

        monkeypatch.setattr(whole.trainer, "rebase", watched)
        monkeypatch.setattr(whole.engine._machine, "counted", lambda manifest: rt.Counted.NOTHING)
        async with asyncio.timeout(TIMEOUT):
            while len(ahead) < 2:
                await asyncio.sleep(0.01)
        assert all(before == after for before, after in ahead)


async def test_who_trained_samples_that_others_got_begins_at_the_anchor(tmp_path, monkeypatch):
    async with swarm(tmp_path, set()) as (stages, _, _):
        whole = stages[0]
        loaded: list[tuple[tuple[int, int], ...]] = []
        load = whole.trainer.load

        async def watched(*, ranges, committed_tokens):
            loaded.append(ranges)
            await load(ranges=ranges, committed_tokens=committed_tokens)

        monkeypatch.setattr(whole.trainer, "load", watched)
        await whole.reach(3)
        assert loaded == []
        whole.engine._progress._given = ((10**9, 10**9 + 1000),)  # as under a plan that the round does not know
        await whole.reach(5)
        assert len(loaded) == 1
        assert loaded[0][0][0] < 10**9


SPANS = {"driver": range(3), "standby": range(3), "last": range(3, 6)}


class OneRoute:
    """Stages of a route of two, and one that stands by; at genesis, which is zero."""

    def __init__(self, tmp_path) -> None:
        text = SPEC.format(model=MODEL, nodes=3, tokens=10**9, corpus="nowhere.txt", round_tokens=4000, codec="int8")
        self.spec, self.hub = parse_run_spec(text + "round_growth = 1000.0\nscreening = false\n"), MemoryHub()
        identities = {name: Identity.generate() for name in SPANS}
        self.peers = {name: identity.peer_id for name, identity in identities.items()}
        self.stages = {
            name: Stage(identities[name], span, self.hub.join(self.peers[name]), tmp_path / name, seed)
            for seed, (name, span) in enumerate(SPANS.items())
        }
        zero_E = torch.zeros(OFFSETS[-1])
        layers = layer_states(zero_E, zero_E, OFFSETS, 0)
        genesis = manifest_pb2.Manifest(protocol=protocol.ours(), round=pb.RoundId(run_id="reef"), layers=layers)
        self.head = Head(manifest_pb2.CommittedManifest(payload=genesis.SerializeToString()))

    def plan(self, version: int, *, drives: str, stands_by: str | None) -> Plan:
        here = sorted(filter(None, (drives, stands_by, "last")), key=lambda name: self.peers[name])
        assignments = tuple(
            Assignment(
                self.peers[name],
                SPANS[name].start,
                SPANS[name].stop - 1,
                ((0, 256),) if name == drives == "driver" else (),
                0 if name == stands_by else 100_000,
                0 if name == stands_by else 1000,
            )
            for name in here
        )
        route = (self.peers[drives], self.peers["last"])
        return Plan("reef", version, assignments, (route,), Base(self.head.hash, tuple(sorted(self.peers.values()))))


@pytest.mark.parametrize("turn", [0, 1], ids=["of its own layers", "of others' layers"])
async def test_who_takes_a_drivers_place_has_samples_whosever_turn_is_next(tmp_path, monkeypatch, turn):
    """Without any the only route would stand still, and with it the rounds that give samples out."""
    monkeypatch.setattr(sys.modules[__name__], "ScriptedTrainer", RouteMembership)
    world = OneRoute(tmp_path)
    stages, hub = world.stages, world.hub
    first = world.plan(1, drives="driver", stands_by="standby")
    second = world.plan(2, drives="standby", stands_by=None)
    for name in ("driver", "last"):
        stages[name].trainer.driver = stages["driver"].trainer
    async with AsyncExitStack() as stack:
        for stage in stages.values():
            await stage.begin(world.spec, world.head, first)
            stack.push_async_callback(stage.end)
        last, standby = stages["last"], stages["standby"]
        await asyncio.gather(*(stage.reach(4) for stage in stages.values()))
        while last.heads[-1].manifest.round.fragment != 1 - turn:
            await asyncio.sleep(0.01)
        assert standby.trainer.ranges == ()
        assert not any(item.weight for item in weights_of(standby))
        for stage in stages.values():
            stage.trainer.driver = None
        await stages["driver"].end()
        await hub.cut(world.peers["driver"])
        for stage in (standby, last):
            stage.engine.plan_received(second)
            stage.trainer.driver = standby.trainer
        reached = max(last.heads[-1].round, standby.heads[-1].round)
        await asyncio.gather(standby.reach(reached + 4), last.reach(reached + 4))
        assert [it.hash for it in standby.heads[-3:]][:1] == [
            it.hash for it in last.heads if it.round == standby.heads[-3].round
        ]
        assert any(item.weight for item in weights_of(standby))
        assert set(last.heads[-1].data.holdings) == {world.peers["standby"]}
        await stack.aclose()
        await hub.close()


async def test_who_drives_again_at_the_same_head_applies_the_snapshot_that_others_saw_before(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ScriptedTrainer", RouteMembership)  # nothing is trained: no round opens
    world = OneRoute(tmp_path)
    driver = world.stages["driver"]
    await driver.begin(world.spec, world.head, world.plan(1, drives="driver", stands_by="standby"))
    try:
        await driver.trainer.snapshot(0, 1000)
        driver.trainer.ranges = ()
        driver.engine.plan_received(world.plan(2, drives="standby", stands_by="driver"))
        async with asyncio.timeout(TIMEOUT):
            while driver.engine.plan.version < 2:
                await asyncio.sleep(0.01)
            driver.engine.plan_received(world.plan(3, drives="driver", stands_by="standby"))
            while not driver.trainer.ranges:
                await asyncio.sleep(0.01)
        await driver.trainer.apply(ranges=((0, 256),), committed_tokens=0, moved=(0, 1000))
    finally:
        await driver.end()
        await world.hub.close()


async def test_a_driver_whose_samples_a_newer_plan_gives_to_another_trains_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ScriptedTrainer", RouteMembership)
    world = OneRoute(tmp_path)
    driver = world.stages["driver"]
    first = world.plan(1, drives="driver", stands_by="standby")
    later = world.plan(2, drives="driver", stands_by="standby")
    moved = tuple(replace(it, data_ranges=((256, 512),)) if it.data_ranges else it for it in later.assignments)
    await driver.begin(world.spec, world.head, first)
    try:
        driver.engine.plan_received(replace(later, assignments=moved))
        async with asyncio.timeout(TIMEOUT):
            while driver.trainer.ranges != ((256, 512),):
                await asyncio.sleep(0.01)
    finally:
        await driver.end()
        await world.hub.close()


def weights_of(stage: Stage) -> list[manifest_pb2.Contribution]:
    """What a member was counted for, round by round."""
    rounds = [head.manifest.contributions for head in stage.heads]
    return [item for made in rounds for item in made if item.peer_id == stage.identity.peer_id]
