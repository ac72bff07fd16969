"""A trainer that starts again maps the tokens of the first start, and both tell of the same corpus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from atoll.core.clock import ManualClock
from atoll.node.data import corpus
from atoll.node.trainer import loading, messages
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
hidden_dimension = 48
[data]
path = "x"
sequence_length = 16
validation_samples = 8
[sync]
round_tokens = 1000
"""


def test_a_second_start_does_not_tokenise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 200)

    def start(cache_path: Path | None) -> str:
        config = messages.TrainerConfig(
            SPEC,
            str(tmp_path / "text.txt"),
            device="cpu",
            layer_times=(("embedding", 1.0, 1.0), ("block", 1.0, 1.0), ("head", 1.0, 1.0)),
            cache_path=str(cache_path) if cache_path is not None else None,
        )
        state = loading.load_trainer_state(config, device_facts(choose_device("cpu")), None, ManualClock())
        assert isinstance(state.loop, loading.InnerLoop)
        state.loop.close()
        return state.corpus.digest

    first = start(tmp_path / "corpora")

    def never(*_: Any) -> Any:
        raise AssertionError("the text is tokenised again")

    monkeypatch.setattr(corpus, "_tokenise_all", never)
    assert start(tmp_path / "corpora") == first == start(None)
    assert len([*(tmp_path / "corpora").glob("*.tokens")]) == 1
