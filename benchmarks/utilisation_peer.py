"""What members of the utilisation benchmark that run a peer's optimiser share: the device, the loop, the answers.

{"contacts": [...]}   where the others are, as far as known                       →  {"contact": ...}
{"begin": {...}}      elements, step_seconds, inner_steps, mbit, tuning            →  {"begun": true}
{"look": true}        as of the end of the last round: {"at": …, "steps": …, "rounds": …, "arithmetic": …, …}

A look tells of the end of the last round, because a peer may stand still between two. Peers get more than Atoll's
pretended device: copies between device and host, and the inner optimiser, take none of its time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import psutil

from benchmarks.json_lines import serve


class QueuedDevice:
    """Takes `step_seconds` a step. Its caller may queue one step while another runs, as with a GPU."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._busy_until = time.monotonic()

    def step(self) -> float:
        """Queue one; returns for how many seconds the device had nothing to do before."""
        ahead = self._busy_until - self._step_seconds - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        now = time.monotonic()
        idle = max(0.0, now - self._busy_until)
        self._busy_until = max(self._busy_until, now) + self._step_seconds
        return idle


@dataclass
class RoundTotals:
    """Of the last round that ended, and all before."""

    at: float = field(default_factory=time.monotonic)
    steps: int = 0
    rounds: float = 0.0  # of the whole model; a part where fragments are averaged one after another
    abandoned: int = 0
    arithmetic: float = 0.0  # seconds in which the device was idle and the training thread computed
    codec: str = ""
    sent: int = 0
    cpu_seconds: float = 0.0


class PeerOptimizer(Protocol):
    """A peer's optimiser."""

    def connect(self, contacts: list[Any]) -> Any:
        """Start, or learn where the others are; returns where we are."""

    def begin(self, elements: int, inner_steps: int, mbit: float, tuning: str) -> None:
        """Build the model and its optimiser; `mbit` is what timeouts may be made from."""

    def step(self) -> None:
        """What a training loop calls after each backward pass."""

    def rounds(self) -> tuple[float, int]:
        """Committed by a majority, and not."""

    @property
    def codec(self) -> str:
        """How numbers travel."""

    def close(self) -> None:
        """Leave nothing."""


class Training:
    """The loop, in a thread."""

    def __init__(self, peer: PeerOptimizer, step_seconds: float) -> None:
        self._peer = peer
        self._device = QueuedDevice(step_seconds)
        self._account = RoundTotals(codec=peer.codec)
        self._error: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def look(self) -> dict[str, Any]:
        """Raises what ended the training."""
        if self._error is not None:
            raise self._error
        return asdict(self._account)

    def stop(self) -> None:
        """After the step under way, if that ends soon."""
        self._over.set()
        self._thread.join(5)

    def _run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self._error = error

    def _train(self) -> None:
        steps, arithmetic, computed = 0, 0.0, 0.0
        while not self._over.is_set():
            arithmetic += min(self._device.step(), computed)
            steps += 1
            computed = processor_seconds(self._peer.step)
            rounds, abandoned = self._peer.rounds()
            if rounds > self._account.rounds:
                family = [psutil.Process(), *psutil.Process().children(recursive=True)]
                times = [process.cpu_times() for process in family]
                self._account = RoundTotals(
                    steps=steps,
                    rounds=rounds,
                    abandoned=abandoned,
                    arithmetic=arithmetic,
                    codec=self._peer.codec,
                    sent=psutil.net_io_counters(pernic=False).bytes_sent,
                    cpu_seconds=sum(it.user + it.system for it in times),
                )


def processor_seconds(work: Callable[[], None]) -> float:
    """That this thread took for it."""
    before = time.thread_time()
    work()
    return time.thread_time() - before


async def serve_requests(peer: PeerOptimizer) -> None:
    """Until the input ends. Everything but the training runs in the main thread, from which libraries may fork."""
    training: Training | None = None

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal training
        if "contacts" in request:
            return {"contact": peer.connect(request["contacts"])}
        if "begin" in request:
            step_seconds = request["begin"].pop("step_seconds")
            peer.begin(**request["begin"])
            training = Training(peer, step_seconds)
            return {"begun": True}
        assert training is not None
        return training.look()

    try:
        await serve(answer)
    finally:
        if training is not None:
            training.stop()
        peer.close()
