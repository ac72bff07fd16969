"""Pages that daemon and trainer share are locked on a GPU for as long as the vectors exist."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from atoll.core.files import open_anonymous_file
from atoll.node.trainer.messages import TrainerConfig
from atoll.node.trainer.model_orders import ModelOrders

CUDA = torch.device("cuda", 0)


class FakeRuntime:
    """CUDA's two functions; it counts the bytes that are locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    found = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def orders_of(elements: int) -> ModelOrders:
    state: Any = SimpleNamespace(elements=elements, device=CUDA)
    return ModelOrders(state, TrainerConfig("", None), *(open_anonymous_file("test") for _ in range(2)))


def test_both_vectors_are_locked_while_they_exist(runtime: FakeRuntime) -> None:
    orders = orders_of(1000)
    assert list(runtime.locked.values()) == [4000, 4000]
    del orders
    assert not runtime.locked


def test_a_trainer_without_layers_locks_nothing_and_complains_of_nothing(runtime: FakeRuntime) -> None:
    with capture_logs() as logs:
        orders_of(0)
    assert (runtime.locked, logs) == ({}, [])
