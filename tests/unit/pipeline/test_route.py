"""A route of trainer sessions on a network: the steps of one process, and nothing half-counted whatever breaks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from support.eventually import eventually
from support.machine_plans import make_plan
from support.memory_network import FrameInTransit, MemoryHub
from support.stage_threads import StageThread, connected_route, trainers_of

from atoll.core.built_in_shape import layer_table, resolve_shape
from atoll.core.clock import SystemClock
from atoll.core.errors import (
    AtollError,
    DeadlineExceeded,
    FlushAborted,
    InvalidRequest,
    InvalidTransition,
    NotPermitted,
    PeerMisbehaved,
    Unreachable,
)
from atoll.core.frames import Frame, FrameKind
from atoll.core.learned_deadline import LearnedDeadline
from atoll.core.run_spec import parse_run_spec
from atoll.node.pipeline import dispatcher, route_connection, stage_loop, stage_streams
from atoll.node.pipeline.dispatcher import PROTOCOL, RouteDispatcher
from atoll.node.pipeline.messages import Begin
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.route_connection import RouteConnection
from atoll.node.pipeline.stage_loop import StageLoop
from atoll.node.pipeline.stage_socket import FrameType, StageSocket, encode_error, pack_prefix
from atoll.node.trainer import messages
from atoll.node.wire.transport import Network, Stream
from atoll.v1 import common_pb2
from atoll.v1 import pipeline_pb2 as pb

SPEC = """
version = 1
[run]
name = "t"
seed = 5
stop_tokens = 100000
[model]
dimension = 32
layers = 2
heads = 4
kv_heads = 2
hidden_dimension = 48
{model}
[data]
path = "overridden"
sequence_length = 8
validation_samples = 8
[optimizer]
name = "adamw"
schedule = "constant"
learning_rate = 0.01
clip_norm = 0.5
micro_batch_samples = 2
accumulate = 3
[sync]
round_tokens = 1000
[pipeline]
codec = "fp32"
"""
TIED = "tie_embeddings = true"
STEP_TOKENS = 2 * 3 * 8
SOON = timedelta(seconds=60)
NAMES = ("reef", "lagoon", "atoll")
SPANS = [(0, 0), (1, 2), (3, 3)]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 200)
    return str(tmp_path / "text.txt")


class Route:
    """Three sessions, one each on a host, and one that holds the whole model and is on no route."""

    def __init__(self, hub: MemoryHub, sessions: list[StageThread]) -> None:
        *self.stages, self.whole = sessions
        self.networks = [hub.join(name) for name in NAMES]
        self.dispatchers = [RouteDispatcher(network) for network in self.networks]

    @property
    def driver(self) -> StageThread:
        return self.stages[0]

    def on(self, plan: int = 1) -> AbstractAsyncContextManager[list[RouteConnection]]:
        """The stages as one route of such a plan."""
        return connected_route(self.stages, self.networks, self.dispatchers, plan)

    async def load(self, stage: StageThread) -> None:
        """Genesis; a driver has all the samples there are."""
        await stage.order(messages.Initialise())
        first = stage.ready.span is not None and stage.ready.span[0] == 0
        await stage.order(messages.Load(((0, 10_000),) if first else (), 0))

    async def more(self, steps: int) -> None:
        """Until the driver has made so many steps more."""
        goal = self.driver.status.steps + steps
        await eventually(lambda: self.driver.status.steps >= goal)

    async def stand_still(self) -> int:
        """Let the driver pause and the others catch up; how many steps all have made."""
        await self.driver.order(messages.Pause())
        await eventually(lambda: len({stage.status.steps for stage in self.stages}) == 1)
        return self.driver.status.steps

    async def assert_equal_to_one_process(self) -> None:
        """All stand still: weights, tokens and samples are those of as many steps of the whole model."""
        steps = self.driver.status.steps
        for stage in self.stages:
            taken = await stage.order(messages.TakeSnapshot(0, stage.anchor.numel()))
            samples = 6 * steps if stage is self.driver else 0
            assert taken == messages.Snapshot(steps * STEP_TOKENS, samples, steps, steps * STEP_TOKENS)
        loop = self.whole.session._loop
        assert loop is not None
        while loop.progress.steps_total < steps:
            loop.work()
        assert torch.equal(torch.cat([stage.weights for stage in self.stages]), loop.weights_E)


@asynccontextmanager
async def route_on(hub: MemoryHub, corpus: str, model: str = "") -> AsyncIterator[Route]:
    async with trainers_of(SPEC.format(model=model), corpus, [*SPANS, None]) as sessions:
        route = Route(hub, sessions)
        for session in sessions:
            await route.load(session)
        for stage in route.stages:
            await stage.order(messages.Train())
        yield route
    await eventually(lambda: not any(network.tasks for network in route.networks))  # streams end with their members


def kind_of(passage: FrameInTransit) -> str | None:
    """What a message's header announces; None for a body."""
    if passage.protocol != PROTOCOL or passage.frame.kind is not FrameKind.MESSAGE:
        return None
    return pb.StageMessage.FromString(passage.frame.header).WhichOneof("content")


