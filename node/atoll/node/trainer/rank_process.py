"""The process of another device than the first of a node's: does what the first one does, and nothing else."""

from __future__ import annotations

from atoll.core.clock import Clock, SystemClock
from atoll.core.errors import AtollError, InvalidTransition
from atoll.node.pipeline.rank_order import Compute
from atoll.node.pipeline.rank_stage import FollowingStage
from atoll.node.trainer import messages as ms
from atoll.node.trainer.loading import load
from atoll.node.trainer.model_orders import ModelOrders
from atoll.node.trainer.session import Channel, refusal
from atoll.node.training.device import limit_memory
from atoll.node.training.device_group import Several, devices_of, facts_of
from atoll.node.training.loop import InnerLoop


class Follower:
    """Loads its part (raising typed errors), and then serves."""

    def __init__(
        self,
        config: ms.TrainerConfig,
        channel: Channel,
        anchor_fd: int,
        gradient_fd: int,
        meeting_fd: int,
        clock: Clock | None = None,
    ) -> None:
        self._channel = channel
        devices = devices_of(config.device)
        facts = facts_of(devices, config.vram_fraction, config.memory_bytes)
        limit_memory(devices[config.rank], facts, config.vram_fraction)
        here = load(config, facts, None, clock or SystemClock(), Several(devices, config.rank, meeting_fd))
        self._orders = ModelOrders(here, config, anchor_fd, gradient_fd)

    def serve(self) -> None:
        """Until `Stop`."""
        while True:
            event = self._channel.events.get()
            assert isinstance(event, ms.Envelope)
            match event.body, self._orders.here.loop:
                case ms.Stop(), _:
                    return
                case ms.Step(), InnerLoop() as loop:
                    loop.step()
                case Compute() as order, FollowingStage() as loop:
                    loop.stage.obey(order)
                case ms.Probe() as probe, _:
                    self._probe(event.number, probe)
                case ms.Initialise(), InnerLoop() | FollowingStage():  # the first process does it
                    self._orders.loaded = False
                    self._channel.answer(event.number, ms.Done())
                case ms.Step() | Compute(), _:
                    raise InvalidTransition(f"{event.body} is not for what this process holds")
                case _:
                    self._obey(event)

    def _probe(self, number: int, probe: ms.Probe) -> None:
        here = self._orders.here
        try:
            here.probe(self._orders.anchor_E, probe.minimum_step_seconds, probe.compute_share)
        except AtollError as error:
            self._channel.answer(0, refusal(error))  # the others wait for this one in a sum: nothing can go on
            raise
        self._channel.answer(number, ms.Done())

    def _obey(self, order: ms.Envelope) -> None:
        """What is refused here is refused by the first process, too."""
        try:
            answer = self._orders.carry_out(order.body)
        except AtollError as error:
            answer = refusal(error)
        self._channel.answer(order.number, answer)
