"""The main loop of the trainer process: orders from the daemon, messages of the route, inner steps.

`TrainerSession` loads the model, reports `Ready` and then serves until `Stop`. It executes orders at step boundaries,
in the order in which they came; a stage of a route is at a step boundary when no flush is under way. Between orders it
runs inner steps if the last order was `Train` and it has data. A paced node (`minimum_step_seconds`) waits for the rest
of each step and still accepts orders. A stage executes one action of its flush at a time and takes its neighbours'
messages as they come.
"""

from __future__ import annotations

import os
import queue
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from atoll.core.clock import Clock, SystemClock
from atoll.core.errors import AtollError, FlushAborted, InvalidTransition, error_class
from atoll.core.files import open_anonymous_file
from atoll.node.model.run_model import write_initial_weights
from atoll.node.pipeline.evaluation import Outcome
from atoll.node.pipeline.rank_stage import RankStage
from atoll.node.pipeline.stage_io import RouteEvent, StageIO
from atoll.node.pipeline.stage_loop import StageLoop
from atoll.node.trainer import messages
from atoll.node.trainer.loading import load_trainer_state
from atoll.node.trainer.model_orders import ModelOrders, check_allowed, loss_message
from atoll.node.trainer.rank_processes import RankProcesses
from atoll.node.trainer.step_pacing import StepPacer, WorkTime
from atoll.node.training.device import compute_clock_seconds, limit_device_memory, synchronize
from atoll.node.training.device_group import Rendezvous, choose_devices, combined_facts
from atoll.node.training.loop import InnerLoop
from atoll.node.training.stall_share import StallShare

STATUS_INTERVAL_SECONDS = 0.5
TIMED_FIRST, TIMED_EVERY = 4, 16  # on a GPU, time the first 4 steps and then every 16th


class Channel(Protocol):
    """The control socket's interface to the session. Events of the route arrive in the same queue."""

    events: queue.SimpleQueue[messages.Envelope | RouteEvent]

    def answer(self, number: int, body: messages.Answer | messages.Pushed) -> None: ...


