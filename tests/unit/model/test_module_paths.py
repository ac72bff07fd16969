"""Module paths are found by roles; an unsupported model is refused and the missing part is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.families import config_of, initialise_span
from support.routes import RouteStages

from atoll.core.errors import ConfigError, InvalidRequest, UnsupportedModel
from atoll.core.run_spec import OptimizerSection
from atoll.node.model.huggingface import HuggingFaceArchitecture
from atoll.node.model.span import Span
from atoll.node.model.span_model import SpanModel
from atoll.node.pipeline.stage_checks import MicroBatchShape

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

SMALL: dict[str, Any] = {"vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
WIDTHS: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def other(family: str) -> Any:
    import transformers

    made = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, **SMALL),
        "opt": lambda: transformers.OPTConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, **SMALL),
        "gemma": lambda: transformers.GemmaConfig(head_dim=8, num_key_value_heads=2, **WIDTHS, **SMALL),
        "t5": lambda: transformers.T5Config(**SMALL),
        "falcon": lambda: transformers.FalconConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=4, hidden_dropout=0.0, **SMALL
        ),
        "granite": lambda: transformers.GraniteConfig(embedding_multiplier=12.0, **WIDTHS, **SMALL),
    }
    return made[family]()


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gpt2", "gpt2 cannot be cut into layers: it lacks one final norm"),
        ("opt", "it lacks one list of 2 blocks"),
        ("gemma", "it lacks a way to compute the buffers .*embed_scale"),
        ("t5", "t5 is not a causal language model"),
        ("falcon", "its transformer does more to activations than its blocks do"),
        ("granite", "its model does more to activations than its blocks do"),
    ],
)
def test_an_unsupported_architecture_is_refused_and_the_missing_part_is_named(family: str, words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words) as caught:
        HuggingFaceArchitecture(other(family))
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("family", "changed", "words"),
    [
        ("gpt_neox", {"hidden_dropout": 0.1}, "a deterministic forward pass .*dropout"),
        ("llama", {"attention_dropout": 0.1}, "a deterministic forward pass"),
        ("mixtral", {"router_jitter_noise": 0.1}, "a deterministic forward pass"),
        ("mixtral", {"output_router_logits": True}, "a loss that depends on the logits alone"),
        ("llama", {"attn_implementation": "somebody/kernel"}, "foreign code"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_randomness_shared_losses_foreign_code_and_quantised_weights_are_refused(
    family: str, changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        HuggingFaceArchitecture(config_of(family, **changed))


def test_only_adapters_are_trained() -> None:
    import peft

    for lora in (
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
        peft.LoraConfig(target_modules=["q_proj"], bias="all"),
        peft.LoraConfig(target_modules=["atlantis"]),
        peft.LoraConfig(target_modules=["q_proj"], use_dora=True),
        peft.LoraConfig(target_modules=["q_proj"], init_lora_weights="gaussian"),
        peft.LoraConfig(target_modules=["embed_tokens"]),
    ):
        with pytest.raises(ConfigError, match=r"LoRA|adapters"):
            HuggingFaceArchitecture(config_of("llama"), lora)
    with pytest.raises(UnsupportedModel, match="deterministic"):
        HuggingFaceArchitecture(config_of("llama"), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1))


def test_a_span_has_memory_for_its_own_layers_only() -> None:
    architecture = HuggingFaceArchitecture(config_of("qwen3"))
    held = SpanModel(architecture.span_definition(Span(1, 1)), torch.device("cpu"))
    names = {name for name, _ in held.span_definition.module.named_parameters()}
    assert names == {slot.name for slot in held.trained_layout.slots}
    assert all(name.startswith("model.layers.0.") for name in names)
    assert not any(
        each.is_meta for each in [*held.span_definition.module.parameters(), *held.span_definition.module.buffers()]
    )
    with pytest.raises(InvalidRequest, match="layers 0 to 3"):
        architecture.span_definition(Span(2, 4))


def test_attention_windows_that_differ_between_blocks_are_kept() -> None:
    """Qwen 3 with one full and one sliding block: cut or not, each block sees its own mask."""
    config = config_of(
        "qwen3", use_sliding_window=True, sliding_window=3, layer_types=["full_attention", "sliding_attention"]
    )
    tokens = [torch.arange(2 * 13).view(2, 13) % 48]
    norms = []
    for stages in (1, 4):
        route_stages = RouteStages(
            HuggingFaceArchitecture(config),
            stages,
            OptimizerSection(name="adamw", learning_rate=2e-3, weight_decay=0.1),
            MicroBatchShape(2, 12),
        )
        for model in route_stages.models:
            initialise_span(model, 1, 0.2)
        norms.append(route_stages.route.flush(tokens).norms)
    assert norms[0] == norms[1]
