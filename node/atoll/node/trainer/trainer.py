"""The daemon's handle on its trainer process: spawn it, give it orders, watch it, stop it.

The trainer is a child process with its own interpreter (spawned, never forked). A CUDA error or an out-of-memory kill
therefore ends the trainer, not the node's membership: the daemon sees `died` and spawns another trainer.

Daemon and trainer share the anchor and the pseudo-gradient in anonymous memory. Orders and answers pass over a socket
pair (`messages.py`). Every order has a deadline and raises `ChildDied` when the child has ended. A trainer that holds a
span has a second socket pair, for messages between it and the other stages of its route (`StageSocket`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import cast

from torch import Tensor

from atoll.core.built_in_shape import layer_offsets
from atoll.core.data_position import SampleRange
from atoll.core.errors import ChildDied, DeadlineExceeded, TrainerOutOfMemory, error_class
from atoll.node.data.source_deal import WeighedSources
from atoll.node.data.source_progress import MixtureProgress
from atoll.node.pipeline.route import RoutePlace
from atoll.node.pipeline.stage_socket import StageSocket
from atoll.node.system.shared_vectors import map_vector
from atoll.node.trainer import messages
from atoll.node.trainer.messages import TrainerConfig, TrainerStatus
from atoll.node.trainer.trainer_process import WORKER_MODULE, TrainerProcess
from atoll.node.training.progress import Snapshot
from atoll.v1 import plan_pb2

__all__ = ["Snapshot", "Trainer", "TrainerConfig", "TrainerExit", "TrainerFacts", "TrainerStatus"]

ORDER_TIMEOUT = timedelta(minutes=10)  # more than one inner step of a large model takes on a slow machine
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError", "out of memory", "can't allocate memory", "not enough memory")
_KILL_TIMEOUT = timedelta(seconds=10)

OnProgress = Callable[[messages.Loading], object]


def no_progress_callback(_: messages.Loading) -> None:
    """Ignore progress reports."""


@dataclass(frozen=True)
class TrainerFacts(messages.Ready):
    """The child's first answer, with values derived from it."""

    @cached_property
    def layers(self) -> plan_pb2.LayerTable:
        """Layer table of the whole model."""
        return plan_pb2.LayerTable.FromString(bytes.fromhex(self.layer_table_hex))

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """First element of each layer of the whole model, followed by the end of the last layer."""
        return layer_offsets(self.layers)

    @cached_property
    def mixture_progress(self) -> MixtureProgress | None:
        """Counter of the samples trained from each source; None without a mixture."""
        stages = [WeighedSources(start, weights) for start, weights in self.mixture]
        return MixtureProgress(self.sources, stages, self.sample_tokens) if stages else None

    @property
    def elements(self) -> int:
        """Elements of the whole model."""
        return self.layer_offsets[-1]

    @property
    def held_layers(self) -> range:
        """The layers that this trainer holds."""
        return range(0) if self.span is None else range(self.span[0], self.span[1] + 1)

    @property
    def holds_all(self) -> bool:
        """True if this trainer holds the whole model."""
        return len(self.held_layers) == len(self.layer_offsets) - 1

    @property
    def held_elements(self) -> int:
        """Elements of the held layers: the length of anchor and pseudo-gradient."""
        return self.layer_offsets[self.held_layers.stop] - self.layer_offsets[self.held_layers.start]

    @classmethod
    def of(cls, ready: messages.Ready) -> TrainerFacts:
        """Build the facts from the child's first answer."""
        return cls(**vars(ready))


@dataclass(frozen=True)
class TrainerExit:
    """Exit status of the child, with the last line of its log."""

    returncode: int  # negative: the signal that killed it
    last_line: str  # empty when the child logged nothing

    def __str__(self) -> str:
        how = f"was killed by signal {-self.returncode}" if self.returncode < 0 else f"ended with {self.returncode}"
        return f"the trainer {how}" + (f": {self.last_line}" if self.last_line else "")

    def error(self) -> ChildDied:
        """The error to raise to callers that need the trainer."""
        if any(word in self.last_line for word in _OUT_OF_MEMORY):
            return TrainerOutOfMemory(str(self), "lower micro_batch_samples, or use a larger device")
        hint = "; the system does that when its memory runs out" if self.returncode == -signal.SIGKILL else ""
        return ChildDied(f"{self}{hint}", "see `atoll logs --trainer`")


