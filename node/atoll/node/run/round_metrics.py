"""The costs of each round on this node: changes of its counters from one committed round to the next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.core.clock import Clock
from atoll.core.manifest import Head
from atoll.core.run_spec import RunSpec
from atoll.node.run.status import LiveStatus
from atoll.node.trainer.trainer import Trainer
from atoll.node.training.learning_rate import learning_rate
from atoll.node.wire.traffic import Traffic
from atoll.v1 import membership_pb2 as mb


@dataclass(frozen=True)
class _Counters:
    """Counters at one moment. The training counters start again with each trainer process."""

    trainer: Trainer | None
    tokens: int
    stall_seconds: float
    exchange_seconds: float
    bytes_sent: int
    bytes_received: int


class RoundMetrics:
    """Measures rounds, each once."""

    def __init__(self, spec: RunSpec, status: LiveStatus, traffic: Traffic, clock: Clock) -> None:
        self._spec, self._status, self._traffic, self._clock = spec, status, traffic, clock
        self._head: Head | None = None  # of the last call
        self._at = 0.0  # monotonic
        self._counters: _Counters | None = None

    def head_moved(self, head: Head) -> mb.NodeMetrics | None:
        """Metrics since the previous head; None at the first head and at a head that is not newer."""
        before, since, at = self._counters, self._head, self._at
        self._head, self._at, self._counters = head, self._clock.monotonic(), self._read()
        if before is None or since is None or head.round <= since.round:
            return None
        return self._between(head.round, self._at - at, since.committed_tokens, before, self._counters)

    def _between(
        self, number: int, seconds: float, committed_tokens: int, before: _Counters, now: _Counters
    ) -> mb.NodeMetrics:
        training = self._status.training
        is_same = before.trainer is now.trainer
        tokens = now.tokens - before.tokens if is_same else now.tokens
        stalled = now.stall_seconds - before.stall_seconds if is_same else now.stall_seconds
        return mb.NodeMetrics(
            round=number,
            train_loss=_finite(training.train_loss),
            learning_rate=_finite(learning_rate(self._spec, committed_tokens)),
            tokens=max(0, tokens),
            seconds=round(seconds, 6),  # the coordinator refuses shorter times than 1 µs
            update_norm=_finite(self._status.counters.update_norm),
            compute_seconds=min(seconds, _finite(max(0, tokens) * training.busy_seconds_per_token)),
            stall_seconds=min(seconds, _finite(stalled)),
            exchange_seconds=_finite(now.exchange_seconds - before.exchange_seconds),
            bytes_sent=now.bytes_sent - before.bytes_sent,
            bytes_received=now.bytes_received - before.bytes_received,
        )

    def _read(self) -> _Counters:
        training = self._status.training
        return _Counters(
            trainer=self._status.trainer,
            tokens=training.tokens,
            stall_seconds=training.data_stall_seconds,
            exchange_seconds=self._status.counters.exchange_seconds,
            bytes_sent=self._traffic.sent.total(),
            bytes_received=self._traffic.received.total(),
        )


def _finite(value: float) -> float:
    """The value, or 0 (not measured) if it is negative or not finite: the coordinator refuses such values."""
    return max(0.0, value) if math.isfinite(value) else 0.0
