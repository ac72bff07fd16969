"""What the trainer process does between its first and last order: one loop of orders and inner steps.

Orders are carried out at step boundaries, in the order in which they came. Between orders the session steps
while it is told to train and has data; a paced node (`minimum_step_seconds`) waits out the rest of each step with an
ear on its orders.
"""

from __future__ import annotations

import queue
from collections import deque
from typing import Protocol

import torch

from atoll.core import log
from atoll.core.clock import Clock, SystemClock
from atoll.core.errors import AtollError, InvalidTransition
from atoll.core.run_spec import parse_run_spec
from atoll.node.training import messages as ms
from atoll.node.training.corpus import load_corpus
from atoll.node.training.device import (
    DeviceFacts,
    check_fits,
    choose_device,
    device_facts,
    limit_memory,
    too_large,
)
from atoll.node.training.loop import InnerLoop
from atoll.node.training.shape import layer_table, resolve_shape
from atoll.node.training.shared import map_vector, size_for
from atoll.node.training.tokenizer import load_tokenizer

PUSH_SECONDS = 0.5
RECENT_STEPS = 32


class Channel(Protocol):
    """What the session needs of the control socket."""

    orders: queue.SimpleQueue[ms.Envelope]

    def answer(self, number: int, body: ms.Answer | ms.TrainerStatus) -> None: ...


class Pace:
    """When steps may begin and how fast they came, over the last of them. Pure: it is told the time."""

    def __init__(self, minimum_step_seconds: float) -> None:
        self.minimum_step_seconds = minimum_step_seconds
        self._steps: deque[tuple[float, int, float]] = deque(maxlen=RECENT_STEPS)  # began, tokens, loss
        self._next = 0.0
        self._began = 0.0

    def begin(self, now: float) -> None:
        """A step begins."""
        self._began = now
        self._next = now + self.minimum_step_seconds

    def end(self, tokens: int, loss: float) -> None:
        """It is done."""
        self._steps.append((self._began, tokens, loss))

    def forget(self) -> None:
        """Training was interrupted: the gap is not a slow step."""
        self._steps.clear()

    def wait_seconds(self, now: float) -> float:
        """Until the next step may begin."""
        return max(0.0, self._next - now)

    def step_seconds(self, now: float) -> float:
        """Mean time from the beginning of one recent step to that of the next."""
        if not self._steps:
            return 0.0
        return max(now, self._next) / len(self._steps) - self._steps[0][0] / len(self._steps)

    def tokens_per_step(self) -> float:
        return sum(tokens for _, tokens, _ in self._steps) / max(1, len(self._steps))

    def loss(self) -> float:
        """Mean of the recent steps."""
        return sum(loss for _, _, loss in self._steps) / max(1, len(self._steps))