class Trainer:
    """One trainer process. `spawn` creates it; its owner must call `stop`.

    It has more than 20 methods because each order is one typed method.
    """

    program = WORKER_MODULE  # module that the child runs; benchmarks run others
    facts: TrainerFacts
    stage_socket: StageSocket | None = None  # of a trainer with a span; used by `RouteConnection`
    # fp32 [E] of the held layers, shared with the child:
    anchor: Tensor  # the parent writes it; the child reads it on orders and writes it in `initialise`
    pseudo_gradient: Tensor  # the child writes it in `snapshot`; valid until `apply` or `discard`

    def __init__(
        self, child: TrainerProcess, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, on_progress: OnProgress
    ) -> None:
        self.status = TrainerStatus()
        self.died: asyncio.Future[TrainerExit] = asyncio.get_running_loop().create_future()
        self._child, self._reader, self._writer = child, reader, writer
        self._on_progress, self._last_progress_at = on_progress, asyncio.get_running_loop().time()
        self._order_numbers = itertools.count(1)
        self._pending_answers: dict[int, asyncio.Future[messages.Answer]] = {
            0: asyncio.get_running_loop().create_future()
        }
        self._listening = asyncio.create_task(self._listen(), name="trainer-listen")

    @classmethod
    async def spawn(cls, config: TrainerConfig, *, log_path: Path, timeout: timedelta) -> Trainer:
        """Start a child process and `take` it."""
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
        """Send a child its configuration and wait until it has corpus, model and device. The trainer then owns it.

        Loading may take arbitrarily long. `timeout` limits the time between two progress reports; `on_progress` is
        called on each progress report. Raises the child's own error (`CorpusError`, `ModelTooLarge`, `ConfigError`),
        `ChildDied`, `DeadlineExceeded`.
        """
        try:
            reader, writer = await asyncio.open_connection(sock=child.control, limit=messages.MAX_LINE_BYTES)
            trainer = cls(child, reader, writer, on_progress)
        except BaseException:
            await child.end()
            raise
        try:
            if config.span is not None:
                trainer.stage_socket = await StageSocket.from_socket(child.stage_socket)
            writer.write(messages.Envelope(0, config).line())
            ready = await trainer._await_ready(timeout)
            assert isinstance(ready, messages.Ready)
            trainer.facts = TrainerFacts.of(ready)
            trainer.anchor, trainer.pseudo_gradient = (
                map_vector(descriptor, trainer.facts.held_elements) for descriptor in child.vector_fds
            )
        except BaseException:
            await trainer._kill()
            raise
        finally:
            child.release(keep_stage_socket=trainer.stage_socket is not None)
        return trainer

    # --- orders -----------------------------------------------------------------------------------------

    async def initialise(self, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Genesis: have the child write the run's seeded parameters into `anchor`. `load` must follow."""
        await self._order(messages.Initialise(), timeout)

    async def load(
        self, *, ranges: Sequence[SampleRange], committed_tokens: int, timeout: timedelta = ORDER_TIMEOUT
    ) -> None:
        """Set weights to `anchor` and reset progress. The optimiser's state is kept if it exists."""
        await self._order(messages.Load(tuple(ranges), committed_tokens), timeout)

    async def train(self, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Run inner steps until `pause`. Without data ranges nothing is trained."""
        await self._order(messages.Train(), timeout)

    async def pause(self, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Stop training at the next step boundary; returns when no step is under way."""
        await self._order(messages.Pause(), timeout)

    async def snapshot(self, start: int = 0, end: int | None = None, *, timeout: timedelta = ORDER_TIMEOUT) -> Snapshot:
        """Write anchor − weights of elements [`start`, `end`) to `pseudo_gradient` at the next step boundary.

        `end` = None means all elements from `start`. Training continues afterwards.
        """
        snapshot = await self._order(messages.TakeSnapshot(start, self._all[1] if end is None else end), timeout)
        assert isinstance(snapshot, Snapshot)
        return snapshot

    async def apply(
        self,
        *,
        ranges: Sequence[SampleRange],
        committed_tokens: int,
        moved: SampleRange | None = None,
        timeout: timedelta = ORDER_TIMEOUT,
    ) -> None:
        """Carry: weights := `anchor` + (weights − weights at the snapshot). Progress since the snapshot is kept.

        `moved`: the elements in which the anchor changed; None: all. Elements outside the snapshot are rebased.
        """
        await self._order(messages.Apply(tuple(ranges), committed_tokens, moved or self._all), timeout)

    async def rebase(
        self,
        *,
        ranges: Sequence[SampleRange],
        committed_tokens: int,
        consumed_samples: int = 0,
        moved: SampleRange | None = None,
        timeout: timedelta = ORDER_TIMEOUT,
    ) -> None:
        """A round committed without this node: weights := `anchor` + (weights − old anchor). All progress is kept.

        `moved`: the elements in which the anchor changed; None: all. `consumed_samples`: samples of the previous ranges
        that the round consumed nevertheless, because an earlier process of this node contributed them.
        """
        await self._order(
            messages.Rebase(tuple(ranges), committed_tokens, moved or self._all, consumed_samples), timeout
        )

    async def set_ranges(self, ranges: Sequence[SampleRange], *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Replace the data ranges by the samples that were not consumed at the loaded anchor.

        Keeps snapshot and progress.
        """
        await self._order(messages.SetRanges(tuple(ranges)), timeout)

    async def discard(self, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Forget the snapshot of an abandoned round; keep all progress."""
        await self._order(messages.Discard(), timeout)

    async def evaluate(self, *, timeout: timedelta = ORDER_TIMEOUT) -> messages.Loss:
        """Compute the held-out loss of `anchor` between two steps."""
        loss = await self._order(messages.Evaluate(), timeout)
        assert isinstance(loss, messages.Loss)
        return loss

    async def audit(
        self, own: Sequence[int], other: Sequence[int], part: SampleRange, *, timeout: timedelta = ORDER_TIMEOUT
    ) -> messages.AuditGains:
        """Measure how much an update lowers the loss on these samples, between two steps.

        The caller wrote the update to `part` of `pseudo_gradient`; the whole vector is overwritten. Raises
        `InvalidTransition` while a snapshot exists, and if the model is on several devices.
        """
        found = await self._order(messages.Audit(tuple(own), tuple(other), *part), timeout)
        assert isinstance(found, messages.AuditGains)
        return found

    async def generate(self, prompt: str, tokens: int, seed: int = 0, *, timeout: timedelta = ORDER_TIMEOUT) -> str:
        """Sample text from `anchor` between two steps."""
        text = await self._order(messages.Generate(prompt, tokens, seed), timeout)
        assert isinstance(text, messages.Text)
        return text.text

    async def limit(self, config: TrainerConfig, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Apply threads, pace and memory of `config` from the next step on. Raises `ModelTooLarge`."""
        limit = messages.SetLimits(
            config.cpu_threads, config.minimum_step_seconds, config.compute_share, config.vram_fraction
        )
        await self._order(limit, timeout)

    async def enter_route(self, route: RoutePlace, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Make the span this stage of a route; then run a `RouteConnection` over `stage_socket`. Weights do not change.

        Raises `InvalidRequest` when the span does not fit the stage: only a first or last stage holds the first or last
        layer.
        """
        await self._order(messages.EnterRoute(route.plan_version, route.route, route.stage, route.stages), timeout)

    async def write_initial_weights(self, path: Path, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Genesis of a model that this node cannot hold: write the initial parameters of all layers to a file.

        The file is raw fp32, little-endian, fsynced. Raises `DataDirUnusable`.
        """
        await self._order(messages.WriteInitial(str(path)), timeout)

    async def keep_optimizer(self, path: Path, *, timeout: timedelta) -> None:
        """Write the inner optimiser's state to `path`.

        Raises `InvalidTransition` if there is no state yet or it is on several devices, and `DataDirUnusable`.
        """
        await self._order(messages.KeepOptimizer(str(path)), timeout)

    async def restore_optimizer(self, path: Path, *, timeout: timedelta = ORDER_TIMEOUT) -> None:
        """Continue with a state that `keep_optimizer` wrote. Raises `CheckpointCorrupt`, and then changes nothing."""
        await self._order(messages.RestoreOptimizer(str(path)), timeout)

    async def stop(self, timeout: timedelta) -> None:
        """Order the child to stop; kill it after `timeout`. Safe to call twice, and when the child has ended."""
        with contextlib.suppress(ChildDied, DeadlineExceeded):
            await self._order(messages.Stop(), timeout)
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

    async def _order(self, order: messages.Order, timeout: timedelta) -> messages.Answer:
        if self.died.done():
            raise self._died_error()
        number = next(self._order_numbers)
        self._pending_answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(messages.Envelope(number, order).line())
        try:
            return await self._answer(number, timeout)
        except DeadlineExceeded as error:
            if isinstance(
                order, messages.Evaluate | messages.Audit | messages.Generate | messages.Stop
            ):  # takes long, or waits for other stages of a route
                raise
            self._child.kill()  # the trainer's device or disk hangs: a new process may work
            raise ChildDied(f"{error}: it was killed", f"see its log {self._child.log_path}") from error

    async def _await_ready(self, silence: timedelta) -> messages.Answer:
        """Wait for the child's first answer. Raises `DeadlineExceeded` after `silence` without progress."""
        loop, first = asyncio.get_running_loop(), self._pending_answers[0]
        try:
            while not first.done():
                left = self._last_progress_at + silence.total_seconds() - loop.time()
                if left <= 0:
                    raise DeadlineExceeded(f"the trainer made no loading progress for {silence.total_seconds():.0f} s")
                await asyncio.wait([first], timeout=left)
        except BaseException:
            del self._pending_answers[0]  # no caller waits for it any more
            raise
        return await self._answer(0, silence)

    async def _answer(self, number: int, timeout: timedelta) -> messages.Answer:
        try:
            async with asyncio.timeout(timeout.total_seconds()):
                answer = await self._pending_answers[number]
        except TimeoutError as error:
            raise DeadlineExceeded(f"the trainer did not answer within {timeout.total_seconds():.0f} s") from error
        finally:
            del self._pending_answers[number]
        if isinstance(answer, messages.Refused):
            raise error_class(answer.reason)(answer.message, answer.remedy)
        return answer

    async def _listen(self) -> None:
        """Dispatch the child's messages until it closes its end; then record how it ended."""
        try:
            while line := await self._reader.readline():
                envelope = messages.Envelope.parse(line)
                if isinstance(envelope.body, TrainerStatus):
                    self.status = envelope.body
                elif isinstance(envelope.body, messages.Loading):
                    self._last_progress_at = asyncio.get_running_loop().time()
                    self._on_progress(envelope.body)
                elif (waiting := self._pending_answers.get(envelope.number)) is not None and not waiting.done():
                    waiting.set_result(cast("messages.Answer", envelope.body))
        except ConnectionError:  # the child was killed with unread orders: treat it as end of file
            pass
        except ValueError:  # the channel is corrupt: the child cannot be used any more
            self._child.kill()
        finally:
            self._writer.close()  # a child that still runs ends itself when its socket closes
            if self.stage_socket is not None:
                self.stage_socket.close()
        returncode = await self._child.process.wait()
        self.died.set_result(TrainerExit(returncode, self._child.last_line()))
        last = self.status
        self.status = TrainerStatus(
            steps=last.steps,
            tokens=last.tokens,
            data_stall_seconds=last.data_stall_seconds,
            data_bytes_fetched=last.data_bytes_fetched,
            data_bytes_trained=last.data_bytes_trained,
            data_blocks=last.data_blocks,
        )
        for waiting in self._pending_answers.values():
            if not waiting.done():
                waiting.set_exception(self._died_error())

    def _died_error(self) -> ChildDied:
        return self.died.result().error()

    async def _kill(self) -> None:
        if not self.died.done():
            self._child.kill()
        try:
            async with asyncio.timeout(_KILL_TIMEOUT.total_seconds()):
                await asyncio.shield(self._listening)
        except TimeoutError as error:
            stuck = f"the trainer did not end within {_KILL_TIMEOUT.total_seconds():.0f} s of being killed"
            raise DeadlineExceeded(stuck, "its device or its disk blocks it: see the kernel's log") from error
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
