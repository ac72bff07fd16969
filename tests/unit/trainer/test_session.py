"""The trainer's orders without a process: pace, refusals, messages."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.decoders import initialise

from atoll.core.built_in_shape import ModelShape
from atoll.core.clock import SystemClock
from atoll.core.errors import ConfigError, DataDirUnusable, InvalidRequest, ModelTooLarge
from atoll.core.files import open_anonymous_file
from atoll.core.run_spec import parse_run_spec
from atoll.node.model.llama import Decoder
from atoll.node.model.run_model import run_model, write_initial_weights
from atoll.node.pipeline.stage_io import RouteEvent, StageIO
from atoll.node.system.shared_vectors import map_vector
from atoll.node.trainer import messages
from atoll.node.trainer import session as session_module
from atoll.node.trainer.loading import load_trainer_state
from atoll.node.trainer.session import TrainerSession
from atoll.node.trainer.step_pacing import TIMED_STEPS, StepPacer, WorkTime
from atoll.node.training.device import DeviceFacts, choose_device, compute_clock_seconds, device_facts
from atoll.v1 import plan_pb2

SPEC = """
version = 1
[run]
name = "t"
stop_tokens = 100000
[model]
{model}
[data]
path = {path}
sequence_length = 16
validation_samples = 8
[sync]
round_tokens = 1000
"""
TINY = "dimension = 32\nlayers = 1\nheads = 2\nkv_heads = 2\nhidden_dimension = 32"


class FakeChannel:
    """Orders that were written beforehand; answers kept by number. Status pushes are kept apart."""

    def __init__(self, *orders: messages.Order) -> None:
        self.events: queue.SimpleQueue[messages.Envelope | RouteEvent] = queue.SimpleQueue()
        for number, order in enumerate(orders, start=1):
            self.events.put(messages.Envelope(number, order))
        self.answers: dict[int, messages.Answer] = {}
        self.pushed: list[messages.TrainerStatus] = []

    def answer(self, number: int, body: messages.Answer | messages.Pushed) -> None:
        if isinstance(body, messages.TrainerStatus):
            self.pushed.append(body)
        elif not isinstance(body, messages.Loading):
            self.answers[number] = body


def run(
    tmp_path: Path, *orders: messages.Order, model: str = TINY, device: str = "cpu", span: tuple[int, int] | None = None
) -> FakeChannel:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 100)
    channel = FakeChannel(*orders, messages.Stop())
    config = messages.TrainerConfig(SPEC.format(model=model, path=json.dumps(str(tmp_path))), device=device, span=span)
    descriptors = [open_anonymous_file("anchor"), open_anonymous_file("gradient")]
    try:
        session = TrainerSession(config, channel, *descriptors)
        session.serve()
        ready = channel.answers[0]
        assert isinstance(ready, messages.Ready)
        if session._loop is not None:
            session._loop.close()
            written = map_vector(descriptors[0], session._state.elements)
            assert written.any() == (messages.Initialise() in orders)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return channel


def test_orders_that_make_no_sense_are_refused_and_the_next_is_obeyed(tmp_path: Path) -> None:
    channel = run(
        tmp_path,
        messages.Train(),
        messages.TakeSnapshot(0, 9),
        messages.Apply((), 0, (0, 9)),
        messages.Initialise(),
        messages.Load(((0, 100),), 0),
        messages.Apply((), 0, (0, 9)),
        messages.TakeSnapshot(0, 9),
        messages.SetRanges(((0, 100),)),
        messages.Apply(((0, 100),), 10, (0, 99)),
        messages.Discard(),
        messages.Evaluate(),
    )
    reasons = {
        number: answer.reason for number, answer in channel.answers.items() if isinstance(answer, messages.Refused)
    }
    assert reasons == dict.fromkeys((1, 2, 3, 6), "InvalidTransition")
    assert channel.answers[7] == messages.Snapshot(0, 0, 0, 0)
    loss = channel.answers[11]
    assert isinstance(loss, messages.Loss)
    assert loss.value == pytest.approx(5.5, abs=0.2)  # ln 256: an untrained model of bytes
    assert channel.answers[12] == messages.Done()
    assert not channel.pushed[-1].training


def test_layers_that_an_earlier_trainer_measured_are_not_measured_again(tmp_path: Path) -> None:
    """Measuring takes seconds, and a head's logits."""
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 100)
    known = (("embedding", 1.0, 2.0), ("block", 4.0, 8.0), ("head", 16.0, 32.0))
    spec = SPEC.format(model=TINY, path=json.dumps(str(tmp_path)))
    near, far = socket.socketpair()
    with near, far:
        config = messages.TrainerConfig(spec, device="cpu", span=(0, 1), layer_times=known)
        state = load_trainer_state(
            config, device_facts(choose_device("cpu")), StageIO(far, lambda _: None), SystemClock()
        )
        ready = state.ready_message(state.probe(torch.empty(0), 0.0))
        assert state.loop is not None
        state.loop.close()
        near.shutdown(socket.SHUT_RDWR)
    assert ready.layer_times == known
    assert ready.tokens_per_second == pytest.approx(1 / (2 * (1.0 + 4.0) + 2.0 + 8.0))


