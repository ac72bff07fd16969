"""A trainer process for a node's second or later device (rank 1 and up). It mirrors rank 0.

A node with several devices runs one process per device. Rank 0 talks to the daemon (`session.py`) and forwards orders
and steps to the other ranks (`rank_processes.py`), which this module executes.
"""

from __future__ import annotations

from atoll.core.clock import Clock, SystemClock
from atoll.core.errors import AtollError, InvalidTransition
from atoll.node.pipeline.rank_order import RankOrder
from atoll.node.pipeline.rank_stage import RankStage
from atoll.node.trainer import messages
from atoll.node.trainer.loading import load_trainer_state
from atoll.node.trainer.model_orders import ModelOrders
from atoll.node.trainer.session import Channel, refusal
from atoll.node.training.device import limit_device_memory
from atoll.node.training.device_group import Rendezvous, choose_devices, combined_facts
from atoll.node.training.loop import InnerLoop


class RankProcess:
    """One rank other than rank 0. The constructor loads its part of the model, and raises errors of loading."""

    def __init__(
        self,
        config: messages.TrainerConfig,
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
        state = load_trainer_state(
            config, facts, None, clock or SystemClock(), Rendezvous(devices, config.rank, rendezvous_fd)
        )
        self._orders = ModelOrders(state, config, anchor_fd, gradient_fd)

    def serve(self) -> None:
        """Execute rank 0's orders and steps until `Stop`."""
        while True:
            event = self._channel.events.get()
            assert isinstance(event, messages.Envelope)
            match event.body, self._orders.state.loop:
                case messages.Stop(), _:
                    return
                case messages.Step(), InnerLoop() as loop:
                    loop.step()
                case RankOrder() as order, RankStage() as loop:
                    loop.stage.run_order(order)
                case messages.Probe() as probe, _:
                    self._probe(event.number, probe)
                case messages.Initialise(), InnerLoop() | RankStage():  # rank 0 writes the anchor
                    self._orders.anchor_loaded = False
                    self._channel.answer(event.number, messages.Done())
                case order, _ if isinstance(order, messages.ModelOrder):
                    self._answer_order(event.number, order)
                case order, loop:
                    raise InvalidTransition(
                        f"rank 0 sent {order}, which a process with {type(loop).__name__} cannot execute"
                    )

    def _probe(self, number: int, probe: messages.Probe) -> None:
        state = self._orders.state
        try:
            state.probe(self._orders.anchor_E, probe.minimum_step_seconds, probe.compute_share)
        except AtollError as error:
            # this ends the trainer: otherwise the other ranks would wait in a collective operation
            self._channel.answer(0, refusal(error))
            raise
        self._channel.answer(number, messages.Done())

    def _answer_order(self, number: int, order: messages.ModelOrder) -> None:
        """Execute an order. Rank 0 refuses the same orders as this rank."""
        try:
            answer = self._orders.execute(order)
        except AtollError as error:
            answer = refusal(error)
        self._channel.answer(number, answer)
