"""Status that a node reports, from its trainer's figures."""

from __future__ import annotations

from types import SimpleNamespace

from atoll.node.run.status import LiveStatus
from atoll.node.trainer.messages import Loading, TrainerStatus
from atoll.v1 import membership_pb2 as mb
from atoll.v1.plan_pb2 import Span


def live_status(status: TrainerStatus, span: tuple[int, int] | None) -> LiveStatus:
    facts = SimpleNamespace(span=span, device_name="cpu")
    return LiveStatus(facts=facts, trainer=SimpleNamespace(status=status))  # type: ignore[arg-type]


def test_refused_layers_are_reported_until_other_layers_are_wanted() -> None:
    status, prefetcher = (
        live_status(TrainerStatus(), None),
        SimpleNamespace(span=range(0), round=0, refused=range(4, 8)),
    )
    status.local_state = SimpleNamespace(prefetcher=prefetcher, lost=())  # type: ignore[assignment]
    assert status.to_proto(0, 0).refused == Span(first=4, last=7)
    prefetcher.refused = range(0)
    assert not status.to_proto(0, 0).HasField("refused")


def test_the_time_of_the_held_layers_is_reported_once_it_is_measured() -> None:
    found = live_status(TrainerStatus(busy_seconds_per_token=0.25, tokens_per_second=3.0), (4, 7)).to_proto(0, 0)
    assert found.computed.layers == Span(first=4, last=7)
    assert found.computed.seconds_per_token == 0.25
    assert not live_status(TrainerStatus(tokens_per_second=3.0), (4, 7)).to_proto(0, 0).HasField("computed")
    assert not live_status(TrainerStatus(busy_seconds_per_token=0.25), None).to_proto(0, 0).HasField("computed")


def test_loading_progress_is_reported_only_while_the_node_joins() -> None:
    status = LiveStatus()
    status.show_loading_progress(Loading(0))
    assert status.detail == "starting"
    status.show_loading_progress(Loading(1234567))
    assert status.detail == "reading the corpus: 1,234,567 tokens so far"
    status.enter(mb.NODE_STATE_DRAINING, "leaving")
    status.show_loading_progress(Loading(2345678))
    assert status.detail == "leaving"