def test_a_model_of_which_not_a_layer_fits_is_refused_before_the_corpus_is_read(tmp_path: Path) -> None:
    with pytest.raises(ModelTooLarge, match="too large"):
        run(tmp_path, model='preset = "7b"\nvocabulary = 2000000000\nhidden_dimension = 9000000000')


def test_a_model_that_does_not_fit_but_can_be_cut_leaves_a_trainer_that_holds_nothing_and_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def holds_a_layer(device: torch.device, vram_fraction: float, memory_bytes: int) -> DeviceFacts:
        return DeviceFacts("cpu", "a small machine", 400_000)

    monkeypatch.setattr(session_module, "combined_facts", holds_a_layer)
    path = tmp_path / "initial"
    channel = run(
        tmp_path,
        *(
            messages.Initialise(),
            messages.Load((), 0),
            messages.Train(),
            messages.Pause(),
            messages.TakeSnapshot(0, 0),
            messages.Discard(),
        ),
        *(
            messages.Evaluate(),
            messages.Generate("a", 1, 0),
            messages.EnterRoute(1, 0, 0, 2),
            messages.WriteInitial(str(path)),
        ),
        model=TINY.replace("layers = 1", "layers = 40"),
    )
    reasons = {
        number: answer.reason for number, answer in channel.answers.items() if isinstance(answer, messages.Refused)
    }
    assert reasons == dict.fromkeys(range(1, 7), "ModelTooLarge") | dict.fromkeys((7, 8, 9), "InvalidTransition")
    ready = channel.answers[0]
    assert isinstance(ready, messages.Ready)
    assert (ready.span, ready.tokens_per_second) == (None, 0.0)
    assert [kind for kind, *_ in ready.layer_times] == ["embedding", "block", "head"]
    assert all(forward > 0 and backward > 0 for _, forward, backward in ready.layer_times)
    table = plan_pb2.LayerTable.FromString(bytes.fromhex(ready.layer_table_hex))
    assert len(table.layers) == 42
    assert path.stat().st_size == 4 * sum(row.parameters for row in table.layers)
    assert channel.answers[10] == messages.Done()


def test_a_span_that_does_not_fit_or_is_none_of_the_model_s_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InvalidRequest, match="layers 0 to 2"):
        run(tmp_path, span=(1, 3))
    with pytest.raises(InvalidRequest, match="not a span"):
        run(tmp_path, span=(2, 1))
    monkeypatch.setattr(session_module, "combined_facts", lambda *_: DeviceFacts("cpu", "a small machine", 10_000))
    with pytest.raises(ModelTooLarge, match="layers 0 to 1"):
        run(tmp_path, span=(0, 1))


@pytest.mark.parametrize("tied", [False, True])
def test_initial_parameters_in_a_file_and_in_spans_are_those_of_the_whole_model(tmp_path: Path, tied: bool) -> None:
    shape = ModelShape(256, 32, 2, 2, 2, 32, tie_embeddings=tied)
    decoder = Decoder(shape)
    initialise(decoder, 7)
    whole = b"".join(parameter.detach().numpy().tobytes() for parameter in decoder.parameters())
    model = f"{TINY}\ntie_embeddings = {str(tied).lower()}".replace("layers = 1", "layers = 2")
    text = SPEC.format(model=model, path='"x"').replace('name = "t"', 'name = "t"\nseed = 7')
    run = run_model(parse_run_spec(text), 256)
    write_initial_weights(run, tmp_path / "initial")
    assert (tmp_path / "initial").read_bytes() == whole
    with pytest.raises(DataDirUnusable):
        write_initial_weights(run, tmp_path / "no" / "such folder")


@pytest.mark.parametrize("device", ["cuda:99", "tpu", "no such thing"])
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, device: str) -> None:
    with pytest.raises(ConfigError):
        run(tmp_path, device=device)


