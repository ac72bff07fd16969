"""One member of the utilisation benchmark that runs `hivemind.Optimizer`, in hivemind's own environment.

Tunings: local steps whose parameters are averaged at the end of an epoch, at once ("waiting") or with the delta rule
("delayed", which waits at the next step); and hivemind's least idle mode, gradients that are accumulated through an
epoch, averaged and applied behind the next one ("accumulating"): one optimiser step per epoch, with gradients that are
one epoch old, which is less than H local steps do. The number is of seconds for matchmaking. What travels is fp16, or
of 8 bits. A round may take twice what it takes at half the link's rate, as hivemind advises.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import sys
from dataclasses import dataclass
from typing import Any

import hivemind
import torch
from hivemind.compression import CompressionBase, Float16Compression, Uniform8BitQuantization
from hivemind.optim.grad_averager import GradientAverager

from benchmarks.hivemind_dht import HivemindDht
from benchmarks.utilisation_peer import serve_requests

_LEAST_TIMEOUT = 30.0  # seconds for a round
_REQUEST_SHARE = 0.6  # of the time for matchmaking, that a request for a group may take
_DONE = re.compile(r"Averaged (?:parameters|gradients) with (\d+) peers")
_FAILED = re.compile(r"Averaging (?:gradients )?failed with")


@dataclass(frozen=True)
class Tuning:
    """One point of the grid."""

    local: bool
    delayed: bool
    matchmaking: float
    compression: type[CompressionBase] = Float16Compression


TUNINGS = {
    "waiting-2": Tuning(local=True, delayed=False, matchmaking=2.0),
    "waiting-5": Tuning(local=True, delayed=False, matchmaking=5.0),
    "delayed-5": Tuning(local=True, delayed=True, matchmaking=5.0),
    "waiting-2-int8": Tuning(local=True, delayed=False, matchmaking=2.0, compression=Uniform8BitQuantization),
    "accumulating-5": Tuning(local=False, delayed=True, matchmaking=5.0),
}


class NoOpOptimizer(torch.optim.Optimizer):
    """An inner optimiser whose work the device does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        """Nothing is left to do."""


class RoundCounter(logging.Handler):
    """Counts averaging rounds by what hivemind says of them: nothing else tells how many took part."""

    def __init__(self, members: int) -> None:
        super().__init__()
        self._majority = members // 2 + 1
        self.committed = 0
        self.abandoned = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        done = _DONE.search(text)
        if done is not None and int(done[1]) >= self._majority:
            self.committed += 1
        elif done is not None or _FAILED.search(text):
            self.abandoned += 1


def all_reduce_seconds(encoded_bytes: float, members: int, mbit: float) -> float:
    """In which links of that rate carry what a butterfly sends."""
    return 2 * (members - 1) / members * encoded_bytes / (mbit * 1e6 / 8)


class Hivemind:
    """`hivemind.Optimizer` around one tensor."""

    def __init__(self, index: int, members: int, address: str) -> None:
        self._members = members
        self._round_counter = RoundCounter(members)
        self._meeting = HivemindDht(address)
        self._optimizer: hivemind.Optimizer | None = None
        self._tuning = TUNINGS["waiting-2"]

    @property
    def codec(self) -> str:
        return "fp16" if self._tuning.compression is Float16Compression else "int8"

    def connect(self, contacts: list[Any]) -> Any:
        return self._meeting.connect(contacts)

    def begin(self, elements: int, inner_steps: int, mbit: float, tuning: str) -> None:
        for name in ("hivemind.optim.optimizer", "hivemind.optim.state_averager"):
            logging.getLogger(name).addHandler(self._round_counter)
        parameter = torch.nn.Parameter(torch.zeros(elements))
        self._tuning = chosen = TUNINGS[tuning]
        timeout = chosen.matchmaking + 2 * all_reduce_seconds(2 * elements, self._members, mbit / 2)
        timeout = max(timeout, _LEAST_TIMEOUT)
        group = {"request_timeout": _REQUEST_SHARE * chosen.matchmaking, "target_group_size": self._members}
        if chosen.local:
            mode: dict[str, Any] = {
                "use_local_updates": True,
                "delay_state_averaging": chosen.delayed,
                "state_averaging_compression": chosen.compression(),
                "averager_opts": {**group, "initialize_optimizer": False},
            }
        else:
            parameter.grad = torch.zeros(elements)
            mode = {
                "delay_grad_averaging": True,
                "delay_optimizer_step": True,
                "offload_optimizer": True,
                "reuse_grad_buffers": True,
                "average_state_every": 1_000_000,  # never: gradients are enough
                "grad_compression": chosen.compression(),
                "grad_averager_factory": functools.partial(GradientAverager, **group),
                "averager_opts": {**group, "initialize_optimizer": False},
            }
        self._optimizer = hivemind.Optimizer(
            dht=self._meeting.dht,
            run_id="utilisation",
            batch_size_per_step=1,
            target_batch_size=inner_steps * self._members,
            params=[parameter],
            optimizer=NoOpOptimizer,
            matchmaking_time=chosen.matchmaking,
            averaging_timeout=timeout,
            next_chunk_timeout=timeout,
            load_state_compression=Float16Compression(),
            verbose=True,
            **mode,
        )

    def step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.step()

    def rounds(self) -> tuple[float, int]:
        return self._round_counter.committed, self._round_counter.abandoned

    def close(self) -> None:
        for part in (self._optimizer, self._meeting.dht):
            if part is not None:
                part.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(serve_requests(Hivemind(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])))
