"""One stage of the pipeline benchmark in `hivemind.moe`, waiting instead of computing; in hivemind's own environment.

Every host but the first serves its stage as an expert. The driver, host 0, has the first stage in its own process
(libp2p dials no node from itself), sends each micro-batch through all others by autograd, and relays every hop, as
hivemind's client is made: what comes out of a stage comes back before it goes to the next one, and for the way back the
input goes there again beside the gradient. So the driver's link carries most, and the driver holds all inputs: experts
keep none between forward and backward. Micro-batches are in flight side by side, each in a thread.

What is easier for it than for the others: an expert steps its optimiser by itself after each backward, so a flush needs
no norms, no verdict and no step of all stages together; and its backward, which computes the forward again, waits only
for the backward. An expert takes one micro-batch at a time, as the others' stages do.

Activations are fp32 tensors that cross in fp16. Of hivemind's 8-bit codes, `UNIFORM_8BIT` loses the mean of whatever a
server answers (1.1.12 quantises in place there), blocks need bitsandbytes; quantiles are right (`quantile8`) at 35 ms
of a core each time: better on slow links, worse on fast ones.

It answers what `pipeline_member` answers; {"begin": {...}} also has `in_flight`, and there is one in its life.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import torch
from hivemind.moe.client.expert import RemoteExpert
from hivemind.moe.server import ModuleBackend, Server
from hivemind.moe.server.dht_handler import get_experts
from hivemind.proto.runtime_pb2 import CompressionType
from hivemind.utils.tensor_descr import BatchTensorDescriptor
from torch import Tensor, nn

from benchmarks.hivemind_dht import HivemindDht
from benchmarks.json_lines import serve

_CODECS = {"fp16": CompressionType.FLOAT16, "quantile8": CompressionType.QUANTILE_8BIT}
_HANDLERS = 4  # processes that take requests: hivemind's advice for an expert
_FIND_SECONDS = 60.0
_END_SECONDS = 50.0


class _Wait(torch.autograd.Function):
    """`x` as it is, after a while; so is its gradient. One at a time, as a device does."""

    device = threading.Lock()

    @staticmethod
    def forward(context: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        context.seconds = backward_seconds
        with _Wait.device:
            time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        with _Wait.device:
            time.sleep(context.seconds)
        return gradient.clone(), None, None


class _Stage(nn.Module):
    """In the driver, or `served`: there a forward with gradients is one that was waited for before."""

    def __init__(self, seconds: list[float], served: bool) -> None:
        super().__init__()
        self._seconds, self._served = seconds, served
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        again = self._served and torch.is_grad_enabled()
        waited: Tensor = _Wait.apply(x * self.weight, 0.0 if again else self._seconds[0], self._seconds[1])
        return waited


class Moe:
    """One host: an expert, or the client of all."""

    def __init__(self, index: int, members: int, address: str) -> None:
        self._index, self._members = index, members
        self._meeting = HivemindDht(address)
        self._server: Server | None = None
        self._ended: list[float] = []
        self._most = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._problem = ""

    def connect(self, contacts: list[Any]) -> Any:
        """Start, or learn where the others are; returns where we are."""
        return self._meeting.connect(contacts)

    def begin(self, toml: str, seconds: list[float], in_flight: int) -> None:
        """Serve, or drive."""
        spec = tomllib.loads(toml)
        size = spec["data"]["sequence_length"], spec["model"]["dimension"]
        stage = _Stage(seconds, served=self._index > 0)
        if self._index > 0:
            compression = _CODECS[spec["pipeline"]["codec"]]
            self._serve(stage, BatchTensorDescriptor(*size, dtype=torch.float32, compression=compression))
        else:
            micro_batches = [torch.randn(1, *size) for _ in range(spec["pipeline"]["micro_batches"])]
            self._most = min(in_flight, len(micro_batches))
            self._thread = threading.Thread(target=self._guarded, args=(stage, micro_batches), daemon=True)
            self._thread.start()

    def _serve(self, stage: _Stage, crossing: BatchTensorDescriptor) -> None:
        expert = ModuleBackend(
            _uid(self._index),
            stage,
            optimizer=torch.optim.SGD(stage.parameters(), lr=0.0),
            args_schema=(crossing,),
            outputs_schema=crossing,
            max_batch_size=1,
        )
        self._server = Server(self._meeting.dht, {expert.name: expert}, num_connection_handlers=_HANDLERS, start=True)

    def _guarded(self, stage: _Stage, micro_batches: Sequence[Tensor]) -> None:
        try:
            self._flush_on([stage, *self._found()], micro_batches)
        except Exception as error:  # for whoever looks
            self._problem = repr(error)

    def _found(self) -> list[RemoteExpert]:
        """The experts, once all can be found. Raises `TimeoutError`."""
        deadline = time.monotonic() + _FIND_SECONDS
        while not self._stop.wait(0.5) and time.monotonic() < deadline:
            experts = get_experts(self._meeting.dht, [_uid(index) for index in range(1, self._members)])
            if None not in experts:
                return list(experts)
        raise TimeoutError("not all experts were found")

    def _flush_on(self, stages: Sequence[nn.Module], micro_batches: Sequence[Tensor]) -> None:
        """One flush after another until told to end."""

        def there_and_back(x: Tensor) -> None:
            if not self._stop.is_set():
                y = x
                for stage in stages:
                    y = stage(y)
                y.backward(x)

        with ThreadPoolExecutor(self._most) as threads:
            while not self._stop.is_set():
                list(threads.map(there_and_back, micro_batches))
                self._ended.append(time.monotonic())

    def look(self) -> dict[str, Any]:
        """As `pipeline_member`. Raises `RuntimeError` when it failed."""
        if self._problem:
            raise RuntimeError(self._problem)
        times = [process.cpu_times() for process in (psutil.Process(), *psutil.Process().children(recursive=True))]
        return {
            "aborted": 0,
            "trouble": "",
            "ended": self._ended,
            "most": self._most,
            "sent": psutil.net_io_counters(pernic=False).bytes_sent,
            "cpu_seconds": sum(it.user + it.system for it in times),
        }

    def end(self) -> None:
        """After the micro-batches under way."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_END_SECONDS)

    def close(self) -> None:
        """Leave nothing."""
        self.end()
        part = self._server or self._meeting.dht  # a server ends its DHT
        if part is not None:
            part.shutdown()


def _uid(index: int) -> str:
    return f"stage.{index}"


async def serve_requests(index: int, members: int, address: str) -> None:
    """Until the input ends. hivemind forks, and wants to do so from the main thread."""
    moe = Moe(index, members, address)

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        if "contacts" in request:
            return {"contact": moe.connect(request["contacts"])}
        if "begin" in request:
            begin = request["begin"]
            moe.begin(begin["toml"], begin["seconds"], begin["in_flight"])
            return {"begun": True}
        if "end" in request:
            await asyncio.to_thread(moe.end)
            return {"ended": True}
        return moe.look()

    try:
        await serve(answer)
    finally:
        moe.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        asyncio.run(serve_requests(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]))
    except Exception as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)  # or what hivemind says as it goes would be taken for the reason