def test_limits_change_between_two_steps(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        channel = run(
            tmp_path,
            messages.Initialise(),
            messages.Load(((0, 100),), 0),
            messages.SetLimits(1, 0.0, 1.0, 0.5),
            messages.Train(),
            messages.TakeSnapshot(0, 9),
        )
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert channel.answers[3] == messages.Done()  # a CPU has no memory of its own to bound


@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_new_pace_holds_from_the_next_step(before: float, after: float) -> None:
    pace = StepPacer(before)
    pace.begin(10.0)
    pace.minimum_step_seconds = after
    assert pace.wait_seconds(10.0) == pytest.approx(before)
    pace.begin(20.0)
    assert pace.wait_seconds(20.0) == pytest.approx(after)


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=30), st.floats(0.01, 1.0), st.integers(1, 4))
def test_who_computes_for_a_share_of_the_time_rests_after_each_piece(
    pieces: list[float], share: float, in_step: int
) -> None:
    pace, now, computed, done = StepPacer(0.0, share), 0.0, 0.0, []
    for number, seconds in enumerate(pieces):
        between = number % in_step == 0
        now += pace.wait_seconds(now) if between else pace.rest_seconds(now)
        if between:
            pace.begin(now)
        pace.record_work(now, WorkTime(seconds, seconds))
        now, computed = now + seconds, computed + seconds
        if number % in_step == in_step - 1:
            pace.end(64, 1.0)
            done.append(computed)
    timed = done[1:]  # the first step warms up
    if timed:
        before = done[-1 - min(len(timed), TIMED_STEPS)]
        per_token = (done[-1] - before) / (64 * min(len(timed), TIMED_STEPS))
        assert pace.busy_seconds_per_token() == pytest.approx(per_token / share)
        pace.compute_share = 1.0  # the owner lends all of it
        assert pace.busy_seconds_per_token() == pytest.approx(per_token)
        pace.compute_share = share
    now += pace.rest_seconds(now)
    assert computed / now == pytest.approx(share)


def test_who_sleeps_does_not_compute() -> None:
    device, clock = torch.device("cpu"), SystemClock()
    before = compute_clock_seconds(device, clock)
    other = threading.Thread(target=lambda: sum(range(10**7)))
    other.start()
    other.join()
    time.sleep(0.2)
    assert compute_clock_seconds(device, clock) - before < 0.1
    sum(range(10**7))
    assert compute_clock_seconds(device, clock) - before > 0.02


works = st.builds(
    lambda computed, waited: WorkTime(computed + waited, computed), st.floats(0.001, 1.0), st.floats(0.0, 2.0)
)


@given(st.lists(works, min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_who_waited_for_cores_rests_that_much_less(pieces: list[WorkTime], share: float) -> None:
    pace, now = StepPacer(0.0, share), 0.0
    for work in pieces:
        now += pace.wait_seconds(now)
        pace.begin(now)
        pace.record_work(now, work)
        now += work.seconds
        pace.end(64, 1.0)
    now += pace.rest_seconds(now)
    took = [max(work.computed / share, work.seconds) for work in pieces]
    assert now == pytest.approx(sum(took))
    timed = took[1:][-TIMED_STEPS:]  # the first step warms up
    assert pace.busy_seconds_per_token() == pytest.approx(sum(timed) / (64 * max(1, len(timed))))


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=50), st.floats(0.0, 0.5))
def test_a_paced_node_is_never_faster_than_its_pace(durations: list[float], minimum: float) -> None:
    pace, now = StepPacer(minimum), 0.0
    for duration in durations:
        now += pace.wait_seconds(now)
        pace.begin(now)
        now += duration
        pace.end(64, 1.0)
    assert pace.step_seconds(now) >= min(durations[-32:]) * 0.999
    assert pace.step_seconds(now) >= minimum * 0.999
    assert pace.tokens_per_step() == 64
    pace.clear_recent_steps()
    assert pace.step_seconds(now) == 0


@pytest.mark.parametrize(
    "message",
    [
        messages.Load(((0, 5), (9, 12)), 77),
        messages.Generate("ünï\ncode", 3, 1),
        messages.Snapshot(1, 2, 3, 4),
        messages.Refused("CorpusError", "is empty", "give more"),
        messages.TrainerConfig("version = 1\n", None),
    ],
)
def test_messages_survive_the_wire(message: messages.Message) -> None:
    line = messages.Envelope(5, message).line()
    assert line.count(b"\n") == 1
    assert messages.Envelope.parse(line) == messages.Envelope(5, message)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"number": 1, "kind": "Nonsense", "fields": {}}',
        b'{"number": 1, "kind": "Loss", "fields": {"value": 1.0, "more": 2}}',
    ],
)
def test_a_line_that_is_no_message_is_an_error(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting|not a trainer message"):
        messages.Envelope.parse(line)