class TrainerSession:
    """The trainer of one node. The constructor loads everything, raises typed errors and answers `Ready`.

    It has more than 20 methods: it serves orders, steps, events of a route and the ranks of other devices in one loop.
    """

    def __init__(
        self,
        config: messages.TrainerConfig,
        channel: Channel,
        anchor_fd: int,
        gradient_fd: int,
        stage_socket: socket.socket | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._channel, self._clock = channel, clock or SystemClock()
        self._pace = StepPacer(config.minimum_step_seconds, config.compute_share)
        self._stall_share = StallShare()
        self._training = self._stopping = False
        self._pushed_at = 0.0
        self._steps = 0
        self._pending_orders: deque[messages.Envelope] = deque()
        devices = choose_devices(config.device)
        facts = combined_facts(devices, config.vram_fraction, config.memory_bytes)
        limit_device_memory(devices[0], facts, config.vram_fraction)
        end = StageIO(stage_socket, channel.events.put) if stage_socket is not None else None
        self._ranks: RankProcesses | None = None
        rendezvous: Rendezvous | None = None
        if len(devices) > 1:
            rendezvous_fd = open_anonymous_file("atoll-rendezvous")
            self._ranks = RankProcesses(config, (anchor_fd, gradient_fd, rendezvous_fd), self._exit_on_rank_failure)
            rendezvous = Rendezvous(devices, 0, rendezvous_fd, self._ranks.send_to_ranks)
        self._state = load_trainer_state(
            config, facts, end, self._clock, rendezvous, self._report_loading, self._report_trouble
        )
        assert not isinstance(self._state.loop, RankStage)
        self._loop = self._state.loop
        self._orders = ModelOrders(self._state, config, anchor_fd, gradient_fd)
        self._send_ready(messages.Probe(config.minimum_step_seconds, config.compute_share))

    def _report_loading(self, tokens: int) -> None:
        """Report loading progress to the daemon, at most once per `STATUS_INTERVAL_SECONDS`."""
        now = self._clock.monotonic()
        if now - self._pushed_at >= STATUS_INTERVAL_SECONDS:
            self._pushed_at = now
            self._channel.answer(0, messages.Loading(tokens))

    def _report_trouble(self, trouble: str) -> None:
        """Report why loading cannot continue."""
        self._channel.answer(0, messages.Loading(0, trouble))

    def _send_ready(self, probe: messages.Probe) -> None:
        anchor_E = self._orders.anchor_E
        if isinstance(self._loop, InnerLoop):
            self._loop.initialise_into(anchor_E)
        number = self._ranks.send_to_ranks(probe) if self._ranks is not None else 0
        # an error here ends this process and so the other ranks, which may wait in a collective operation
        tokens_per_second = self._state.probe(anchor_E, probe.minimum_step_seconds, probe.compute_share)
        if self._ranks is not None:
            self._ranks.await_ranks(number)
        self._channel.answer(0, self._state.ready_message(tokens_per_second))

    def _exit_on_rank_failure(self, why: messages.Refused) -> None:
        """Exit because a rank has ended. Called in a thread, since torch may block on the rank in the main thread."""
        self._channel.answer(0, why)
        os._exit(int(error_class(why.reason).exit_code))

    @contextmanager
    def _on_all_ranks(self, order: messages.Order) -> Iterator[None]:
        """Send the order to the other ranks, execute the block, and wait until they have executed it too."""
        if self._ranks is None:
            yield
            return
        number = self._ranks.send_to_ranks(order)
        try:
            yield  # an error other than a refusal ends this process, and so the other ranks
        except AtollError:
            self._ranks.await_ranks(number, refused=True)
            raise
        self._ranks.await_ranks(number)

    def serve(self) -> None:
        """Serve orders and train until `Stop`."""
        try:
            self._serve()
        except Exception:
            if self._ranks is not None:
                self._ranks.report_loss()
            raise

    def _serve(self) -> None:
        while not self._stopping:
            self._on_event(self._next_event())
            if self._pending_orders and self._between_steps:
                self._answer_order(self._pending_orders.popleft())
            elif self._may_work():
                self._work()
            if self._clock.monotonic() - self._pushed_at >= STATUS_INTERVAL_SECONDS:
                self._push()

    @property
    def _between_steps(self) -> bool:
        return self._loop is None or self._loop.between_steps

    def _may_work(self) -> bool:
        if not self._training or self._loop is None or not self._loop.has_work:
            return False
        return not self._wait_seconds(self._loop)

    @property
    def _is_timed(self) -> bool:
        """True if this step is timed, which waits for the device. Most steps on a GPU should run asynchronously."""
        always = self._state.device.type == "cpu" or self._pace.compute_share < 1
        return always or self._steps < TIMED_FIRST or self._steps % TIMED_EVERY == 0

    def _wait_seconds(self, loop: InnerLoop | StageLoop) -> float:
        """Seconds until the pace allows the next step or action."""
        now = self._clock.monotonic()
        return self._pace.wait_seconds(now) if loop.between_steps else self._pace.rest_seconds(now)

    def _next_event(self) -> messages.Envelope | RouteEvent | None:
        busy = self._may_work() or (self._pending_orders and self._between_steps)
        wait = 0.0 if busy else STATUS_INTERVAL_SECONDS
        if not busy and self._training and self._loop is not None and self._loop.has_work:
            wait = min(wait, self._wait_seconds(self._loop))
        try:
            return self._channel.events.get(block=wait > 0, timeout=wait)
        except queue.Empty:
            return None

    def _on_event(self, event: messages.Envelope | RouteEvent | None) -> None:
        if isinstance(event, messages.Envelope):
            self._pending_orders.append(event)
            if isinstance(event.body, messages.Stop | messages.KeepOptimizer) and isinstance(self._loop, StageLoop):
                # otherwise the order would wait for the end of a flush that other stages may never finish
                self._loop.leave(FlushAborted("the trainer stops"))
        elif event is not None:
            self._stage().on_route_event(event)

    def _work(self) -> None:
        loop, began = self._require_model(), self._clock.monotonic()
        computing = compute_clock_seconds(self._state.device, self._clock)
        was_between = loop.between_steps
        if isinstance(loop, InnerLoop) and not loop.await_data(STATUS_INTERVAL_SECONDS):
            return  # the training text is being fetched; orders are served meanwhile
        if self._ranks is not None and isinstance(loop, InnerLoop):  # `LeaderStage` sends a stage's actions itself
            self._ranks.send_to_ranks(messages.Step())
        result = loop.work()
        if was_between and (result is not None or not loop.between_steps):
            self._pace.begin(began)
        if self._is_timed:
            synchronize(self._state.device)
            seconds = self._clock.monotonic() - began
            computed = compute_clock_seconds(self._state.device, self._clock) - computing
            self._pace.record_work(began, WorkTime(seconds, min(seconds, computed)))
        if result is not None:
            self._steps += 1
            self._pace.end(result.tokens, result.loss)

    def _answer_order(self, order: messages.Envelope) -> None:
        try:
            if isinstance(order.body, messages.Evaluate) and isinstance(self._loop, StageLoop):
                check_allowed(self._training, "evaluate over a route while it is paused")
                self._loop.evaluate(partial(self._answer, order.number))
                return  # the answer follows when the route has computed the loss
            answer = self._execute(order.body)
        except AtollError as error:
            answer = refusal(error)
        self._push()  # before the answer, so that the caller sees the status after its order
        self._channel.answer(order.number, answer)

    def _answer(self, number: int, outcome: Outcome) -> None:
        self._channel.answer(number, refusal(outcome) if isinstance(outcome, AtollError) else loss_message(outcome))

    def _execute(self, order: messages.Message) -> messages.Answer:
        match order:
            case messages.Initialise():
                self._require_model().initialise_into(self._orders.anchor_E)  # this rank writes the whole anchor
                with self._on_all_ranks(order):
                    self._orders.anchor_loaded = False
            case messages.Train():
                self._require_model()
                check_allowed(self._orders.anchor_loaded, "train before an anchor was loaded")
                self._training = True
            case messages.Pause():
                self._pause(self._require_model())
            case messages.EnterRoute(plan_version, route, stage, stages):
                self._stage().enter_route(plan_version, route, stage, stages)
            case messages.WriteInitial(path):
                write_initial_weights(self._state.run, Path(path))
            case messages.KeepOptimizer() | messages.RestoreOptimizer():
                self._orders.move_optimizer(order)
            case messages.Stop():
                if self._ranks is not None:
                    self._ranks.send_to_ranks(order)
                self._stopping = True
            case _:
                return self._execute_on_all_ranks(order)
        return messages.Done()

    def _execute_on_all_ranks(self, order: messages.Message) -> messages.Answer:
        if not isinstance(order, messages.ModelOrder):
            raise InvalidTransition(f"the trainer has no order {type(order).__name__}")
        with self._on_all_ranks(order):
            answer = self._orders.execute(order)
        if isinstance(order, messages.SetLimits):
            self._pace.minimum_step_seconds = order.minimum_step_seconds
            self._pace.compute_share = order.compute_share
        return answer

    def _pause(self, loop: InnerLoop | StageLoop) -> None:
        self._training = False
        self._pace.clear_recent_steps()
        if isinstance(loop, StageLoop):
            loop.pause()

    # --- checks before an order ---------------------------------------------------------------------

    def _require_model(self) -> InnerLoop | StageLoop:
        self._orders.require_model()
        assert self._loop is not None
        return self._loop

    def _stage(self) -> StageLoop:
        if not isinstance(self._loop, StageLoop):
            raise InvalidTransition("this trainer holds no span: only a trainer with a span can be a stage of a route")
        return self._loop

    def _push(self) -> None:
        now = self._clock.monotonic()
        self._pushed_at = now
        if self._loop is None:
            self._channel.answer(0, messages.TrainerStatus())
            return
        loop, progress, text = self._loop, self._loop.progress, self._loop.data_report
        self._stall_share.look(now, loop.data_stall_seconds, self._training and loop.has_data)
        step_seconds = self._pace.step_seconds(now)
        stage = loop if isinstance(loop, StageLoop) else None
        self._channel.answer(
            0,
            messages.TrainerStatus(
                steps=progress.steps_total,
                tokens=progress.tokens_total,
                tokens_per_second=self._pace.tokens_per_step() / step_seconds if step_seconds else 0.0,
                step_seconds=step_seconds,
                busy_seconds_per_token=self._pace.busy_seconds_per_token(),
                train_loss=self._pace.loss(),
                data_stall_seconds=loop.data_stall_seconds,
                data_stall_share=self._stall_share.value,
                data_bytes_fetched=text.bytes_fetched,
                data_bytes_trained=text.bytes_trained,
                data_blocks=text.blocks,
                data_mirrors=text.mirrors,
                data_trouble=loop.data_trouble if self._training else "",
                samples_repeated=progress.samples_repeated,
                training=self._training and loop.has_data,
                progress_tokens=progress.tokens,
                progress_samples=progress.samples,
                skipped_steps=loop.skipped_steps,
                route_ready=stage is not None and stage.ready,
                route_trouble=stage.route_problem if stage is not None else "",
                flushes_aborted=stage.flushes_aborted if stage is not None else 0,
            ),
        )


def refusal(error: AtollError) -> messages.Refused:
    """Convert an error to an answer."""
    return messages.Refused(error.reason, str(error), error.remedy)