@pytest.mark.parametrize("model", ["", TIED], ids=["untied", "tied"])
async def test_a_route_of_three_sessions_takes_the_steps_of_one(corpus: str, model: str) -> None:
    async with route_on(MemoryHub(), corpus, model) as route:
        assert torch.equal(torch.cat([stage.anchor for stage in route.stages]), route.whole.anchor)
        async with route.on():
            await route.more(5)
            seen = route.driver.status
            await route.stand_still()
        await route.assert_equal_to_one_process()
        assert seen.route_ready
        assert seen.flushes_aborted == 0
        assert 0 < seen.train_loss < 6


async def test_links_that_break_at_any_moment_cost_a_flush_and_no_bits(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The middle stage's frames end its streams, at moments that come nearer to one another."""
    monkeypatch.setattr(route_connection, "_LONGEST_PAUSE", route_connection._FIRST_PAUSE)
    sent = 0

    async def fault(passage: FrameInTransit) -> Frame | AtollError | None:
        nonlocal sent
        sent += passage.sender == "lagoon" and passage.protocol == PROTOCOL
        broken = passage.sender == "lagoon" and sent in moments
        return Unreachable("the stream is cut") if broken else passage.frame

    moments = {3, 10, 40, 57, 71, 82, 90}
    async with route_on(MemoryHub(fault), corpus, TIED) as route:
        async with route.on() as connections:
            await eventually(lambda: sent > 120)
            await route.stand_still()
            assert connections[0].incarnations > 3
            assert isinstance(connections[1].last_error, AtollError)
        assert route.driver.status.flushes_aborted > 0
        await route.assert_equal_to_one_process()


async def test_a_neighbour_that_goes_silent_costs_patience_and_not_the_route(corpus: str) -> None:
    silent = False

    async def fault(passage: FrameInTransit) -> Frame | AtollError | None:
        return None if silent and passage.sender == "atoll" else passage.frame

    async with route_on(MemoryHub(fault), corpus) as route:
        async with route.on() as connections:
            await route.more(2)
            silent = True
            with impatient(route.driver):
                await eventually(lambda: route.driver.status.flushes_aborted > 0)
            assert "longer than" in route.driver.status.route_trouble
            await eventually(lambda: isinstance(connections[0].last_error, DeadlineExceeded))
            silent = False
            await route.more(2)
            await route.stand_still()
            assert route.driver.status.route_trouble == ""
        await route.assert_equal_to_one_process()


@contextmanager
def impatient(driver: StageThread) -> Iterator[None]:
    """Only while a flush is known to stand still: on a busy machine one that goes well takes as long."""
    loop = driver.session._loop
    assert isinstance(loop, StageLoop)
    before, loop._flush_deadline = loop._flush_deadline, LearnedDeadline(0.3, 0.3)
    yield
    loop._flush_deadline = before


async def test_a_stage_that_missed_a_verdict_steps_when_the_route_begins_anew(corpus: str) -> None:
    deaf = True

    async def fault(passage: FrameInTransit) -> Frame | AtollError | None:
        return None if deaf and kind_of(passage) == "verdict" else passage.frame

    async with route_on(MemoryHub(fault), corpus) as route:
        async with route.on():
            await eventually(lambda: route.driver.status.steps == 1)
            with impatient(route.driver):
                await eventually(lambda: route.driver.status.flushes_aborted > 0)
            assert [stage.status.steps for stage in route.stages] == [1, 0, 0]
            deaf = False
            await route.more(1)
            await route.stand_still()
        await route.assert_equal_to_one_process()


@pytest.mark.parametrize("replaced", [0, 1, 2])
async def test_a_trainer_that_takes_another_s_place_lets_the_route_go_on(corpus: str, replaced: int) -> None:
    spec = SPEC.format(model="")
    async with route_on(MemoryHub(), corpus) as route, trainers_of(spec, corpus, [SPANS[replaced]]) as (other,):
        async with route.on():
            await route.more(2)
        gone, route.stages[replaced] = route.stages[replaced], other
        assert await gone.order(messages.Pause()) == messages.Done()
        await route.load(other)
        for stage in route.stages:
            await stage.order(messages.Discard())
        before = [stage.status for stage in route.stages]
        async with route.on() as connections:
            await eventually(lambda: connections[0].incarnation > 0)
            await other.order(messages.Discard())  # it is there, and does not train: nobody begins anything
            assert not route.driver.status.route_ready
            await other.order(messages.Train())
            await route.more(3)
            await route.driver.order(messages.Pause())
            steps = route.driver.status.steps - before[0].steps
            await eventually(lambda: min(gained(route, before)) == steps)
        assert other.status.steps == steps
        assert max(gained(route, before)) <= steps + 1  # one more where a decision was heard late
        assert route.driver.status.flushes_aborted == before[0].flushes_aborted


def gained(route: Route, before: list[messages.TrainerStatus]) -> list[int]:
    return [stage.status.steps - was.steps for stage, was in zip(route.stages, before, strict=True)]


async def test_a_paused_stage_holds_the_route_up_and_aborts_nothing_more(corpus: str) -> None:
    async with route_on(MemoryHub(), corpus) as route:
        async with route.on():
            await route.more(2)
            await route.stages[2].order(messages.Pause())
            await eventually(lambda: "paused" in route.driver.status.route_trouble)
            aborted, steps = route.driver.status.flushes_aborted, route.stages[2].status.steps
            await route.stages[2].order(messages.Train())
            await route.more(2)
            await route.stand_still()
            assert route.driver.status.flushes_aborted == aborted <= 1
            assert route.stages[2].status.steps >= steps + 2
        await route.assert_equal_to_one_process()


async def test_a_node_serves_routes_one_after_another_and_several_at_once(corpus: str) -> None:
    hub = MemoryHub()
    async with route_on(hub, corpus) as route:
        async with route.on(plan=1):
            await route.more(2)
        async with route.on(plan=2):
            await route.more(2)
            two = SPEC.format(model="")
            async with trainers_of(two, corpus, [(0, 1), (2, 3)]) as others:
                for other in others:
                    await route.load(other)
                    await other.order(messages.Train())
                back = slice(None, 0, -1)
                async with connected_route(others, route.networks[back], route.dispatchers[back], plan=3):
                    await eventually(lambda: others[1].status.steps >= 2)
                    await route.more(1)
            await route.stand_still()
        await route.assert_equal_to_one_process()


async def test_a_route_may_be_idle_for_as_long_as_it_likes(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_streams, "_RECEIVE_TIMEOUT", timedelta(milliseconds=20))
    async with route_on(MemoryHub(), corpus) as route, route.on() as connections:
        await route.more(1)
        await route.stand_still()
        await asyncio.sleep(0.2)
        await route.driver.order(messages.Train())
        await route.more(1)
        assert [connection.incarnations for connection in connections] == [1, 1, 1]


async def test_an_order_that_comes_in_a_flush_is_carried_out_at_its_end_on_every_stage(corpus: str) -> None:
    held, let_go = asyncio.Event(), asyncio.Event()
    let_go.set()

    async def fault(passage: FrameInTransit) -> Frame | AtollError | None:
        if kind_of(passage) == "gradient" and passage.sender == "atoll" and not let_go.is_set():
            held.set()
            await let_go.wait()
        return passage.frame

    async with route_on(MemoryHub(fault), corpus) as route, route.on():
        await route.more(1)
        let_go.clear()
        await held.wait()
        before = [stage.status.steps for stage in route.stages[:2]]
        orders = [asyncio.create_task(stage.order(messages.TakeSnapshot(0, 9))) for stage in route.stages[:2]]
        await asyncio.sleep(0.1)
        assert not any(order.done() for order in orders)
        let_go.set()
        for order, steps in zip(orders, before, strict=True):
            taken = await order
            assert isinstance(taken, messages.Snapshot)
            assert taken.steps > steps
        await route.stand_still()


async def test_a_trainer_that_is_told_to_stop_does_not_wait_for_a_flush_that_others_hold_up(corpus: str) -> None:
    async def fault(passage: FrameInTransit) -> Frame | AtollError | None:
        return None if kind_of(passage) == "report" else passage.frame

    async with route_on(MemoryHub(fault), corpus) as route, route.on():
        await eventually(lambda: not route.stages[1].session._between_steps)
        pausing = asyncio.create_task(route.stages[1].order(messages.Pause()))
        await asyncio.sleep(0)
        assert await route.stages[1].order(messages.Stop()) == messages.Done()
        assert await pausing == messages.Done()  # what was asked before is answered before


async def test_a_flush_that_its_driver_does_not_end_is_ended_by_a_stage_that_has_orders(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fault(passage: FrameInTransit) -> Frame | AtollError | None:
        return None if kind_of(passage) == "report" else passage.frame

    monkeypatch.setattr(stage_loop, "STALLED_DRIVER_SECONDS", 0.5)
    async with route_on(MemoryHub(fault), corpus) as route, route.on():
        driver_loop = route.driver.session._loop
        assert isinstance(driver_loop, StageLoop)
        driver_loop._flush_deadline = LearnedDeadline(300.0, 300.0)
        await eventually(lambda: not route.stages[1].session._between_steps)
        assert await route.stages[1].order(messages.Pause()) == messages.Done()
        await eventually(lambda: driver_loop.flushes_aborted > 0)


async def test_a_flush_of_more_micro_batches_than_the_run_s_is_refused(corpus: str) -> None:
    async with route_on(MemoryHub(), corpus) as route, route.on():
        await route.more(1)
        await route.stand_still()
        loop = route.stages[1].session._loop
        assert isinstance(loop, StageLoop)
        with pytest.raises(PeerMisbehaved, match="of 4"):
            loop._machine.deliver(0, Begin(loop._machine.last_flush + 1, 4))


@pytest.mark.parametrize("model", ["", TIED], ids=["untied", "tied"])
async def test_a_route_evaluates_its_anchor_between_flushes_and_leaves_no_trace(corpus: str, model: str) -> None:
    async with route_on(MemoryHub(), corpus, model) as route:
        expected = await route.whole.order(messages.Evaluate())
        assert isinstance(expected, messages.Loss)
        async with route.on():
            await route.more(2)
            found = await route.driver.order(messages.Evaluate())
            assert isinstance(found, messages.Loss)
            assert found.value == pytest.approx(expected.value, rel=1e-6)
            await route.more(2)
            with pytest.raises(InvalidTransition, match="not the driver"):
                await route.stages[1].order(messages.Evaluate())
            await route.stand_still()
            with pytest.raises(InvalidTransition, match="paused"):
                await route.driver.order(messages.Evaluate())
        await route.assert_equal_to_one_process()


async def test_an_evaluation_ends_with_an_error_when_a_stage_is_elsewhere_or_the_route_breaks(corpus: str) -> None:
    cut = False

    async def fault(passage: FrameInTransit) -> Frame | AtollError | None:
        report = kind_of(passage) == "report" and pb.StageMessage.FromString(passage.frame.header).report
        return Unreachable("the stream is cut") if cut and report and not report.norms else passage.frame

    async with route_on(MemoryHub(fault), corpus) as route:
        async with route.on():
            await route.more(2)
            cut = True
            with pytest.raises(AtollError, match="cut"):
                await route.driver.order(messages.Evaluate())
            cut = False
            await route.more(2)
            await route.stand_still()
            await route.assert_equal_to_one_process()
            last = route.stages[2]
            await last.order(messages.Rebase((), 7, (0, 0)))
            await route.driver.order(messages.Discard())
            await route.driver.order(messages.Train())
            await route.more(1)
            with pytest.raises(InvalidTransition, match="another anchor"):
                await route.driver.order(messages.Evaluate())
            await route.more(1)
            await route.stand_still()
        assert route.driver.status.flushes_aborted <= 1


def lone_connection(hub: MemoryHub, stage_socket: StageSocket, stage: int) -> RouteConnection:
    """Of a route of two, with large micro-batches."""
    spec = parse_run_spec(SPEC.format(model="").replace("micro_batch_samples = 2", "micro_batch_samples = 512"))
    table = layer_table(spec, resolve_shape(spec.model, 256))
    place = RoutePlace(1, 0, ("reef", "lagoon"), stage)
    return RouteConnection(
        RouteDispatcher(hub.join(place.peers[stage])), stage_socket, place, spec, table, SystemClock()
    )


async def test_a_route_connection_lets_go_of_a_trainer_that_hangs() -> None:
    """Its socket is full, and nobody reads it."""
    near, far = socket.socketpair()
    stage_socket, hub = await StageSocket.from_socket(near), MemoryHub()
    running = asyncio.create_task(lone_connection(hub, stage_socket, 1).run())
    stream = await hub.join("reef").open("lagoon", PROTOCOL, SOON)
    filling = asyncio.create_task(fill(stream))
    await eventually(lambda: stage_socket._writer.transport.get_write_buffer_size() > 1 << 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    with pytest.raises(AtollError):
        await filling
    stage_socket.close()
    far.close()


@pytest.mark.parametrize("ticks", range(8))
async def test_a_route_connection_that_is_cancelled_while_its_route_breaks_ends(ticks: int) -> None:
    near, far = socket.socketpair()
    stage_socket, hub = await StageSocket.from_socket(near), MemoryHub()
    opened = asyncio.Event()

    async def swallow(stream: Stream) -> None:
        opened.set()
        await stream.receive(SOON)
        await asyncio.sleep(SOON.total_seconds())

    hub.join("lagoon").handle(PROTOCOL, swallow)
    route = lone_connection(hub, stage_socket, 0)
    running = asyncio.create_task(route.run())
    await eventually(lambda: route.incarnation > 0)
    word = header(route.incarnation, join=pb.StageJoin())
    far.sendall(pack_prefix(FrameType.HEADER, 1, route.incarnation, len(word)) + word)
    await opened.wait()
    why = encode_error(FlushAborted("the trainer has enough"))
    far.sendall(pack_prefix(FrameType.BREAK, 0, route.incarnation, len(why)) + why)
    assert route._links is not None
    await route._links._broken
    for _ in range(ticks):
        await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(SOON.total_seconds()):
            await running
    await hub.close()
    stage_socket.close()
    far.close()


async def fill(stream: Stream) -> None:
    """Send activations until somebody ends it."""
    tensor = pb.StageTensor(shape=[512, 8, 32], codec=common_pb2.CODEC_FP32)
    body = bytes(512 * 8 * (32 * 4 + 4))
    first = pb.StageMessage(plan_version=1, incarnation=1, activation=tensor, body_bytes=len(body)).SerializeToString()
    while True:
        await stream.send(FrameKind.MESSAGE, first)
        await stream.send(FrameKind.BODY, b"", body)


async def test_a_place_that_is_not_the_span_s_is_refused(corpus: str) -> None:
    async with trainers_of(SPEC.format(model=""), corpus, [SPANS[1]]) as (middle,):
        for stage, stages in ((0, 3), (2, 3), (3, 3), (0, 1)):
            with pytest.raises(InvalidRequest):
                await middle.order(messages.EnterRoute(1, 0, stage, stages))
        assert await middle.order(messages.EnterRoute(1, 0, 1, 3)) == messages.Done()


def test_a_node_finds_its_place_in_a_plan() -> None:
    plan = replace(make_plan(["a", "b", "c", "d"]), version=7, routes=(("b",), ("d", "a", "c")))
    assert RoutePlace.of(plan, "a") == RoutePlace(7, 1, ("d", "a", "c"), 1)
    assert RoutePlace.of(plan, "b") is None  # it holds everything
    assert RoutePlace.of(plan, "e") is None


# --- what may be said -----------------------------------------------------------------------------------


def header(incarnation: int, **content: Any) -> bytes:
    return pb.StageMessage(plan_version=1, incarnation=incarnation, flush=1, **content).SerializeToString()


ACTIVATION = pb.StageTensor(shape=[2, 8, 32], codec=common_pb2.CODEC_FP32)
ACTIVATION_BYTES = 2 * 8 * (32 * 4 + 4)


async def answer_to(network: Network, receiver: str, *frames: tuple[FrameKind, bytes, bytes]) -> AtollError:
    """What another member is refused with."""
    stream = await network.open(receiver, PROTOCOL, SOON)
    for kind, first, body in frames:
        await stream.send(kind, first, body)
    with pytest.raises(AtollError) as caught:
        await stream.receive(SOON)
    return caught.value


def opening(data: bytes) -> tuple[FrameKind, bytes, bytes]:
    return FrameKind.MESSAGE, data, b""


async def test_strangers_second_streams_and_what_is_another_s_to_say_are_refused_before_a_body_is_read(
    corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(route_connection, "START_TIMEOUT", timedelta(milliseconds=50))
    monkeypatch.setattr(dispatcher, "START_TIMEOUT", timedelta(milliseconds=50))
    hub = MemoryHub()
    async with route_on(hub, corpus) as route:
        stranger = hub.join("stranger")
        async with route.on() as connections:
            await route.more(1)
            now = connections[1].incarnation
            join = pb.StageJoin()
            assert isinstance(await answer_to(stranger, "reef", opening(header(now, join=join))), NotPermitted)
            assert isinstance(await answer_to(stranger, "reef", opening(b"\xff" * 9)), PeerMisbehaved)
            from_socket = await answer_to(route.networks[2], "lagoon", opening(header(now - 1, ready=pb.StageReady())))
            assert isinstance(from_socket, InvalidTransition)
            assert "is over" in str(from_socket)
            ahead = await answer_to(route.networks[2], "lagoon", opening(header(now + 9, ready=pb.StageReady())))
            assert "did not begin on this node" in str(ahead)
            unknown = pb.StageMessage(plan_version=1, route=4, incarnation=now).SerializeToString()
            assert "not a stage of route 4" in str(await answer_to(route.networks[0], "lagoon", opening(unknown)))
            assert connections[1].incarnation == now  # none of that was anything to the route
            again = await answer_to(route.networks[0], "lagoon", opening(header(now, join=join)))
            assert "second stream" in str(again)
            await route.more(1)


async def test_a_member_s_stream_of_an_incarnation_that_it_may_not_say_breaks_it_before_a_body_is_read(
    corpus: str,
) -> None:
    """The head's host claims to be upstream of the driver: a body is announced, and never comes."""
    async with route_on(MemoryHub(), corpus) as route:
        tensor = pb.StageMessage(plan_version=1, flush=1, activation=ACTIVATION, body_bytes=ACTIVATION_BYTES)
        async with route.on() as connections:
            await route.more(1)
            tensor.incarnation = connections[0].incarnation
            told = await answer_to(route.networks[2], "reef", opening(tensor.SerializeToString()))
            assert isinstance(told, PeerMisbehaved)
            assert "may not send" in str(told)
            await route.more(1)


async def test_a_body_of_another_length_and_a_header_of_another_incarnation_break_the_route(corpus: str) -> None:
    spoilt = ""

    async def fault(passage: FrameInTransit) -> Frame | AtollError | None:
        nonlocal spoilt
        frame = passage.frame
        if passage.sender != "lagoon" or passage.protocol != PROTOCOL or not spoilt:
            return frame
        if spoilt == "body" and frame.kind is FrameKind.BODY:
            spoilt = ""
            return Frame(frame.kind, b"", bytes(frame.body) + b"x")
        if spoilt == "header" and kind_of(passage) == "gradient":
            spoilt = ""
            encode_error = pb.StageMessage.FromString(frame.header)
            encode_error.incarnation += 1
            return Frame(frame.kind, encode_error.SerializeToString())
        return frame

    async with route_on(MemoryHub(fault), corpus) as route:
        async with route.on() as connections:
            for what in ("body", "header"):
                spoilt = what
                incarnation = connections[0].incarnation
                await eventually(lambda before=incarnation: connections[0].incarnation > before)
                await route.more(1)
            await route.stand_still()
        await route.assert_equal_to_one_process()
