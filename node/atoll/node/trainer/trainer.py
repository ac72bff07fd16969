"""The daemon's handle on its trainer process: spawn, order, watch, stop.

The trainer is a child with its own interpreter, spawned, never forked. The two share the anchor and the
pseudo-gradient through nameless memory and talk over a socket pair; every order has a deadline and raises
`ChildDied` when the child is gone. A trainer that holds a span has a second pair, for what passes between it and the
other stages of its route. A CUDA error or an out-of-memory kill therefore costs a trainer, not the membership: the
daemon sees `died` and spawns another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

from torch import Tensor

from atoll.core.data_position import SampleRange
from atoll.core.errors import ChildDied, DeadlineExceeded, error_class
from atoll.node.model.built_in_shape import layer_offsets
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.stage_socket import StageSocket
from atoll.node.system.shared_vectors import map_vector
from atoll.node.trainer import messages as ms
from atoll.node.trainer.messages import TrainerConfig, TrainerStatus
from atoll.node.trainer.trainer_process import WORKER_MODULE, TrainerProcess
from atoll.node.training.progress import Snapshot
from atoll.v1 import plan_pb2

__all__ = ["Snapshot", "Trainer", "TrainerConfig", "TrainerExit", "TrainerFacts", "TrainerStatus"]

ORDER_TIMEOUT = timedelta(minutes=10)  # one inner step of a large model on a slow machine, and some
_KILL_TIMEOUT = timedelta(seconds=10)

OnProgress = Callable[[ms.Loading], object]


def no_progress_callback(_: ms.Loading) -> None:
    """Nobody asks how far it is."""


@dataclass(frozen=True)
class TrainerFacts:
    """What the child found after loading."""

    layers: plan_pb2.LayerTable  # of the whole model, like all but `span`
    elements: int
    layer_offsets: tuple[int, ...]  # one entry more than there are layers
    corpus_digest: str
    corpus_samples: int
    device: str
    device_name: str
    device_memory_bytes: int  # what the owner allows of it
    device_uuid: str
    tokens_per_step: int
    tokens_per_second: float  # measured by a few real steps on scratch state
    layer_times: tuple[tuple[str, float, float], ...]  # kind; seconds a token, forward and backward
    span: tuple[int, int] | None  # the layers that are held, both included; None: none, the model is too large
    whole_model_bytes: int  # what all of them would take of the device

    @property
    def held(self) -> range:
        """The layers that are held."""
        return range(0) if self.span is None else range(self.span[0], self.span[1] + 1)

    @property
    def holds_all(self) -> bool:
        """Whether it is the whole model."""
        return len(self.held) == len(self.layer_offsets) - 1

    @property
    def held_elements(self) -> int:
        """Of the layers that are held: the length of anchor and pseudo-gradient."""
        return self.layer_offsets[self.held.stop] - self.layer_offsets[self.held.start]

    @classmethod
    def of(cls, ready: ms.Ready) -> TrainerFacts:
        """From the child's first word."""
        layers = plan_pb2.LayerTable.FromString(bytes.fromhex(ready.layer_table_hex))
        offsets = layer_offsets(layers)
        return cls(
            layers,
            offsets[-1],
            offsets,
            ready.corpus_digest,
            ready.corpus_samples,
            ready.device,
            ready.device_name,
            ready.device_memory_bytes,
            ready.device_uuid,
            ready.tokens_per_step,
            ready.tokens_per_second,
            ready.layer_times,
            ready.span,
            ready.whole_model_bytes,
        )


@dataclass(frozen=True)
class TrainerExit:
    """How the child ended."""

    returncode: int  # negative: the signal that killed it
    last_line: str  # of its log; empty when there is none

    def __str__(self) -> str:
        how = f"was killed by signal {-self.returncode}" if self.returncode < 0 else f"ended with {self.returncode}"
        return f"the trainer {how}" + (f": {self.last_line}" if self.last_line else "")


