"""One member of the all-reduce benchmark, in a lab's host: a line of JSON in, a line of JSON out.

{"contacts": [...]}  where the others are, as far as known        →  {"contact": ...}
{"elements": …, "codec": …, "number": …, "mbit": [...]}           →  {"prepared": true}
{"go": seconds}                                                    →  {"began": …, "ended": …, "peak_bytes": …}
{"check": true}                                                    →  {"error": …, "digest": …, "cpu_seconds": …}

Results are looked at when all members have theirs: they share cores, and who is done first still serves the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import sys
import threading
import time
from pathlib import Path
from typing import Any, Protocol

import psutil
import torch
from torch import Tensor

from benchmarks.json_lines import serve

PERIOD = 1 << 16  # elements after which vectors repeat, so that everybody knows the true mean
_EVERYBODY = 10**6  # a seed
_SAMPLE_SECONDS = 0.05
_SPREAD = {False: {"pieces": 1, "devices": 1}, True: {"pieces": 16, "devices": 8}}


class Method(Protocol):
    """How vectors are averaged."""

    async def connect(self, contacts: list[Any]) -> Any:
        """Start, or learn where the others are; returns where we are."""

    async def prepare(self, vector_E: Tensor, codec: str, number: int, mbit: list[float]) -> None:
        """Everything that is not timed."""

    async def average(self, seconds: float) -> Tensor:
        """The mean of all members' vectors; may be the vector itself, changed."""

    async def close(self) -> None:
        """Leave nothing."""


class RoundUsage:
    """Processor time of one round, and the most memory ever since the first one began, of this process and children."""

    _first: float | None = None  # bytes held when the first round began

    def __init__(self) -> None:
        me = psutil.Process()
        self._family = [me, *me.children(recursive=True)]  # looked for before the round: it takes milliseconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def begin(self) -> None:
        """The round begins."""
        self._peak = self._rss()
        RoundUsage._first = self._peak if RoundUsage._first is None else RoundUsage._first
        self._thread.start()
        self._cpu = self._seconds()

    def stop(self) -> float:
        """Bytes beyond what was held before the first round: with its vector, and the result's."""
        self._over.set()
        self._thread.join()
        return self._peak - (RoundUsage._first or 0.0)

    def cpu_seconds(self) -> float:
        """So far: who has its own result still serves others."""
        return self._seconds() - self._cpu

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            self._peak = max(self._peak, self._rss())

    def _rss(self) -> float:
        return float(sum(process.memory_info().rss for process in self._family))

    def _seconds(self) -> float:
        times = [process.cpu_times() for process in self._family]
        return sum(it.user + it.system for it in times)


def vector(index: int, elements: int) -> Tensor:
    """What member `index` brings. Half of it is everybody's: members who train agree as much."""
    own_P, everybodys_P = (
        torch.randn(PERIOD, generator=torch.Generator().manual_seed(seed)) * 1e-3 for seed in (index, _EVERYBODY)
    )
    return (own_P + everybodys_P).repeat(-(-elements // PERIOD))[:elements].clone()


def error_of(mean_E: Tensor, members: int) -> float:
    """Root mean square of the difference to the true mean, as a multiple of that mean's own, of the worst piece.

    Of four members who bring what `vector` gives, the mean that lacks one is 0.26 away. Infinite for what is no number.
    """
    true = sum((vector(i, PERIOD) for i in range(members)), torch.zeros(PERIOD)) / members
    squares = torch.stack([(piece.float() - true[: len(piece)]).square().mean() for piece in mean_E.split(PERIOD)])
    worst = float(squares.max()) if bool(squares.isfinite().all()) else math.inf
    return math.sqrt(worst) / float(true.square().mean().sqrt())


def digest_of(mean_E: Tensor) -> str:
    """Equal for equal bits."""
    return hashlib.sha256(mean_E.contiguous().numpy().tobytes()).hexdigest()


def method_of(name: str, index: int, members: int, address: str, directory: Path) -> Method:
    """Imports only what that method needs, and its environment has."""
    match name:
        case "atoll" | "atoll-p2p":
            from benchmarks.allreduce_methods import Atoll

            return Atoll(index, address, directory, direct=name == "atoll")
        case "gloo" | "gloo-pieces":
            from benchmarks.allreduce_methods import Gloo

            return Gloo(index, members, directory, **_SPREAD[name == "gloo-pieces"])
        case "hivemind":
            from benchmarks.allreduce_hivemind import Hivemind

            return Hivemind(index, members, address)
        case "torchft" | "torchft-pieces":
            from benchmarks.allreduce_torchft import Torchft

            return Torchft(index, members, address, **_SPREAD[name == "torchft-pieces"])
    raise SystemExit(f"no method is named {name}")


async def serve_requests(name: str, index: int, members: int, address: str, directory: Path) -> None:
    """Until the input ends."""
    method = method_of(name, index, members, address, directory)
    mean_E, watch = torch.empty(0), None

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        nonlocal mean_E, watch
        if "contacts" in request:
            return {"contact": await method.connect(request["contacts"])}
        if "elements" in request:
            vector_E = vector(index, request["elements"])
            await method.prepare(vector_E, request["codec"], request["number"], request["mbit"])
            watch = RoundUsage()
            return {"prepared": True}
        assert watch is not None
        if "check" in request:
            cpu_seconds = watch.cpu_seconds()
            checked, mean_E = mean_E, torch.empty(0)
            return {"error": error_of(checked, members), "digest": digest_of(checked), "cpu_seconds": cpu_seconds}
        try:
            mean_E, figures = await measured(method, watch, request["go"])
        except Exception as error:
            return {"problem": f"{type(error).__name__}: {error}"}
        return figures

    try:
        await serve(answer)
    finally:
        await method.close()


async def measured(method: Method, watch: RoundUsage, seconds: float) -> tuple[Tensor, dict[str, float]]:
    """One round: its result, and what it took."""
    watch.begin()
    began = time.monotonic()
    try:
        async with asyncio.timeout(seconds):
            mean_E = await method.average(seconds)
        ended = time.monotonic()
    finally:
        peak = watch.stop()
    return mean_E, {"began": began, "ended": ended, "peak_bytes": peak}


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve_requests(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5])))
