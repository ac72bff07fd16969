"""What the trainer process does between its first and last order: one loop of orders, messages and inner steps.

Orders are carried out at step boundaries, in the order in which they came; a stage of a route is at one when no flush
is under way. Between orders the session steps while it is told to train and has data; a paced node
(`minimum_step_seconds`) waits out the rest of each step with an ear on its orders. A stage does one action of its
flush at a time, and takes what neighbours send as it comes.
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
from atoll.core.errors import AtollError, FlushAborted, InvalidTransition, ModelTooLarge, error_class
from atoll.core.files import open_anonymous_file
from atoll.node.model.initial_weights_file import write_initial
from atoll.node.pipeline.evaluation import Outcome
from atoll.node.pipeline.rank_stage import FollowingStage
from atoll.node.pipeline.stage_io import CableEnd, RouteEvent
from atoll.node.pipeline.stage_loop import StageLoop
from atoll.node.trainer import messages as ms
from atoll.node.trainer.loading import load
from atoll.node.trainer.model_orders import OF_THE_MODEL, ModelOrders, require
from atoll.node.trainer.rank_processes import Followers
from atoll.node.trainer.step_pacing import Pace, Work
from atoll.node.training.device import computing_seconds, finish, limit_memory
from atoll.node.training.device_group import Several, devices_of, facts_of
from atoll.node.training.loop import InnerLoop

PUSH_SECONDS = 0.5
TIMED_FIRST, TIMED_EVERY = 4, 16  # steps on a GPU


class Channel(Protocol):
    """What the session needs of the control socket; the route's events come the same way."""

    events: queue.SimpleQueue[ms.Envelope | RouteEvent]

    def answer(self, number: int, body: ms.Answer | ms.Pushed) -> None: ...