class Trainer:
    """One trainer process. Made by `spawn`; `stop` it in the end."""

    program = WORKER_MODULE  # of the child; benchmarks have others
    facts: TrainerFacts
    cable: StageSocket | None = None  # of a trainer with a span: for its route's bridge
    # fp32 [E] of the layers that are held, shared:
    anchor: Tensor  # the parent writes it; the child reads it when told, and writes it in initialise
    pseudo_gradient: Tensor  # the child writes it in snapshot; read it until apply or discard

    def __init__(
        self, child: TrainerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_progress: OnProgress
    ) -> None:
        self.status = TrainerStatus()
        self.died: asyncio.Future[TrainerExit] = asyncio.get_running_loop().create_future()
        self._child, self._reader, self._writer = child, reader, writer
        self._on_progress, self._last_progress_at = on_progress, asyncio.get_running_loop().time()
        self._order_numbers = itertools.count(1)
        self._pending_answers: dict[int, asyncio.Future[ms.Answer]] = {0: asyncio.get_running_loop().create_future()}
        self._listening = asyncio.create_task(self._listen(), name="trainer-listen")

    @classmethod
    async def spawn(cls, config: TrainerConfig, *, log_path: Path, timeout: timedelta) -> Trainer:
        """`take` of a new child."""
        return await cls.take(await TrainerProcess.start(log_path, cls.program), config, timeout=timeout)

    @classmethod
    async def take(
        cls,
        child: TrainerProcess,
        config: TrainerConfig,
        *,
        timeout: timedelta,
        on_progress: OnProgress = no_progress_callback,
    ) -> Trainer:
        """Tell a child what to train and wait until it has corpus, model and device; it is this trainer's then.

        That takes as long as it takes: `timeout` is for a child that does not get on; `on_progress` is told when it
        does. Raises the child's own error (`CorpusError`, `ModelTooLarge`, `ConfigError`), `ChildDied`,
        `DeadlineExceeded`.
        """
        try:
            reader, writer = await asyncio.open_connection(sock=child.control, limit=ms.MAX_LINE_BYTES)
            trainer = cls(child, reader, writer, on_progress)
        except BaseException:
            await child.end()
            raise
        try:
            if config.span is not None:
                trainer.cable = await StageSocket.from_socket(child.cable)
            writer.write(ms.Envelope(0, config).line())
            ready = await trainer._await_ready(timeout)
            assert isinstance(ready, ms.Ready)
            trainer.facts = TrainerFacts.of(ready)
            trainer.anchor, trainer.pseudo_gradient = (
                map_vector(descriptor, trainer.facts.held_elements) for descriptor in child.vector_fds
            )
        except BaseException:
            await trainer._kill()
            raise
        finally:
            child.release(keep_stage_socket=trainer.cable is not None)
        return trainer

    # --- orders -----------------------------------------------------------------------------------------

    async def initialise(self, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Genesis: the child writes the run's seeded parameters into `anchor`. `load` must follow."""
        await self._order(ms.Initialise(), timeout)

    async def load(
        self, *, ranges: Sequence[SampleRange], committed_tokens: int, timeout: timedelta = ORDER_TIMEOUT
    ) -> None:
        """Weights := `anchor`; progress is forgotten, AdamW's state kept when there is one."""
        await self._order(ms.Load(tuple(ranges), committed_tokens), timeout)

    async def train(self, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Step until paused. Without ranges nothing is trained."""
        await self._order(ms.Train(), timeout)

    async def pause(self, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Returns at a step boundary, with no step under way."""
        await self._order(ms.Pause(), timeout)

    async def snapshot(self, start: int = 0, end: int | None = None, *, timeout: timedelta = ORDER_TIMEOUT) -> Snapshot:
        """At the next step boundary: `pseudo_gradient` := anchor − weights, from element `start` to `end` (the last).

        Training goes on meanwhile.
        """
        taken = await self._order(ms.TakeSnapshot(start, self._all[1] if end is None else end), timeout)
        assert isinstance(taken, ms.SnapshotTaken)
        return Snapshot(taken.tokens, taken.samples, taken.steps, taken.fragment_tokens)

    async def apply(
        self,
        *,
        ranges: Sequence[SampleRange],
        committed_tokens: int,
        moved: SampleRange | None = None,
        timeout: timedelta = ORDER_TIMEOUT,
    ) -> None:
        """Carry: weights := `anchor` + (weights − weights at the snapshot); progress since the snapshot stays.

        `moved` are the elements in which the anchor is another one (all). Those that the snapshot does not hold are
        rebased.
        """
        await self._order(ms.Apply(tuple(ranges), committed_tokens, moved or self._all), timeout)

    async def rebase(
        self,
        *,
        ranges: Sequence[SampleRange],
        committed_tokens: int,
        consumed_samples: int = 0,
        moved: SampleRange | None = None,
        timeout: timedelta = ORDER_TIMEOUT,
    ) -> None:
        """A round went by without us: weights := `anchor` + (weights − old anchor); all progress stays.

        `moved` are the elements in which the anchor is another one (all). `consumed_samples` samples of the ranges
        before the round took all the same, for what an earlier life of this node brought.
        """
        await self._order(ms.Rebase(tuple(ranges), committed_tokens, moved or self._all, consumed_samples), timeout)

    async def set_ranges(self, ranges: Sequence[SampleRange], *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Other samples, not consumed as of the anchor that is loaded; a snapshot stays, and all progress."""
        await self._order(ms.SetRanges(tuple(ranges)), timeout)

    async def discard(self, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """An abandoned round: forget the snapshot, keep all progress."""
        await self._order(ms.Discard(), timeout)

    async def evaluate(self, *, timeout: timedelta = ORDER_TIMEOUT) -> float:
        """Held-out loss of `anchor`, nats per token; runs between two steps."""
        loss = await self._order(ms.Evaluate(), timeout)
        assert isinstance(loss, ms.Loss)
        return loss.value

    async def generate(self, prompt: str, tokens: int, seed: int = 0, *, timeout: timedelta = ORDER_TIMEOUT) -> str:
        """Text sampled from `anchor`; runs between two steps."""
        text = await self._order(ms.Generate(prompt, tokens, seed), timeout)
        assert isinstance(text, ms.Text)
        return text.text

    async def limit(self, config: TrainerConfig, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Threads, pace and memory as `config` says, from the next step on. Raises `ModelTooLarge`."""
        limit = ms.SetLimits(
            config.cpu_threads, config.minimum_step_seconds, config.compute_share, config.vram_fraction
        )
        await self._order(limit, timeout)

    async def enter_route(self, route: RoutePlace, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """The span is this stage from now on; run a `RouteConnection` over `cable` then. What it holds stays as it is.

        Raises `InvalidRequest` when the span is not such a stage's.
        """
        await self._order(ms.EnterRoute(route.plan_version, route.route, route.stage, route.stages), timeout)

    async def write_initial_weights(self, path: Path, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Genesis without the model: the run's initial parameters of all layers, raw fp32, little-endian, fsynced.

        Raises `DataDirUnusable`.
        """
        await self._order(ms.WriteInitial(str(path)), timeout)

    async def stop(self, timeout: timedelta) -> None:
        """End the child: by order, and after `timeout` by force. Safe to call when it is dead, and twice."""
        with contextlib.suppress(ChildDied, DeadlineExceeded):
            await self._order(ms.Stop(), timeout)
            await asyncio.wait([self.died], timeout=timeout.total_seconds())
        await self._kill()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.process.pid

    @property
    def _all(self) -> SampleRange:
        return (0, self.facts.held_elements)

    # --- the wire ---------------------------------------------------------------------------------------

    async def _order(self, order: ms.Order, timeout: timedelta) -> ms.Answer:
        if self.died.done():
            raise self._died_error()
        number = next(self._order_numbers)
        self._pending_answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(ms.Envelope(number, order).line())
        try:
            return await self._answer(number, timeout)
        except DeadlineExceeded as error:
            if isinstance(order, ms.Evaluate | ms.Generate | ms.Stop):  # may wait for others of a route, or be long
                raise
            self._child.kill()  # a device or a disk that hangs: another process may do better
            raise ChildDied(f"{error}: it was killed", f"{self._child.log_path} holds its output") from error

    async def _await_ready(self, silence: timedelta) -> ms.Answer:
        """The child's first answer. Raises `DeadlineExceeded` when it has not got on for so long."""
        loop, first = asyncio.get_running_loop(), self._pending_answers[0]
        try:
            while not first.done():
                left = self._last_progress_at + silence.total_seconds() - loop.time()
                if left <= 0:
                    raise DeadlineExceeded(f"the trainer loads, but did not get on for {silence.total_seconds():.0f} s")
                await asyncio.wait([first], timeout=left)
        except BaseException:
            del self._pending_answers[0]  # nobody wants it any more
            raise
        return await self._answer(0, silence)

    async def _answer(self, number: int, timeout: timedelta) -> ms.Answer:
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                answer = await self._pending_answers[number]
        except TimeoutError as error:
            raise DeadlineExceeded(f"the trainer did not answer within {timeout.total_seconds():.0f} s") from error
        finally:
            del self._pending_answers[number]
        if isinstance(answer, ms.Refused):
            raise error_class(answer.reason)(answer.message, answer.remedy)
        return answer

    async def _listen(self) -> None:
        """Reads until the child closes its end, then learns how it ended."""
        try:
            while line := await self._reader.readline():
                envelope = ms.Envelope.parse(line)
                if isinstance(envelope.body, TrainerStatus):
                    self.status = envelope.body
                elif isinstance(envelope.body, ms.Loading):
                    self._last_progress_at = asyncio.get_running_loop().time()
                    self._on_progress(envelope.body)
                elif (waiting := self._pending_answers.get(envelope.number)) is not None and not waiting.done():
                    waiting.set_result(cast("ms.Answer", envelope.body))
        except ConnectionError:  # killed with words of ours unread: the same end as end of file
            pass
        except ValueError:  # a broken channel: the child is of no use any more
            self._child.kill()
        finally:
            self._writer.close()  # a child that lives on without its socket ends itself
            if self.cable is not None:
                self.cable.close()
        returncode = await self._child.process.wait()
        self.died.set_result(TrainerExit(returncode, self._child.last_line()))
        self.status = TrainerStatus(steps=self.status.steps, tokens=self.status.tokens)
        for waiting in self._pending_answers.values():
            if not waiting.done():
                waiting.set_exception(self._died_error())

    def _died_error(self) -> ChildDied:
        return ChildDied(str(self.died.result()), f"{self._child.log_path} holds its output")

    async def _kill(self) -> None:
        if not self.died.done():
            self._child.kill()
        try:
            async with asyncio.timeout(_KILL_TIMEOUT.total_seconds()):
                await asyncio.shield(self._listening)
        except TimeoutError as error:
            held = f"the trainer does not end within {_KILL_TIMEOUT.total_seconds():.0f} s of being killed"
            raise DeadlineExceeded(held, "its device or its disk holds it: see the kernel's log") from error
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
