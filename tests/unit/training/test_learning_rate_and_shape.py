"""Learning rate on committed tokens; the layer table compared with the built model."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.built_in_shape import PRESETS, layer_offsets, layer_table, resolve_shape
from atoll.core.errors import ModelTooLarge
from atoll.core.model_memory import built_in_memory_bytes
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.core.units import bytes_text
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.llama import Decoder
from atoll.node.training.device import DeviceFacts, check_fits
from atoll.node.training.learning_rate import learning_rate


def spec_of(optimizer: str = "", model: str = "", stop_tokens: int = 100_000) -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = {stop_tokens}\n[model]\n{model}\n'
        f'[data]\npath = "x"\n[optimizer]\n{optimizer}\n[sync]\nround_tokens = 1000\n'
    )


@given(
    st.sampled_from(["constant", "cosine", "linear"]),
    st.integers(0, 50_000),
    st.lists(st.integers(0, 300_000), min_size=2, max_size=2),
)
def test_the_rate_stays_between_floor_and_peak_and_only_falls_after_warmup(
    schedule: str, warmup: int, tokens: list[int]
) -> None:
    spec = spec_of(f'schedule = "{schedule}"\nwarmup_tokens = {warmup}\nlearning_rate = 0.01')
    early, late = (learning_rate(spec, count) for count in sorted(tokens))
    assert 0 < early <= 0.01
    assert 0 < late <= 0.01
    if min(tokens) >= warmup:
        assert late <= early
        assert late >= 0.001 * (1 - 1e-9)


def test_the_rate_reaches_its_corners() -> None:
    spec = spec_of('warmup_tokens = 10000\nlearning_rate = 0.01\nschedule = "cosine"')
    assert learning_rate(spec, 10_000) == pytest.approx(0.01)
    assert learning_rate(spec, 55_000) == pytest.approx(0.0055)
    assert learning_rate(spec, 100_000) == pytest.approx(0.001)
    assert learning_rate(spec, 0) > 0


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_the_layer_table_counts_what_the_model_allocates(preset: str) -> None:
    spec = spec_of(model=f'preset = "{preset}"\nvocabulary = 1000')
    shape = resolve_shape(spec.model, 256)
    with torch.device("meta"):
        layout = FlatLayout.of(Decoder(shape))
    table = layer_table(spec, shape)
    assert layer_offsets(table) == layout.layer_offsets
    assert layout.elements == shape.parameters
    assert [row.name for row in table.layers][:2] == ["embedding", "block.0"]
    assert list(table.layers[-1].tied_to) == (["embedding"] if shape.tie_embeddings else [])
    assert table.model_hash == spec.model_hash()


def test_a_model_that_does_not_fit_is_refused_before_it_is_allocated() -> None:
    spec = spec_of(model='preset = "7b"')
    small = DeviceFacts("cuda:0", "Small GPU", 8 * 1024**3)
    with pytest.raises(ModelTooLarge, match=bytes_text(small.memory_bytes)) as caught:
        check_fits(built_in_memory_bytes(spec, resolve_shape(spec.model, 256), 1), small)
    assert caught.value.remedy
    check_fits(built_in_memory_bytes(spec_of(), resolve_shape(spec_of().model, 256), 1), small)
