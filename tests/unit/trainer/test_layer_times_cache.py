"""What a daemon measured of its layers outlives it, for a while, and never stands in a trainer's way."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from atoll.core.clock import ManualClock
from atoll.node.trainer import layer_times_cache, loading, messages
from atoll.node.trainer.layer_times_cache import ENTRIES, MAX_AGE, LayerTimesCache
from atoll.node.training.device import choose_device, device_facts

SPEC = """version = 1
[run]
name = "t"
stop_tokens = 100000
[model]
dimension = 32
layers = 2
heads = 4
kv_heads = 2
hidden_dimension = {hidden}
[data]
path = "x"
sequence_length = 16
validation_samples = 8
[sync]
round_tokens = 1000
"""
KINDS = {"embedding", "block", "head"}
TIMES = (("embedding", 1e-6, 0.0), ("block", 2e-3, 4e-3), ("head", 1e-3, 2e-3))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every time that layers are measured."""
    times, really = [], loading.measure_layer_times

    def measure(*arguments):
        times.append(1)
        return really(*arguments)

    monkeypatch.setattr(loading, "measure_layer_times", measure)
    return times


@pytest.fixture
def start(tmp_path: Path):
    """Start a trainer, and say what times it goes by."""
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 200)
    clock = ManualClock()

    def start(after: timedelta = timedelta(), hidden: int = 48, threads: int = 1) -> loading.LayerTimes:
        clock.advance(after.total_seconds())
        config = messages.TrainerConfig(
            SPEC.format(hidden=hidden),
            str(tmp_path / "text.txt"),
            device="cpu",
            cpu_threads=threads,
            layer_times_path=str(tmp_path / "layer-times.json"),
        )
        state = loading.load_trainer_state(config, device_facts(choose_device("cpu")), None, clock)
        assert isinstance(state.loop, loading.InnerLoop)
        state.loop.close()
        return state.times

    return start


def test_a_second_start_measures_nothing(start, measured: list[int]) -> None:
    assert start() == start(after=MAX_AGE / 2)
    assert len(measured) == 1


@pytest.mark.parametrize(
    "other", [{"hidden": 64}, {"threads": 2}, {"after": MAX_AGE + timedelta(seconds=1)}, {"after": -timedelta(hours=1)}]
)
def test_what_is_of_something_else_or_long_ago_is_measured_again(start, measured: list[int], other) -> None:
    start()
    start(**other)
    assert len(measured) == 2


def test_another_version_of_transformers_is_measured(start, measured: list[int], monkeypatch) -> None:
    for known in ("5.0.0", "5.0.0", "5.1.0"):
        monkeypatch.setattr(layer_times_cache, "version", lambda package, known=known: known)
        start()
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"entries": {}, "more": 1}', b"\xff\xfe", b'{"entries": {"k": {"unix": 0, "times": []}}}'],
)
def test_a_file_that_says_nothing_is_replaced(start, measured: list[int], tmp_path: Path, content: bytes) -> None:
    (tmp_path / "layer-times.json").write_bytes(content)
    start()
    start()
    assert len(measured) == 1


def test_where_it_cannot_be_written_all_is_measured(start, measured: list[int], tmp_path: Path) -> None:
    (tmp_path / "layer-times.json").mkdir()
    start()
    start()
    assert len(measured) == 2


@pytest.mark.parametrize(
    "times", [(("block", 2e-3, 4e-3),), (*TIMES, ("other", 0.0, 0.0)), (("block", -1.0, 0.0), *TIMES)]
)
def test_times_of_other_kinds_or_below_nothing_are_not_believed(tmp_path: Path, times) -> None:
    clock = ManualClock()
    file = LayerTimesCache(tmp_path / "times.json", clock)
    rows = ",".join(f'["{kind}", {forward}, {backward}]' for kind, forward, backward in times)
    (tmp_path / "times.json").write_text(f'{{"entries": {{"k": {{"unix": {clock.unix()}, "times": [{rows}]}}}}}}')
    assert file.recall("k", KINDS) == ()
    file.keep("k", TIMES)
    assert file.recall("k", KINDS) == TIMES


def test_the_oldest_make_room(tmp_path: Path) -> None:
    clock = ManualClock()
    file = LayerTimesCache(tmp_path / "times.json", clock)
    for number in range(ENTRIES + 2):
        clock.advance(1)
        file.keep(str(number), TIMES)
    known = [number for number in range(ENTRIES + 2) if file.recall(str(number), KINDS)]
    assert known == list(range(2, ENTRIES + 2))
