"""Status that a node reports, from its trainer's figures."""

from __future__ import annotations

from types import SimpleNamespace

from atoll.node.run.status import LiveStatus
from atoll.node.trainer.messages import Envelope, Loading, TrainerStatus
from atoll.v1 import membership_pb2 as mb
from atoll.v1.plan_pb2 import Span


def live_status(status: TrainerStatus, span: tuple[int, int] | None) -> LiveStatus:
    facts = SimpleNamespace(span=span, device_name="cpu", text_left_out="", mixture_progress=None)
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


def test_the_owner_is_told_of_the_training_text() -> None:
    mirrors = (("https://a", "server", 0, "https://a answers 503"), ("https://b", "server", 300, ""))
    trainer = TrainerStatus(
        data_stall_share=0.25,
        data_bytes_fetched=300,
        data_bytes_trained=200,
        data_blocks=(1, 0, 2, 3),
        data_mirrors=mirrors,
    )
    status = live_status(Envelope.parse(Envelope(0, trainer).line()).body, None)  # type: ignore[arg-type]
    found = status.to_json(0, 0)
    assert found["data_fetched_per_trained"] == 1.5
    assert found["data_blocks"] == {"cache": 1, "directory": 0, "server": 2, "members": 3}
    assert found["data_mirrors"][0]["problem"] == "https://a answers 503"
    sent = status.to_proto(0, 0)
    assert (sent.data_stall_share, sent.data_bytes_fetched, sent.data_bytes_trained) == (0.25, 300, 200)
    assert "https" not in str(sent)  # addresses of mirrors stay with the owner


def test_loading_progress_is_reported_only_while_the_node_joins() -> None:
    status = LiveStatus()
    status.show_loading_progress(Loading(0))
    assert status.detail == "starting"
    status.show_loading_progress(Loading(1234567))
    assert status.detail == "reading the corpus: 1,234,567 tokens so far"
    status.enter(mb.NODE_STATE_DRAINING, "leaving", mb.NODE_REASON_STOPPED)
    status.show_loading_progress(Loading(2345678))
    assert status.detail == "leaving"
