"""The process of another device than the first of a node's: does what the first one does, and nothing else."""

from __future__ import annotations

from atoll.core.clock import Clock, SystemClock
from atoll.core.errors import AtollError, InvalidTransition
from atoll.node.pipeline.rank_order import RankOrder
from atoll.node.pipeline.rank_stage import RankStage
from atoll.node.trainer import messages as ms
from atoll.node.trainer.loading import load
from atoll.node.trainer.model_orders import ModelOrders
from atoll.node.trainer.session import Channel, refusal
from atoll.node.training.device import limit_device_memory
from atoll.node.training.device_group import Rendezvous, choose_devices, combined_facts
from atoll.node.training.loop import InnerLoop


class RankProcess:
    """Loads its part (raising typed errors), and then serves."""

    def __init__(
        self,
        config: ms.TrainerConfig,
        channel: Channel,
        anchor_fd: int,
        gradient_fd: int,
        rendezvous_fd: int,
        clock: Clock | None = None,
    ) -> None:
        self._channel = channel
        devices = choose_devices(config.device)
        facts = combined_facts(devices, config.vram_fraction, config.memory_bytes)
        limit_device_memory(devices[config.rank], facts, config.vram_fraction)
        state = load(config, facts, None, clock or SystemClock(), Rendezvous(devices, config.rank, rendezvous_fd))
        self._orders = ModelOrders(state, config, anchor_fd, gradient_fd)

    def serve(self) -> None:
        """Until `Stop`."""
        while True:
            event = self._channel.events.get()
            assert isinstance(event, ms.Envelope)
            match event.body, self._orders.state.loop:
                case ms.Stop(), _:
                    return
                case ms.Step(), InnerLoop() as loop:
                    loop.step()
                case RankOrder() as order, RankStage() as loop:
                    loop.stage.run_order(order)
                case ms.Probe() as probe, _:
                    self._probe(event.number, probe)
                case ms.Initialise(), InnerLoop() | RankStage():  # the first process does it
                    self._orders.anchor_loaded = False
                    self._channel.answer(event.number, ms.Done())
                case ms.Step() | RankOrder(), _:
                    raise InvalidTransition(f"{event.body} is not for what this process holds")
                case _:
                    self._answer_order(event)

    def _probe(self, number: int, probe: ms.Probe) -> None:
        state = self._orders.state
        try:
            state.probe(self._orders.anchor_E, probe.minimum_step_seconds, probe.compute_share)
        except AtollError as error:
            self._channel.answer(0, refusal(error))  # the others wait for this one in a sum: nothing can go on
            raise
        self._channel.answer(number, ms.Done())

    def _answer_order(self, order: ms.Envelope) -> None:
        """What is refused here is refused by the first process, too."""
        try:
            answer = self._orders.execute(order.body)
        except AtollError as error:
            answer = refusal(error)
        self._channel.answer(order.number, answer)
