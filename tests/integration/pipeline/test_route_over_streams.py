"""A route over gated streams: trainer processes with the bits of one, struck by signals, and through libp2p."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import cast

import psutil
import pytest
import torch
from support.corpora import build_inline, write_rows
from support.eventually import eventually
from support.loopback_hosts import DIRECT, Lab
from support.stage_threads import StageThread, connected_route, trainers_of

from atoll.core.clock import SystemClock
from atoll.core.errors import ChildDied
from atoll.core.plan import Assignment, Base, Plan
from atoll.core.run_spec import parse_run_spec
from atoll.node.data.build_spec import BuildSource, BuildSpec
from atoll.node.data.corpus import load_corpus
from atoll.node.data.open_corpus import open_corpus
from atoll.node.direct.direct_path import DirectConfig
from atoll.node.exchange.codecs import BY_NUMBER
from atoll.node.pipeline import link_codec, stage_loop, stage_streams
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.pipeline.message_codec import LinkFormat, read_header
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.route_connection import RouteConnection
from atoll.node.run.route_membership import RouteMembership
from atoll.node.swarm.host import SwarmHost
from atoll.node.trainer import messages
from atoll.node.trainer.trainer import Snapshot, Trainer, TrainerConfig
from atoll.node.training.loop import InnerLoop
from atoll.v1 import pipeline_pb2 as pb

pytestmark = pytest.mark.usefixtures("one_thread")

SPEC = """
version = 1
[run]
name = "t"
seed = 5
stop_tokens = 1000000
[model]
vocabulary = 17000
dimension = 64
layers = 2
heads = 4
kv_heads = 2
hidden_dimension = 96
tie_embeddings = true
[data]
path = "overridden"
sequence_length = 32
validation_samples = 8
[optimizer]
name = "adamw"
schedule = "constant"
learning_rate = 0.01
micro_batch_samples = 3
accumulate = 2
[sync]
round_tokens = 1000
[pipeline]
codec = "fp32"
"""  # its tied matrix takes two body frames
STEP_TOKENS, STEP_SAMPLES = 3 * 2 * 32, 6
SPANS = [(0, 0), (1, 2), (3, 3)]
RANGES = ((0, 10_000),)
DEADLINE = timedelta(seconds=180)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 400)
    return tmp_path / "text.txt"


async def hosts_of(lab: Lab, direct: DirectConfig | None) -> list[SwarmHost]:
    seed = await lab.start("seed", direct=None)
    hosts = [await lab.start(name, seeds=seed.multiaddrs(), direct=direct) for name in ("a", "b", "c")]
    for host in hosts:
        await host.publish_address(timedelta(minutes=5))
    for host in hosts:
        await host.lookup_addresses()
    return hosts


async def test_through_libp2p_too_until_its_daemon_dies_which_costs_a_flush(
    lab: Lab, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_loop, "MIN_FLUSH_DEADLINE_SECONDS", DEADLINE.total_seconds())
    hosts = await hosts_of(lab, None)
    dispatchers = [RouteDispatcher(host) for host in hosts]
    for host in hosts:
        await host.ready()
    async with trainers_of(SPEC, str(corpus), SPANS) as stages:
        for stage in stages:
            await stage.order(messages.Initialise())
            await stage.order(messages.Load(RANGES if stage is stages[0] else (), 0))
            await stage.order(messages.Train())
        async with connected_route(stages, hosts, dispatchers):
            await eventually(lambda: stages[2].status.steps >= 3)
            assert stages[0].status.flushes_aborted == 0
            await struck_in_a_flush(stages[0], hosts[2].p2pd_pid)
            await eventually(lambda: stages[0].status.flushes_aborted == 1)
            taken = await stages[0].order(messages.TakeSnapshot(0, 9))
            assert isinstance(taken, messages.Snapshot)
            assert (taken.tokens, taken.samples) == (taken.steps * STEP_TOKENS, taken.steps * STEP_SAMPLES)


class Swarm:
    """Trainer processes on hosts; stage by stage one route."""

    def __init__(self, corpus: Path, hosts: list[SwarmHost], stack: AsyncExitStack, spec: str = SPEC) -> None:
        self.trainers: list[Trainer] = []
        self._corpus, self._hosts, self._stack, self._spec = corpus, hosts, stack, spec
        self._dispatchers = [RouteDispatcher(host) for host in hosts]
        self._peers = tuple(host.peer_id for host in hosts)

    async def spawn(self, stage: int, device: str = "cpu") -> Trainer:
        pace = 0.5 if stage == 0 else 0.0  # few steps, even where this process stops for a moment: errors grow
        config = TrainerConfig(
            self._spec, str(self._corpus), device=device, span=SPANS[stage], minimum_step_seconds=pace
        )
        log_path = self._corpus.parent / f"{stage}.log"
        trainer = await Trainer.spawn(config, log_path=log_path, timeout=DEADLINE)
        self._stack.push_async_callback(self._end, trainer)
        return trainer

    async def _end(self, trainer: Trainer) -> None:
        await trainer.stop(DEADLINE)
        assert not psutil.pid_exists(trainer.pid)

    async def join(self, stage: int, trainer: Trainer) -> asyncio.Task[None]:
        """Load, train, and stand on the route."""
        await trainer.load(ranges=RANGES if stage == 0 else (), committed_tokens=0)
        await trainer.train()
        place = RoutePlace(1, 0, self._peers, stage)
        await trainer.enter_route(place)
        assert trainer.stage_socket is not None
        spec, layers = parse_run_spec(self._spec), trainer.facts.layers
        connection = RouteConnection(self._dispatchers[stage], trainer.stage_socket, place, spec, layers, SystemClock())
        task = asyncio.create_task(connection.run())
        self._stack.push_async_callback(self._leave, task)
        return task

    @staticmethod
    async def _leave(task: asyncio.Task[None]) -> None:
        task.cancel()
        with suppress(asyncio.CancelledError, ChildDied):
            await task


async def struck_in_a_flush(driver: StageThread | Trainer, pid: int) -> None:
    """Kill it when a flush waits for it: the driver, that may rest between two, has long begun the next."""
    reports = [driver.status]  # one comes twice a second

    def waits() -> bool:
        if driver.status is not reports[-1]:
            reports.append(driver.status)
        return len(reports) >= 4 and len({report.steps for report in reports[-4:]}) == 1

    os.kill(pid, signal.SIGSTOP)
    await eventually(waits)
    os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def swarm_on(lab: Lab, corpus: Path, device: str = "cpu", spec: str = SPEC) -> AsyncIterator[Swarm]:
    hosts = await hosts_of(lab, DIRECT)
    async with AsyncExitStack() as stack:
        swarm = Swarm(corpus, hosts, stack, spec)
        for host in hosts:
            await host.ready()
        swarm.trainers += await asyncio.gather(*(swarm.spawn(stage, device) for stage in range(3)))
        yield swarm


@pytest.mark.timeout(900)
async def test_links_within_a_building_turn_to_bf16_where_the_run_leaves_their_code_open(
    lab: Lab, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: dict[str, list[str]] = {}  # in which activations and gradients came, in turn

    def noting(data: bytes, channel: LinkFormat) -> pb.StageMessage:
        header = read_header(data, channel)
        kind = header.WhichOneof("content")
        if kind in ("activation", "gradient"):
            tensor: pb.StageTensor = getattr(header, kind)
            codes.setdefault(kind, []).append(BY_NUMBER[tensor.codec].name)
        return header

    monkeypatch.setattr(stage_streams, "read_header", noting)
    monkeypatch.setattr(link_codec, "LOOK_SECONDS", 0.2)
    monkeypatch.setattr(stage_loop, "MIN_FLUSH_DEADLINE_SECONDS", DEADLINE.total_seconds())
    spec = SPEC.replace('codec = "fp32"', 'codec = "auto"')
    hosts = await hosts_of(lab, DIRECT)
    peers = tuple(host.peer_id for host in hosts)
    holdings = sorted(zip(peers, SPANS, strict=True))
    assignments = tuple(Assignment(peer, *span, (), 10**6, 1) for peer, span in holdings)
    plan = Plan("t", 1, assignments, (peers,), Base(b"", tuple(sorted(peers))))
    places = [RouteMembership(host, parse_run_spec(spec), host.peer_id, SystemClock()) for host in hosts]
    async with trainers_of(spec, str(corpus), SPANS) as stages, AsyncExitStack() as leaving:
        for host, place, stage in zip(hosts, places, stages, strict=True):
            await host.ready()
            await stage.order(messages.Initialise())
            await stage.order(messages.Load(RANGES if stage is stages[0] else (), 0))
            await stage.order(messages.Train())
            await place.follow(plan, cast("Trainer", stage))
            leaving.push_async_callback(place.leave)
        await eventually(
            lambda: [codes.get(kind, [])[-8:] for kind in ("activation", "gradient")] == [["bf16"] * 8] * 2
        )
        assert {code for kind in codes.values() for code in kind} <= {"int8", "bf16"}
        assert stages[0].status.flushes_aborted == 0


@pytest.mark.timeout(900)
async def test_three_processes_are_one_and_survive_the_middle_one(lab: Lab, corpus: Path) -> None:
    async with swarm_on(lab, corpus) as swarm:
        driver, middle, last = swarm.trainers
        for trainer in swarm.trainers:
            await trainer.initialise()
        connections = [await swarm.join(stage, trainer) for stage, trainer in enumerate(swarm.trainers)]
        await eventually(lambda: driver.status.steps >= 4)

        taken = await driver.snapshot()  # a flush is under way, most likely: it waits for the end
        assert taken == whole_steps(taken.steps, samples=True)
        losses = driver.status.train_loss
        await driver.discard()
        await driver.pause()
        steps = driver.status.steps
        await eventually(lambda: middle.status.steps == last.status.steps == steps)
        for trainer in swarm.trainers:
            assert await trainer.snapshot() == whole_steps(steps, samples=trainer is driver)
        moved_E = torch.cat([trainer.pseudo_gradient for trainer in swarm.trainers])
        assert (losses, True) == one_process(corpus, taken.steps, steps, moved_E)
        for trainer in swarm.trainers:
            await trainer.discard()

        await driver.train()
        await eventually(lambda: driver.status.steps >= steps + 3)
        await struck_in_a_flush(driver, middle.pid)
        with pytest.raises(ChildDied):
            await connections[1]
        await eventually(lambda: driver.status.flushes_aborted == 1)
        taken = await driver.snapshot()
        assert taken == whole_steps(taken.steps, samples=True)
        await driver.discard()
        other = await swarm.spawn(1)
        other.anchor.copy_(middle.anchor)
        await swarm.join(1, other)
        before = driver.status.steps
        await eventually(lambda: driver.status.steps >= before + 3)
        await eventually(lambda: other.status.steps > 0)  # it tells now and then

        os.kill(other.pid, signal.SIGSTOP)
        await eventually(lambda: driver.status.flushes_aborted == 2)
        assert "longer than" in driver.status.route_trouble
        stalled = driver.status.steps
        os.kill(other.pid, signal.SIGCONT)
        await eventually(lambda: driver.status.steps >= stalled + 2)
        taken = await driver.snapshot()
        assert taken == whole_steps(taken.steps, samples=True)


@pytest.mark.timeout(900)
async def test_nodes_with_several_devices_are_stages_like_others(lab: Lab, corpus: Path) -> None:
    """Owner and borrower of the tied matrix, and blocks between them, each on two; a micro-batch has three samples."""
    async with swarm_on(lab, corpus, "cpu,cpu") as swarm:
        driver, _, last = swarm.trainers
        for trainer in swarm.trainers:
            await trainer.initialise()
        genesis_E = torch.cat([trainer.anchor for trainer in swarm.trainers])
        connections = [await swarm.join(stage, trainer) for stage, trainer in enumerate(swarm.trainers)]
        await eventually(lambda: driver.status.steps >= 4)
        looked = (await driver.snapshot()).steps
        seen = driver.status.train_loss
        await driver.pause()
        steps = driver.status.steps
        await eventually(lambda: last.status.steps == steps)
        for trainer in swarm.trainers:
            assert await trainer.snapshot() == whole_steps(steps, samples=trainer is driver)
        moved_E = torch.cat([trainer.pseudo_gradient for trainer in swarm.trainers])
        with plain_loop(corpus) as loop:
            losses = [loop.step().loss for _ in range(steps)]
            assert seen == pytest.approx(sum(losses[:looked]) / looked, abs=1e-4)
            torch.testing.assert_close(moved_E, genesis_E - loop.weights_E, atol=2e-4, rtol=1e-2)
            await driver.train()
            assert (await driver.evaluate()).value == pytest.approx(loop.evaluate(genesis_E), abs=1e-4)
        (follower,) = psutil.Process(last.pid).children()
        await struck_in_a_flush(driver, follower.pid)
        await asyncio.wait_for(last.died, DEADLINE.total_seconds())
        with pytest.raises(ChildDied):
            await connections[2]
        await eventually(lambda: driver.status.flushes_aborted == 1)
        other = await swarm.spawn(2)  # on one device
        other.anchor.copy_(last.anchor)
        await swarm.join(2, other)
        before = driver.status.steps
        await eventually(lambda: driver.status.steps >= before + 3)
        taken = await driver.snapshot()
        assert taken == whole_steps(taken.steps, samples=True)


@pytest.mark.timeout(900)
async def test_stages_with_several_devices_take_the_mean_over_all_targets(lab: Lab, tmp_path: Path) -> None:
    """Prompts of many lengths: micro-batches, and the devices' parts of them, differ in their targets."""
    rows = [{"ask": "which reef? " * (n * 13 % 17), "say": f"reef {n % 7}, a ring"} for n in range(900)]
    source = BuildSource(
        name="p", source="jsonl", path=str(write_rows(tmp_path / "in.jsonl", rows)), prompt="ask", completion="say"
    )
    built = build_inline(BuildSpec(sources=(source,)), tmp_path / "corpus")
    text = SPEC.replace('path = "overridden"', f'source = "corpus"\ncorpus = "{built.digest}"')
    spec = parse_run_spec(text)
    opened = open_corpus(spec.data, str(tmp_path / "corpus"), None, SystemClock())
    loop = InnerLoop(spec, opened.for_training(spec), "cpu")
    try:
        async with swarm_on(lab, tmp_path / "corpus", "cpu,cpu", text) as swarm:
            driver, _, last = swarm.trainers
            for trainer in swarm.trainers:
                await trainer.initialise()
            genesis_E = torch.cat([trainer.anchor for trainer in swarm.trainers])
            for stage, trainer in enumerate(swarm.trainers):
                await swarm.join(stage, trainer)
            await eventually(lambda: driver.status.steps >= 4)
            await driver.pause()
            steps = driver.status.steps
            await eventually(lambda: last.status.steps == steps)
            for trainer in swarm.trainers:
                assert (await trainer.snapshot()).steps == steps
            moved_E = torch.cat([trainer.pseudo_gradient for trainer in swarm.trainers])
            loop.load(genesis_E, ranges=RANGES)
            for _ in range(steps):
                loop.step()
            torch.testing.assert_close(moved_E, genesis_E - loop.weights_E, atol=2e-4, rtol=1e-2)
            await driver.train()
            assert (await driver.evaluate()).value == pytest.approx(loop.evaluate(genesis_E), abs=1e-4)
    finally:
        loop.close()


def whole_steps(steps: int, *, samples: bool) -> Snapshot:
    return Snapshot(steps * STEP_TOKENS, steps * STEP_SAMPLES if samples else 0, steps, steps * STEP_TOKENS)


def one_process(corpus: Path, looked: int, steps: int, moved_E: torch.Tensor) -> tuple[float, bool]:
    """The mean loss of recent steps, as a trainer of the whole model has it, and whether weights are the same bits."""
    with plain_loop(corpus) as loop:
        genesis_E = loop.weights_E.clone()
        losses = [loop.step().loss for _ in range(steps)]
        recent = losses[max(0, looked - 32) : looked]
        return sum(recent) / len(recent), torch.equal(genesis_E - loop.weights_E, moved_E)


@contextmanager
def plain_loop(corpus: Path) -> Iterator[InnerLoop]:
    """The whole model on one device, at its genesis."""
    spec = parse_run_spec(SPEC)
    loop = InnerLoop(spec, load_corpus(spec, str(corpus)), "cpu")
    try:
        anchor_E = torch.empty(loop.layout.elements)
        loop.initialise_into(anchor_E)
        loop.load(anchor_E, ranges=RANGES)
        yield loop
    finally:
        loop.close()
