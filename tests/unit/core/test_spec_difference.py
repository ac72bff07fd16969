"""The keys in which run specs differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import RunSpecError
from atoll.core.spec_difference import spec_differences

KEYS = {
    "run.stop_tokens": st.integers(20_000, 90_000),
    "data.sequence_length": st.sampled_from([16, 32]),
    "optimizer.weight_decay": st.sampled_from([0.0, 0.1]),
    "optimizer.betas": st.sampled_from([[0.9, 0.95], [0.9, 0.99]]),
    "sync.codec": st.sampled_from(["int4", "int8"]),
}


def text(name: str = "a", **more: object) -> str:
    """A spec; `more`: section_key=value."""
    found = {"run.name": name, "run.stop_tokens": 10_000, "data.path": "x", "sync.round_tokens": 1000}
    found |= {key.replace("__", "."): value for key, value in more.items()}
    sections = {key.partition(".")[0] for key in found}
    lines = ["version = 1"]
    for section in sorted(sections):
        lines += [f"[{section}]"]
        lines += [f"{k.partition('.')[2]} = {v!r}" for k, v in found.items() if k.startswith(f"{section}.")]
    return "\n".join(lines)


@given(st.lists(st.fixed_dictionaries({}, optional=KEYS), min_size=1, max_size=4))
def test_a_key_is_told_if_and_only_if_two_specs_resolve_it_differently(changes: list[dict[str, object]]) -> None:
    specs = [
        text(f"run-{i}", **{key.replace(".", "__"): v for key, v in each.items()}) for i, each in enumerate(changes)
    ]
    found = spec_differences(specs)
    assert found.keys() <= KEYS.keys()
    for key in KEYS:
        chosen = [each[key] for each in changes if key in each]
        if len(chosen) == len(changes):
            assert (key in found) == any(value != chosen[0] for value in chosen)
    for key, values in found.items():
        assert len(values) == len(specs)
        for value, each in zip(values, changes, strict=True):
            assert value == each.get(key, value)


def test_a_default_that_is_written_out_is_no_difference_and_a_missing_key_is_none() -> None:
    assert spec_differences([text(), text("b", optimizer__clip_norm=1.0)]) == {}
    found = spec_differences([text(), text("b", data__validation_samples=7)])
    assert found == {"data.validation_samples": (found["data.validation_samples"][0], 7)}
    shape = {"dimension": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden_dimension": 96}
    sizes = {f"model__{key}": value for key, value in shape.items()}
    sized = spec_differences([text(model__preset="nano"), text("b", **sizes)])
    assert sized["model.layers"] == (None, 2)


def test_a_text_that_is_no_spec_is_refused() -> None:
    with pytest.raises(RunSpecError):
        spec_differences([text(), "version = 2"])