class Session:
    """Loads everything (raising typed errors), says `Ready`, and then serves."""

    def __init__(
        self,
        config: ms.TrainerConfig,
        channel: Channel,
        anchor_fd: int,
        gradient_fd: int,
        cable: socket.socket | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._channel, self._clock = channel, clock or SystemClock()
        self._pace = Pace(config.minimum_step_seconds, config.compute_share)
        self._training = self._stopping = False
        self._pushed_at = 0.0
        self._steps = 0
        self._waiting: deque[ms.Envelope] = deque()  # orders
        devices = devices_of(config.device)
        facts = facts_of(devices, config.vram_fraction, config.memory_bytes)
        limit_memory(devices[0], facts, config.vram_fraction)
        end = CableEnd(cable, channel.events.put) if cable is not None else None
        self._followers: Followers | None = None
        several: Several | None = None
        if len(devices) > 1:
            meeting_fd = open_anonymous_file("atoll-meeting")
            self._followers = Followers(config, (anchor_fd, gradient_fd, meeting_fd), self._give_up)
            several = Several(devices, 0, meeting_fd, self._followers.tell)
        self._here = load(config, facts, end, self._clock, several, self._get_on)
        assert not isinstance(self._here.loop, FollowingStage)
        self._loop = self._here.loop
        self._orders = ModelOrders(self._here, config, anchor_fd, gradient_fd)
        self._introduce(ms.Probe(config.minimum_step_seconds, config.compute_share))

    def _get_on(self, tokens: int) -> None:
        """Tell the daemon, now and then, that loading does."""
        now = self._clock.monotonic()
        if now - self._pushed_at >= PUSH_SECONDS:
            self._pushed_at = now
            self._channel.answer(0, ms.Loading(tokens))

    def _introduce(self, probe: ms.Probe) -> None:
        anchor_E = self._orders.anchor_E
        if isinstance(self._loop, InnerLoop):
            self._loop.initialise_into(anchor_E)
        number = self._followers.tell(probe) if self._followers is not None else 0
        # what fails here ends this process, and theirs: they may wait in a sum
        tokens_per_second = self._here.probe(anchor_E, probe.minimum_step_seconds, probe.compute_share)
        if self._followers is not None:
            self._followers.confirm(number)
        self._channel.answer(0, self._here.introduction(tokens_per_second))

    def _give_up(self, why: ms.Refused) -> None:
        """A device's process is gone, so this trainer is of no use. Called in a thread; torch may wait for that one."""
        self._channel.answer(0, why)
        os._exit(int(error_class(why.reason).exit_code))

    @contextmanager
    def _together(self, order: ms.Order) -> Iterator[None]:
        """Followers do the same meanwhile, and are done afterwards."""
        if self._followers is None:
            yield
            return
        number = self._followers.tell(order)
        try:
            yield  # whatever fails but a refusal ends this process, and theirs
        except AtollError:
            self._followers.confirm(number, refused=True)
            raise
        self._followers.confirm(number)

    def serve(self) -> None:
        """Until `Stop`."""
        while not self._stopping:
            self._take(self._next_event())
            if self._waiting and self._between_steps:
                self._obey(self._waiting.popleft())
            elif self._may_work():
                self._work()
            if self._clock.monotonic() - self._pushed_at >= PUSH_SECONDS:
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
        """Whether to wait for the device: a GPU is ahead of its program, and should be in most steps."""
        always = self._here.device.type == "cpu" or self._pace.compute_share < 1
        return always or self._steps < TIMED_FIRST or self._steps % TIMED_EVERY == 0

    def _wait_seconds(self, loop: InnerLoop | StageLoop) -> float:
        """Until there may be work."""
        now = self._clock.monotonic()
        return self._pace.wait_seconds(now) if loop.between_steps else self._pace.rest_seconds(now)

    def _next_event(self) -> ms.Envelope | RouteEvent | None:
        busy = self._may_work() or (self._waiting and self._between_steps)
        wait = 0.0 if busy else PUSH_SECONDS
        if not busy and self._training and self._loop is not None and self._loop.has_work:
            wait = min(wait, self._wait_seconds(self._loop))
        try:
            return self._channel.events.get(block=wait > 0, timeout=wait)
        except queue.Empty:
            return None

    def _take(self, event: ms.Envelope | RouteEvent | None) -> None:
        if isinstance(event, ms.Envelope):
            self._waiting.append(event)
            if isinstance(event.body, ms.Stop) and isinstance(self._loop, StageLoop):
                self._loop.leave(FlushAborted("the trainer stops"))  # else it waits for a flush that others may not end
        elif event is not None:
            self._stage().take(event)

    def _work(self) -> None:
        loop, began = self._require_model(), self._clock.monotonic()
        computing = computing_seconds(self._here.device, self._clock)
        was_between = loop.between_steps
        if self._followers is not None and isinstance(loop, InnerLoop):  # a stage tells what it does by itself
            self._followers.tell(ms.Step())
        result = loop.work()
        if was_between and (result is not None or not loop.between_steps):
            self._pace.begin(began)
        if self._is_timed:
            finish(self._here.device)
            seconds = self._clock.monotonic() - began
            computed = computing_seconds(self._here.device, self._clock) - computing
            self._pace.worked(began, Work(seconds, min(seconds, computed)))
        if result is not None:
            self._steps += 1
            self._pace.end(result.tokens, result.loss)

    def _obey(self, order: ms.Envelope) -> None:
        try:
            if isinstance(order.body, ms.Evaluate) and isinstance(self._loop, StageLoop):
                require(self._training, "evaluate over a route while it is paused")
                self._loop.evaluate(partial(self._answer, order.number))
                return  # the answer comes when the route has found it
            answer = self._carry_out(order.body)
        except AtollError as error:
            answer = refusal(error)
        self._push()  # first, so that who gets the answer sees the status after it
        self._channel.answer(order.number, answer)

    def _answer(self, number: int, outcome: Outcome) -> None:
        self._channel.answer(number, refusal(outcome) if isinstance(outcome, AtollError) else ms.Loss(outcome))

    def _carry_out(self, order: ms.Message) -> ms.Answer:
        match order:
            case ms.Initialise():
                self._require_model().initialise_into(self._orders.anchor_E)  # followers have no part in it
                with self._together(order):
                    self._orders.loaded = False
            case ms.Train():
                self._require_model()
                require(self._orders.loaded, "train before an anchor was loaded")
                self._training = True
            case ms.Pause():
                self._pause(self._require_model())
            case ms.EnterRoute(plan_version, route, stage, stages):
                self._stage().enter_route(plan_version, route, stage, stages)
            case ms.WriteInitial(path):
                write_initial(self._here.run, Path(path))
            case ms.Stop():
                if self._followers is not None:
                    self._followers.tell(order)
                self._stopping = True
            case _:
                return self._carry_out_together(order)
        return ms.Done()

    def _carry_out_together(self, order: ms.Order | ms.Message) -> ms.Answer:
        if not isinstance(order, OF_THE_MODEL):
            raise InvalidTransition(f"the trainer has no order {type(order).__name__}")
        with self._together(order):
            answer = self._orders.carry_out(order)
        if isinstance(order, ms.Limit):
            self._pace.minimum_step_seconds = order.minimum_step_seconds
            self._pace.compute_share = order.compute_share
        return answer

    def _pause(self, loop: InnerLoop | StageLoop) -> None:
        self._training = False
        self._pace.forget()
        if isinstance(loop, StageLoop):
            loop.pause()

    # --- what an order needs ------------------------------------------------------------------------

    def _require_model(self) -> InnerLoop | StageLoop:
        if self._loop is None:
            raise ModelTooLarge("this trainer holds no layers: the model is too large for it", "give it a span")
        return self._loop

    def _stage(self) -> StageLoop:
        if not isinstance(self._loop, StageLoop):
            raise InvalidTransition("only a trainer with a span stands on a route")
        return self._loop

    def _push(self) -> None:
        now = self._clock.monotonic()
        self._pushed_at = now
        if self._loop is None:
            self._channel.answer(0, ms.TrainerStatus())
            return
        loop, progress = self._loop, self._loop.progress
        step_seconds = self._pace.step_seconds(now)
        stage = loop if isinstance(loop, StageLoop) else None
        self._channel.answer(
            0,
            ms.TrainerStatus(
                steps=progress.steps_total,
                tokens=progress.tokens_total,
                tokens_per_second=self._pace.tokens_per_step() / step_seconds if step_seconds else 0.0,
                step_seconds=step_seconds,
                busy_seconds_per_token=self._pace.busy_seconds_per_token(),
                train_loss=self._pace.loss(),
                data_stall_seconds=loop.data_stall_seconds,
                samples_repeated=progress.samples_repeated,
                training=self._training and loop.has_data,
                progress_tokens=progress.tokens,
                progress_samples=progress.samples,
                skipped_steps=loop.skipped_steps,
                route_ready=stage is not None and stage.ready,
                route_trouble=stage.trouble if stage is not None else "",
                flushes_aborted=stage.flushes_aborted if stage is not None else 0,
            ),
        )


def refusal(error: AtollError) -> ms.Refused:
    """As an answer."""
    return ms.Refused(error.reason, str(error), error.remedy)
