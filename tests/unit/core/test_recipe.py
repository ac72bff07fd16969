"""What a run spec means where it names no optimiser, and that a named number stays."""

from __future__ import annotations

import pytest

from atoll.core.built_in_shape import PRESETS
from atoll.core.errors import RunSpecError
from atoll.core.recipe import PRESET_DIMENSIONS
from atoll.core.run_spec import RunSpec, parse_run_spec

HUGGING_FACE = 'architecture = "huggingface"\nconfig = { model_type = "llama", vocab_size = 256, hidden_size = 400 }\n'
BASE = f'[model.base]\nfiles = {{ "model.safetensors" = "{"a" * 64}" }}\n'


def spec(model: str = "", optimizer: str = "", sync: str = "") -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = 10000\n[data]\npath = "x"\n[model]\n{model}\n'
        f"[optimizer]\n{optimizer}\n[sync]\nround_tokens = 100\n{sync}\n"
    )


def numbers(of: RunSpec) -> tuple[object, ...]:
    optimizer, sync = of.optimizer, of.sync
    outer = sync.outer_learning_rate, sync.outer_momentum
    return (optimizer.name, optimizer.learning_rate, optimizer.weight_decay, *outer)


def test_the_widths_of_presets_are_those_of_their_shapes() -> None:
    assert {name: shape.dimension for name, shape in PRESETS.items()} == PRESET_DIMENSIONS


@pytest.mark.parametrize(
    ("model", "optimizer", "expected"),
    [
        ("", "", ("muon", 0.0088, 0.2, 1.0, 0.5)),
        ('preset = "7b"', "", ("muon", 0.0016, 0.2, 1.0, 0.5)),
        ("dimension = 400", "", ("muon", 0.005, 0.2, 1.0, 0.5)),
        (HUGGING_FACE, "", ("muon", 0.005, 0.2, 1.0, 0.5)),
        (HUGGING_FACE + BASE, "", ("adamw", 0.002, 0.1, 0.7, 0.8)),
        (HUGGING_FACE + BASE, 'name = "muon"', ("muon", 0.005, 0.2, 1.0, 0.5)),
        ("", 'name = "adamw"', ("adamw", 0.002, 0.1, 0.7, 0.8)),
        ("", "learning_rate = 0.5\nweight_decay = 0.0", ("muon", 0.5, 0.0, 1.0, 0.5)),
    ],
)
def test_what_a_spec_leaves_open_follows_the_model_and_the_optimiser(
    model: str, optimizer: str, expected: tuple[object, ...]
) -> None:
    assert numbers(spec(model, optimizer)) == expected


def test_a_resolved_spec_keeps_all_numbers() -> None:
    for made in (spec(), spec(sync="outer_momentum = 0.0"), spec(optimizer='name = "adamw"')):
        assert parse_run_spec(made.resolved_toml()) == made


@pytest.mark.parametrize("weights", ["tokens", "roots"])
def test_a_resolved_spec_of_an_earlier_release_is_read(weights: str) -> None:
    assert spec(sync=f'weights = "{weights}"') == spec()
    with pytest.raises(RunSpecError, match="weights"):
        spec(sync='weights = "equal"')
