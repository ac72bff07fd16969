"""`atoll base`: the printed [model] section builds the directory's model again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_runs import CONFIGS, pretrained, spec_of
from typer.testing import CliRunner

from atoll.core.errors import AtollError, CheckpointCorrupt, ConfigError, UnsupportedModel
from atoll.core.model_spec import HuggingFaceModel
from atoll.node.cli.main import app
from atoll.node.model.describe_base import describe
from atoll.node.model.run_model import run_model
from atoll.node.model.span import Span

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def printed(directory: Path) -> str:
    result = CliRunner().invoke(app, ["base", str(directory), "--name", "somebody/tiny"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("family", CONFIGS)
def test_the_printed_section_builds_the_same_model(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    base = pretrained(tmp_path, family, shard="30KB")
    spec = spec_of(printed(base))
    assert isinstance(spec.model, HuggingFaceModel)
    assert spec.model.base is not None
    assert spec.model.base.name == "somebody/tiny"
    run = run_model(spec, 256, base)
    run.check(None)
    found = dict(run.initial_parameters(Span(0, run.architecture.layers - 1)))
    theirs = dict(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).named_parameters())
    assert found.keys() == theirs.keys()
    assert all(torch.equal(values, theirs[name]) for name, values in found.items())


def changed(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"is_llama_config": True, "transformers.js_config": {}}, "is_llama_config"),
        ({"attention_dropout": 0.1}, "attention_dropout is set to 0"),
        ({"auto_map": {"AutoModelForCausalLM": "mine.Model"}}, ""),
        ({"rope_theta": 500000.0, "rope_parameters": None}, ""),
    ],
    ids=str,
)
def test_keys_that_are_left_out_are_reported(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    text, notes = describe(changed(pretrained(tmp_path), **changes), "")
    assert any(said in note for note in notes) if said else not notes
    model = spec_of(text).model
    assert isinstance(model, HuggingFaceModel)
    assert model.config["attention_dropout"] == 0
    assert "auto_map" not in model.config
    if "rope_theta" in changes:
        assert model.config["rope_parameters"]["rope_theta"] == 500000.0


def test_a_null_that_differs_from_the_default_is_kept(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, MistralConfig

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
    config = MistralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, sliding_window=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec = spec_of(describe(tmp_path, "")[0])
    assert isinstance(spec.model, HuggingFaceModel)
    assert spec.model.config_nulls == ("sliding_window",)
    assert run_model(spec, 256, tmp_path).architecture.config.sliding_window is None


def test_a_directory_that_no_run_can_start_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no configuration"):
        describe(tmp_path, "")
    base = pretrained(tmp_path)
    cases: list[tuple[dict[str, Any], type[AtollError]]] = [
        ({"model_type": "gpt2"}, UnsupportedModel),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, UnsupportedModel),
        ({"hidden_act": "me/kernels"}, ConfigError),
        ({"model_type": "no_such"}, ConfigError),
    ]
    held = (base / "config.json").read_text()
    for changes, error in cases:
        with pytest.raises(error):
            describe(changed(base, **changes), "")
        (base / "config.json").write_text(held)
    (base / "model.safetensors").rename(base / "pytorch_model.bin")
    with pytest.raises(CheckpointCorrupt, match="no readable safetensors"):
        describe(base, "")
