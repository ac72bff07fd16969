"""One stage of the pipeline benchmark in `torch.distributed.pipelining` over gloo, waiting instead of computing.

A stage is a module whose forward and backward wait; activations are bf16 tensors, as the schedule sends them. It
answers what `pipeline_member` answers. torch 2 needs every rank's cooperation for a flush, so the driver's word to
begin counts for all: each steps until it is told to end, which all are at the same flush.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import tomllib
import warnings
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.json_lines import serve

_PORT = 29500
_TIMEOUT = timedelta(minutes=10)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SCHEDULES = {"gloo-1f1b": Schedule1F1B, "gloo-gpipe": ScheduleGPipe}


class _Wait(torch.autograd.Function):
    """`x` as it is, after a while; so is its gradient."""

    @staticmethod
    def forward(context: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        context.seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(context.seconds)
        return gradient.clone(), None, None


class _Stage(nn.Module):
    def __init__(self, seconds: list[float], dtype: torch.dtype) -> None:
        super().__init__()
        self._seconds = seconds
        self.weight = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        waited: Tensor = _Wait.apply(x * self.weight, *self._seconds)
        return waited


class Gloo:
    """One rank."""

    def __init__(self, method: str, index: int, members: int, address: str) -> None:
        self._method, self._most = method, 0
        self._index, self._members, self._address = index, members, address
        self._ended: list[float] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""

    def connect(self, contacts: list[Any]) -> Any:
        """Addresses are all that is needed; the group is made when all are known."""
        if contacts[0] is not None and None not in contacts and not dist.is_initialized():
            os.environ.update(GLOO_SOCKET_IFNAME="wan0", TP_SOCKET_IFNAME="wan0")
            store = dist.TCPStore(contacts[0], _PORT, self._members, is_master=self._index == 0, timeout=_TIMEOUT)
            dist.init_process_group("gloo", store=store, rank=self._index, world_size=self._members, timeout=_TIMEOUT)
        return self._address

    def begin(self, toml: str, seconds: list[float]) -> None:
        """Flush until told otherwise."""
        spec = tomllib.loads(toml)
        dtype = _DTYPES[spec["pipeline"]["codec"]]
        size = spec["data"]["sequence_length"], spec["model"]["dimension"]
        self._ended, self._problem = [], ""
        self._stop.clear()
        arguments = (_Stage(seconds, dtype), dtype, size, spec["pipeline"]["micro_batches"])
        self._thread = threading.Thread(target=self._guarded, args=arguments, daemon=True)
        self._thread.start()

    def _guarded(self, *arguments: Any) -> None:
        try:
            self._run(*arguments)
        except Exception as error:  # for whoever looks
            self._problem = repr(error)

    def _run(self, module: nn.Module, dtype: torch.dtype, size: tuple[int, int], micro_batches: int) -> None:
        stage = PipelineStage(module, self._index, self._members, torch.device("cpu"))
        self._most = micro_batches if self._method == "gloo-gpipe" else self._members - self._index
        schedule = _SCHEDULES[self._method](
            stage, micro_batches, loss_fn=lambda output, target: (output * target).mean()
        )
        x = torch.randn(micro_batches, *size).to(dtype).requires_grad_()
        go = torch.ones(1)
        while True:
            go[0] = 0.0 if self._stop.is_set() else 1.0
            dist.broadcast(go, 0)
            if not go[0]:
                return
            if self._index == 0:
                schedule.step(x)
            elif self._index == self._members - 1:
                schedule.step(target=torch.ones(micro_batches, *size, dtype=dtype))
            else:
                schedule.step()
            self._ended.append(time.monotonic())

    def look(self) -> dict[str, Any]:
        """As `pipeline_member`. Raises `RuntimeError` when it failed."""
        if self._problem:
            raise RuntimeError(self._problem)
        times = psutil.Process().cpu_times()
        return {
            "aborted": 0,
            "trouble": "",
            "ended": self._ended,
            "most": self._most,
            "sent": psutil.net_io_counters(pernic=False).bytes_sent,
            "cpu_seconds": times.user + times.system,
        }

    def end(self) -> None:
        """After the flush under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(50)


async def serve_requests(method: str, index: int, members: int, address: str) -> None:
    """Until the input ends."""
    gloo = Gloo(method, index, members, address)

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "contacts" in request:
            return {"contact": await asyncio.to_thread(gloo.connect, request["contacts"])}
        if "begin" in request:
            gloo.begin(request["begin"]["toml"], request["begin"]["seconds"])
            return {"begun": True}
        if "end" in request:
            await asyncio.to_thread(gloo.end)
            return {"ended": True}
        return gloo.look()

    with contextlib.suppress(asyncio.CancelledError):
        await serve(answer)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    asyncio.run(serve_requests(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
    os._exit(0)  # gloo's threads
