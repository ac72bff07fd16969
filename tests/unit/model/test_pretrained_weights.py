"""A span is loaded from a directory that `transformers` wrote, and nothing else is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.families import FAMILIES, VOCABULARY, config_of, lora_of
from support.routes import equal_cuts, layer_weights

from atoll.core.errors import CheckpointCorrupt, ConfigError
from atoll.node.model import pretrained_weights
from atoll.node.model.huggingface import HuggingFaceArchitecture, read_configuration
from atoll.node.model.safetensors_reader import read_tensor
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
CPU = torch.device("cpu")


def saved(directory: Path, family: str, tied: bool = False, shard: str = "20KB"):
    """A model with random weights, written in several files."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config_of(family, tied), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    model.save_pretrained(directory, max_shard_size=shard)
    return model


@pytest.mark.parametrize("adapted", [False, True], ids=["dense", "lora"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_spans_of_a_directory_give_the_model_s_logits(tmp_path: Path, family: str, tied: bool, adapted: bool) -> None:
    model = saved(tmp_path, family, tied)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    architecture = HuggingFaceArchitecture(read_configuration(tmp_path), lora_of(family) if adapted else None)
    tokens_BT = torch.arange(8).view(1, 8) % VOCABULARY
    with torch.no_grad():
        x = tokens_BT
        first: SpanModel | None = None
        for span in equal_cuts(architecture.layers, 3):
            held = SpanModel(architecture.span_definition(span), CPU)
            pretrained_weights.load(architecture, tmp_path, held)
            first = first or held
            if held.span_definition.tie is not None and held.span_definition.is_last:
                held.tied_weight_copy.copy_(first.tied_weight)
            x = held.span_definition.run(x)
        assert torch.equal(x, model(tokens_BT, use_cache=False).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_only_the_span_s_tensors_are_read(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, family)
    read: list[str] = []

    def remember(path: Path, name: str) -> torch.Tensor:
        read.append(name)
        return read_tensor(path, name)

    monkeypatch.setattr(pretrained_weights, "read_tensor", remember)
    architecture = HuggingFaceArchitecture(read_configuration(tmp_path))
    held = SpanModel(architecture.span_definition(Span(2, 2)), CPU)
    pretrained_weights.load(architecture, tmp_path, held)
    assert read
    assert all(name.startswith("model.layers.1.") for name in read)
    assert (
        sum(parameter.numel() for parameter in held.span_definition.module.parameters()) == held.trained_layout.elements
    )


def test_a_directory_with_one_weight_file_is_loaded(tmp_path: Path) -> None:
    model = saved(tmp_path, "qwen3", shard="1GB")
    architecture = HuggingFaceArchitecture(read_configuration(tmp_path))
    held = SpanModel(architecture.span_definition(Span(0, 3)), CPU)
    pretrained_weights.load(architecture, tmp_path, held)
    assert torch.equal(layer_weights(held, 0).view(VOCABULARY, -1), model.get_input_embeddings().weight)


def test_weights_that_cannot_be_loaded_are_refused_with_the_reason(tmp_path: Path) -> None:
    def refusal(directory: Path, architecture: HuggingFaceArchitecture) -> str:
        with pytest.raises(CheckpointCorrupt) as caught:
            pretrained_weights.load(architecture, directory, SpanModel(architecture.span_definition(Span(1, 1)), CPU))
        return f"{caught.value} {caught.value.remedy}"

    saved(tmp_path / "llama", "llama")
    llama, qwen3 = (
        HuggingFaceArchitecture(read_configuration(tmp_path / "llama")),
        HuggingFaceArchitecture(config_of("qwen3")),
    )
    assert "lacks model.layers.0.self_attn.k_norm.weight" in refusal(tmp_path / "llama", qwen3)
    wider = HuggingFaceArchitecture(config_of("llama", intermediate_size=64))
    assert "the model's has shape [32, 64]" in refusal(tmp_path / "llama", wider)
    (tmp_path / "empty").mkdir()
    assert "model.safetensors" in refusal(tmp_path / "empty", llama)
    index = tmp_path / "llama/model.safetensors.index.json"
    whole = json.loads(index.read_text())
    for name in whole["weight_map"]:
        whole["weight_map"][name] = "../llama/" + whole["weight_map"][name]
    index.write_text(json.dumps(whole))
    assert "not a file name in the same directory" in refusal(tmp_path / "llama", llama)
    index.write_text("[]")
    assert "no readable safetensors" in refusal(tmp_path / "llama", llama)


def test_a_directory_without_a_known_configuration_is_refused(tmp_path: Path) -> None:
    for text in (None, "{}", '{"model_type": "atlantis"}', '{"model_type": "llama", "hidden_size": "wide"}'):
        if text is not None:
            (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError):
            HuggingFaceArchitecture(read_configuration(tmp_path))
