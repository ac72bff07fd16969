"""Run specs of Hugging Face models that cannot be trained: a typed error says why, before anything is allocated."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hf_runs import config_of, model_section, pretrained, spec_of, text_of

from atoll.core.clock import SystemClock
from atoll.core.errors import AtollError, ConfigError, ModelTooLarge, UnsupportedModel
from atoll.node.model.run_model import run_model
from atoll.node.trainer.loading import load_trainer_state
from atoll.node.trainer.messages import TrainerConfig
from atoll.node.training.device import DeviceFacts

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

HERE = DeviceFacts("cpu", "a machine", 8 << 30)


def llama(**changed: Any) -> str:
    return model_section(config_of("llama", **changed))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (model_section({"model_type": "lama"}), "knows no model_type 'lama'"),
        (llama(hiden_size=64), "llama has no key hiden_size"),
        (llama(dtype="bfloat16"), "llama has no key dtype"),
        (llama(hidden_size="wide"), "hidden_size"),
        (llama(hidden_size=30), "not a multiple"),
        (llama(num_attention_heads=0), "cannot be|zero|multiple|not"),
        (llama(hidden_act="no_such"), "no_such"),
        (llama(num_hidden_layers=0), "llama of 0 blocks"),
        (llama().replace("[model.config]", 'config_nulls = ["rms_norm_eps"]\n[model.config]'), "rms_norm_eps"),
        (llama(vocab_size=100), "smaller than the tokenizer's 256"),
        (llama(max_position_embeddings=8), "sequence_length 16 is more than"),
        (llama(attention_dropout=0.1), "set it to 0"),
        (model_section(config_of("mixtral", output_router_logits=True)), "output_router_logits"),
        (model_section({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4}), "gpt2 cannot be cut"),
        (model_section({"model_type": "t5"}), "t5"),
        (model_section({"model_type": "mllama"}), "mllama"),
        (llama(hidden_size=2**24, intermediate_size=2**24, vocab_size=2**24, num_attention_heads=1), "."),
    ],
    ids=lambda value: "" if "[model]" in value else value[:40],
)
def test_an_invalid_model_section_is_refused_with_the_reason(model: str, words: str) -> None:
    with pytest.raises((UnsupportedModel, ModelTooLarge), match=words) as caught:
        loaded(model)
    assert caught.value.remedy


def loaded(model: str, facts: DeviceFacts = HERE, base: Path | None = None) -> None:
    """As far as a trainer comes without a corpus."""
    config = TrainerConfig(spec_of(model).resolved_toml(), "no such corpus", base_path=str(base) if base else None)
    load_trainer_state(config, facts, None, SystemClock())


def test_sizes_that_only_the_forward_pass_finds_wrong_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(text_of())
    config = TrainerConfig(spec_of(llama(num_key_value_heads=3)).resolved_toml(), str(path))
    with pytest.raises(UnsupportedModel, match="its block failed with"):
        load_trainer_state(config, HERE, None, SystemClock())


def test_a_model_too_large_for_any_machine_is_refused_by_arithmetic() -> None:
    vast = llama(hidden_size=2**16, intermediate_size=2**18, num_hidden_layers=100, num_attention_heads=64)
    with pytest.raises(ModelTooLarge, match="needs about"):
        loaded(vast)


def test_adapter_targets_that_match_nothing_are_refused(tmp_path: Path) -> None:
    base = pretrained(tmp_path)
    for targets, words in (
        (["q_proj", "qproj"], "no linear module of the model is called 'qproj'"),
        (["nothing"], "does not fit the model"),
        (["embed_tokens"], "adapters of embeddings"),
        (["lm_head"], None),
    ):
        spec = spec_of(model_section(config_of("llama"), base, targets))
        if words is None:
            table = run_model(spec, 256, base).table
            assert [row.parameters > 0 for row in table.layers] == [False, False, False, True]
            continue
        with pytest.raises(ConfigError, match=words):
            run_model(spec, 256, base)


@pytest.mark.parametrize("library", ["transformers", "peft"])
def test_a_missing_library_is_named(library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = pretrained(tmp_path)
    spec = spec_of(model_section(config_of("llama"), base, ["q_proj"]))
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=f"needs the library {library}") as caught:
        run_model(spec, 256, base)
    assert "'hf' extra" in caught.value.remedy


def test_a_pretrained_directory_of_another_shape_is_refused(tmp_path: Path) -> None:
    """Its digests are right, and it is not of this configuration."""
    base = pretrained(tmp_path, intermediate_size=64)
    run = run_model(spec_of(model_section(config_of("llama"), base)), 256, base)
    from atoll.node.model.span import Span

    with pytest.raises(AtollError, match="has shape"):
        list(run.initial_parameters(Span(1, 1)))
    assert torch.is_tensor(next(iter(run.initial_parameters(Span(0, 0))))[1])
