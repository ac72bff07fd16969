"""Metrics of a round: what changed since the head before."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.process_swarm import MODEL, SPEC

from atoll.core.clock import ManualClock
from atoll.core.manifest import Head
from atoll.core.run_spec import parse_run_spec
from atoll.node.run.round_metrics import RoundMetrics
from atoll.node.run.status import LiveStatus
from atoll.node.trainer.messages import TrainerStatus
from atoll.node.training.learning_rate import learning_rate
from atoll.node.wire.traffic import Traffic

RUN = parse_run_spec(SPEC.format(model=MODEL, nodes=2, tokens=10**6, corpus="x", round_tokens=1000, codec="fp32"))


class Node:
    """A node whose trainer and traffic say what the test wants."""

    def __init__(self) -> None:
        self.clock, self.status = ManualClock(), LiveStatus()
        self.traffic = Traffic(self.clock)
        self.metrics = RoundMetrics(RUN, self.status, self.traffic, self.clock)

    def trainer(self, **status: Any) -> None:
        self.status.trainer = cast("Any", SimpleNamespace(status=TrainerStatus(**status)))

    def trained(self, **status: Any) -> None:
        assert self.status.trainer is not None
        self.status.trainer.status = TrainerStatus(**status)


def head(number: int, committed_tokens: int = 0) -> Head:
    return cast("Head", SimpleNamespace(round=number, committed_tokens=committed_tokens))


def test_a_round_is_the_difference_between_two_heads() -> None:
    node = Node()
    node.trainer(tokens=1000, data_stall_seconds=3.0)
    node.traffic.sent["/x"], node.traffic.received["/y"], node.status.counters.exchange_seconds = 10, 20, 5.0
    assert node.metrics.head_moved(head(4, 2000)) is None
    node.clock.advance(20.0)
    node.trained(tokens=1512, data_stall_seconds=3.5, train_loss=2.5, busy_seconds_per_token=0.03125)
    node.traffic.sent["/x"], node.traffic.received["/y"], node.status.counters.exchange_seconds = 110, 220, 6.5
    node.status.counters.update_norm = 0.75
    found = node.metrics.head_moved(head(5, 3000))
    assert found is not None
    assert (found.round, found.tokens, found.seconds) == (5, 512, 20.0)
    assert (found.compute_seconds, found.stall_seconds, found.exchange_seconds) == (16.0, 0.5, 1.5)
    assert (found.train_loss, found.update_norm) == (2.5, 0.75)
    assert found.learning_rate == learning_rate(RUN, 2000)
    assert (found.bytes_sent, found.bytes_received) == (100, 200)


def test_a_head_that_is_not_newer_is_no_round() -> None:
    node = Node()
    assert node.metrics.head_moved(head(5)) is None
    assert node.metrics.head_moved(head(5)) is None
    assert node.metrics.head_moved(head(3)) is None  # a recovery
    found = node.metrics.head_moved(head(4))
    assert found is not None
    assert found.round == 4


def test_a_new_trainer_counts_from_zero() -> None:
    node = Node()
    node.trainer(tokens=9000, data_stall_seconds=90.0)
    node.metrics.head_moved(head(1))
    node.clock.advance(10.0)
    node.trainer(tokens=300, data_stall_seconds=0.5)
    found = node.metrics.head_moved(head(2))
    assert found is not None
    assert (found.tokens, found.stall_seconds) == (300, 0.5)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_diverged_is_not_reported_as_a_number(loss: float) -> None:
    node = Node()
    node.trainer()
    node.metrics.head_moved(head(1))
    node.trained(train_loss=loss, busy_seconds_per_token=loss, tokens=5)
    node.status.counters.update_norm = loss
    found = node.metrics.head_moved(head(2))
    assert found is not None
    assert (found.train_loss, found.update_norm, found.compute_seconds) == (0.0, 0.0, 0.0)
