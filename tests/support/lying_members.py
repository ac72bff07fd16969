"""Members that break the rules of an exchange: reducers whose averages are not the sums, and false sketches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from atoll.core.frames import Frame, FrameKind
from atoll.node.exchange.exchange_streams import PROTOCOL
from atoll.node.exchange.reducer import Reducer
from atoll.node.exchange.weighted_sum import PieceSource

Lie = Callable[[Tensor], Tensor]  # from the true average of a part, fp32 [E]

LIES: Mapping[str, Lie] = {
    "sign turned": lambda mean_E: -mean_E,
    "ten times": lambda mean_E: 10 * mean_E,
    "ten times, turned": lambda mean_E: -10 * mean_E,
    "zeros": torch.zeros_like,
    "1e38": lambda mean_E: torch.full_like(mean_E, 1e38),
    "100 more": lambda mean_E: mean_E + 100,
}


def noise_like(mean_E: Tensor) -> Tensor:
    """Noise of the average's norm."""
    noise_E = torch.randn(len(mean_E), generator=torch.Generator().manual_seed(5))
    return noise_E * (mean_E.norm() / math.sqrt(len(mean_E)))


def lie_in_sums(monkeypatch: pytest.MonkeyPatch, liar: Callable[[str], bool], lie: Lie) -> None:
    """Members for whom `liar` holds encode a lie in place of each average, and send it to all alike."""
    honest = Reducer._encode_mean

    def encode(self: Any, elements: int, values: Mapping[str, PieceSource]) -> tuple[memoryview, dict[str, float]]:
        body, factors = honest(self, elements, values)
        if liar(self._me):
            body = self._average.codec.encode(lie(self._average.codec.decode(body, elements)))
        return body, factors

    monkeypatch.setattr(Reducer, "_encode_mean", encode)


def is_sketches(protocol: str, frame: Frame) -> bool:
    """Whether a frame answers an audit."""
    return protocol == PROTOCOL and frame.kind is FrameKind.PART and not frame.header and len(frame.body) > 0


def turned_sketches(frame: Frame) -> Frame:
    """Sketches of what was not sent, of a size that might have been."""
    values = torch.frombuffer(bytearray(frame.body), dtype=torch.float32)
    return Frame(frame.kind, frame.header, (-3 * values).numpy().tobytes())
