"""Trainer sessions in threads of the test's process: everything of a trainer process but the process."""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from support.eventually import eventually
from torch import Tensor

from atoll.core.clock import SystemClock
from atoll.core.errors import AtollError, error_class
from atoll.core.files import open_anonymous_file
from atoll.core.run_spec import parse_run_spec
from atoll.node.pipeline.dispatcher import RouteDispatcher
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.route_connection import RouteConnection
from atoll.node.pipeline.stage_socket import StageSocket
from atoll.node.system.shared_vectors import map_vector
from atoll.node.trainer import messages
from atoll.node.trainer.session import TrainerSession
from atoll.node.trainer.trainer import TrainerFacts
from atoll.node.wire.transport import Network
from atoll.v1 import plan_pb2


class StageThread:
    """A session that holds a span, or with None the whole model. Made by `start`; `stop` it in the end."""

    stage_socket: StageSocket
    anchor: Tensor
    pseudo_gradient: Tensor
    ready: messages.Ready
    facts: TrainerFacts
    offsets: tuple[int, ...]  # of all layers

    def __init__(self, config: messages.TrainerConfig) -> None:
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.status = messages.TrainerStatus()
        self._config, self._loop = config, asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[messages.Answer]] = {0: self._loop.create_future()}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._descriptors = [open_anonymous_file("anchor"), open_anonymous_file("gradient")]

    @classmethod
    async def start(cls, config: messages.TrainerConfig) -> StageThread:
        """Ready."""
        self = cls(config)
        near, self._far = socket.socketpair()
        self.stage_socket = await StageSocket.from_socket(near)
        self._thread.start()
        ready = await self._answers[0]
        if isinstance(ready, messages.Refused):
            raise error_class(ready.reason)(ready.message)
        assert isinstance(ready, messages.Ready)
        self.ready = ready
        self.facts = facts = TrainerFacts.of(ready)
        self.offsets, elements = facts.layer_offsets, facts.held_elements
        self.anchor, self.pseudo_gradient = (map_vector(descriptor, elements) for descriptor in self._descriptors)
        return self

    def _run(self) -> None:
        try:
            self.session = TrainerSession(self._config, self, *self._descriptors, self._far)
        except AtollError as error:
            self.answer(0, messages.Refused(error.reason, str(error), error.remedy))
            return
        self.session.serve()

    def answer(self, number: int, body: messages.Answer | messages.Pushed) -> None:
        """The session's word, in its thread."""
        with suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(self._hear, number, body)

    def _hear(self, number: int, body: messages.Answer | messages.Pushed) -> None:
        if isinstance(body, messages.TrainerStatus):
            self.status = body
        elif not isinstance(body, messages.Loading) and not self._answers[number].done():
            self._answers[number].set_result(body)

    async def order(self, order: messages.Order) -> messages.Answer:
        """Raises what it is refused with."""
        number = next(self._numbers)
        self._answers[number] = self._loop.create_future()
        self.events.put(messages.Envelope(number, order))
        answer = await self._answers[number]
        if isinstance(answer, messages.Refused):
            raise error_class(answer.reason)(answer.message)
        return answer

    async def enter_route(self, place: RoutePlace) -> None:
        """As a `Trainer`."""
        await self.order(messages.EnterRoute(place.plan_version, place.route, place.stage, place.stages))

    async def stop(self) -> None:
        """The thread is over."""
        if self._thread.is_alive():
            self.events.put(messages.Envelope(0, messages.Stop()))
        await asyncio.to_thread(self._thread.join)
        if self.session._loop is not None:
            self.session._loop.close()
        self.stage_socket.close()
        await eventually(lambda: self._far.fileno() < 0)
        for descriptor in self._descriptors:
            os.close(descriptor)

    @property
    def weights(self) -> Tensor:
        """What it holds; look only while it stands still."""
        assert self.session._loop is not None
        return self.session._loop.weights.read()


def connection_of(trainer: StageThread, dispatcher: RouteDispatcher, place: RoutePlace) -> RouteConnection:
    """To be run when the trainer has entered the route."""
    spec = parse_run_spec(trainer._config.run_spec_toml)
    table = plan_pb2.LayerTable.FromString(bytes.fromhex(trainer.ready.layer_table_hex))
    return RouteConnection(dispatcher, trainer.stage_socket, place, spec, table, SystemClock())


@asynccontextmanager
async def trainers_of(
    spec: str, corpus: str, spans: Sequence[tuple[int, int] | None], base: Path | None = None
) -> AsyncIterator[list[StageThread]]:
    """One a span; they end with the test."""
    before = torch.get_num_threads()
    async with AsyncExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        trainers = []
        for span in spans:
            config = messages.TrainerConfig(
                spec, corpus, device="cpu", span=span, base_path=str(base) if base else None
            )
            trainers.append(await StageThread.start(config))
            stack.push_async_callback(trainers[-1].stop)
        yield trainers


@asynccontextmanager
async def connected_route(
    trainers: Sequence[StageThread], networks: Sequence[Network], dispatchers: Sequence[RouteDispatcher], plan: int = 1
) -> AsyncIterator[list[RouteConnection]]:
    """The trainers as one route, in this order."""
    peers = tuple(network.peer_id for network in networks)
    connections, tasks = [], []
    for stage, (trainer, dispatcher) in enumerate(zip(trainers, dispatchers, strict=True)):
        place = RoutePlace(plan, 0, peers, stage)
        await trainer.enter_route(place)
        connections.append(connection_of(trainer, dispatcher, place))
        tasks.append(asyncio.create_task(connections[-1].run()))
    try:
        yield connections
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