class Session:
    """Loads everything (raising typed errors), says `Ready`, and then serves."""

    def __init__(
        self, config: ms.TrainerConfig, channel: Channel, anchor_fd: int, gradient_fd: int, clock: Clock | None = None
    ) -> None:
        self._channel, self._clock = channel, clock or SystemClock()
        self._pace = Pace(config.minimum_step_seconds)
        self._training = self._loaded = self._snapped = self._stopping = False
        self._pushed_at = 0.0
        self._facts = device_facts(choose_device(config.device), config.vram_fraction)
        limit_memory(self._facts, config.vram_fraction)
        self._loop = _load(config, self._facts, self._clock)
        elements = self._loop.layout.elements
        for descriptor in (anchor_fd, gradient_fd):
            size_for(descriptor, elements)
        self._anchor_E, self._gradient_E = map_vector(anchor_fd, elements), map_vector(gradient_fd, elements)
        self._introduce(config.minimum_step_seconds)

    def _introduce(self, minimum_step_seconds: float) -> None:
        loop, facts = self._loop, self._facts
        try:
            speed = loop.probe(minimum_step_seconds)
            times = loop.layer_times()
        except torch.OutOfMemoryError as error:
            raise too_large("ran out of memory in its first step", facts) from error
        self._channel.answer(
            0,
            ms.Ready(
                layer_table_hex=layer_table(loop.spec, loop.shape).SerializeToString().hex(),
                corpus_digest=loop.corpus.digest,
                corpus_samples=loop.corpus.training_samples,
                device=facts.device,
                device_name=facts.name,
                device_memory_bytes=facts.memory_bytes,
                device_uuid=facts.uuid,
                tokens_per_step=loop.spec.tokens_per_step,
                tokens_per_second=speed,
                layer_times=times,
            ),
        )

    def serve(self) -> None:
        """Until `Stop`."""
        while not self._stopping:
            order = self._next_order()
            if order is not None:
                self._obey(order)
            elif self._may_step() and not self._pace.wait_seconds(self._clock.monotonic()):
                self._step()
            if self._clock.monotonic() - self._pushed_at >= PUSH_SECONDS:
                self._push()

    def _may_step(self) -> bool:
        return self._training and self._loop.has_data

    def _next_order(self) -> ms.Envelope | None:
        wait = self._pace.wait_seconds(self._clock.monotonic()) if self._may_step() else PUSH_SECONDS
        try:
            return self._channel.orders.get(block=wait > 0, timeout=min(wait, PUSH_SECONDS))
        except queue.Empty:
            return None

    def _step(self) -> None:
        self._pace.begin(self._clock.monotonic())
        result = self._loop.step()
        self._pace.end(result.tokens, result.loss)

    def _obey(self, order: ms.Envelope) -> None:
        try:
            answer = self._carry_out(order.body)
        except AtollError as error:
            answer = ms.Refused(error.reason, str(error), error.remedy)
        self._push()  # first, so that who gets the answer sees the status after it
        self._channel.answer(order.number, answer)

    def _carry_out(self, order: ms.Message) -> ms.Answer:
        loop = self._loop
        match order:
            case ms.Initialise():
                loop.initialise_into(self._anchor_E)
                self._loaded = False
            case ms.Load(ranges, committed_tokens):
                loop.load(self._anchor_E, ranges=ranges, committed_tokens=committed_tokens)
                self._loaded, self._snapped = True, False
            case ms.Train():
                self._require(self._loaded, "train before an anchor was loaded")
                self._training = True
            case ms.Pause():
                self._training = False
                self._pace.forget()
            case ms.TakeSnapshot(start, end):
                self._require(self._loaded, "take a snapshot before an anchor was loaded")
                return self._take_snapshot(slice(start, end))
            case ms.Apply(ranges, committed_tokens, moved):
                self._require(self._snapped, "apply an anchor without a snapshot")
                loop.apply(self._anchor_E, ranges=ranges, committed_tokens=committed_tokens, moved=slice(*moved))
                self._snapped = False
            case ms.Rebase(ranges, committed_tokens, moved):
                self._require(self._loaded, "rebase before an anchor was loaded")
                loop.rebase(self._anchor_E, ranges=ranges, committed_tokens=committed_tokens, moved=slice(*moved))
                self._snapped = False
            case ms.Discard():
                loop.discard()
                self._snapped = False
            case ms.Evaluate():
                return ms.Loss(loop.evaluate(self._anchor_E))
            case ms.Generate(prompt, tokens, seed):
                return ms.Text(loop.generate(self._anchor_E, prompt.encode(), tokens, seed))
            case ms.Limit(cpu_threads, minimum_step_seconds, vram_fraction):
                self._limit(cpu_threads, minimum_step_seconds, vram_fraction)
            case ms.Stop():
                self._stopping = True
            case _:
                raise InvalidTransition(f"the trainer has no order {type(order).__name__}")
        return ms.Done()

    def _take_snapshot(self, part: slice) -> ms.Taken:
        snapshot = self._loop.snapshot(part)
        self._loop.pseudo_gradient_into(self._gradient_E)
        self._snapped = True
        return ms.Taken(snapshot.tokens, snapshot.samples, snapshot.steps, snapshot.fragment_tokens)

    def _limit(self, cpu_threads: int, minimum_step_seconds: float, vram_fraction: float) -> None:
        facts = device_facts(torch.device(self._facts.device), vram_fraction)
        check_fits(self._loop.spec, self._loop.shape, facts)
        limit_memory(facts, vram_fraction)
        self._facts = facts
        torch.set_num_threads(cpu_threads)
        self._pace.minimum_step_seconds = minimum_step_seconds

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvalidTransition(f"the trainer was told to {what}")

    def _push(self) -> None:
        now = self._clock.monotonic()
        self._pushed_at = now
        loop, progress = self._loop, self._loop.progress
        step_seconds = self._pace.step_seconds(now)
        self._channel.answer(
            0,
            ms.TrainerStatus(
                steps=progress.steps_total,
                tokens=progress.tokens_total,
                tokens_per_second=self._pace.tokens_per_step() / step_seconds if step_seconds else 0.0,
                step_seconds=step_seconds,
                train_loss=self._pace.loss(),
                data_stall_seconds=loop.data_stall_seconds,
                samples_repeated=progress.samples_repeated,
                training=self._may_step(),
                progress_tokens=progress.tokens,
                progress_samples=progress.samples,
                skipped_steps=loop.stepper.skipped_steps if loop.stepper else 0,
            ),
        )


def _load(config: ms.TrainerConfig, facts: DeviceFacts, clock: Clock) -> InnerLoop:
    """Spec, tokenizer, room, corpus, model: in the order in which they can be wrong at the least cost."""
    spec = parse_run_spec(config.run_spec_toml)
    tokenizer = load_tokenizer(spec.data.tokenizer)
    check_fits(spec, resolve_shape(spec.model, tokenizer.vocabulary), facts)
    corpus = load_corpus(spec, config.corpus_path, tokenizer)
    log.get("trainer").info(
        "corpus_loaded",
        tokens=len(corpus.tokens),
        samples=corpus.training_samples,
        files=corpus.report.files,
        skipped_files=corpus.report.skipped_files,  # not text
        digest=corpus.digest,
    )
    return InnerLoop(spec, corpus, facts.device, config.cpu_threads, clock)
