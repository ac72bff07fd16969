"""The `[model]` section: what a stranger may say there, and what is refused without any library."""

from __future__ import annotations

import pytest

from atoll.core.errors import RunSpecError
from atoll.core.model_spec import HuggingFaceModel, ModelSection
from atoll.core.run_spec import RunSpec, parse_run_spec

DIGEST = "ab" * 32
HF = 'architecture = "huggingface"\n'
LLAMA = f'{HF}config = {{ model_type = "llama", hidden_size = 64, vocab_size = 300 }}\n'
BASE = f'[model.base]\nname = "somebody/tiny"\nfiles = {{ "model.safetensors" = "{DIGEST}" }}\n'
ADAPTER = '[model.adapter]\ntargets = ["q_proj", "self_attn.v_proj"]\n'


def spec_of(model: str) -> RunSpec:
    return parse_run_spec(
        'version = 1\n[run]\nname = "t"\nstop_tokens = 10\n[data]\npath = "x"\n[sync]\nround_tokens = 9\n'
        f"[model]\n{model}"
    )


def test_both_architectures_survive_the_resolved_toml() -> None:
    nested = LLAMA.replace(
        "300 }", '300, rope_parameters = { rope_type = "default", rope_theta = 5e5 }, eos = [1, 2] }'
    )
    texts = ["", 'architecture = "built-in"\npreset = "micro"', LLAMA, nested + 'config_nulls = ["sliding_window"]\n']
    texts += [LLAMA + BASE, LLAMA + BASE + ADAPTER]
    hashes = set()
    for text in texts:
        spec = spec_of(text)
        again = parse_run_spec(spec.resolved_toml())
        assert again == spec
        assert hash(again) == hash(spec)  # planners keep what they counted by it
        assert again.model_hash() == spec.model_hash()
        hashes.add(spec.model_hash())
    assert len(hashes) == len(texts)
    assert isinstance(spec_of("").model, ModelSection)
    model = spec_of(LLAMA + BASE + ADAPTER).model
    assert isinstance(model, HuggingFaceModel)
    assert model.adapter is not None
    assert (model.adapter.rank, model.adapter.alpha) == (8, 16.0)


def test_another_base_gives_another_model_hash() -> None:
    assert spec_of(LLAMA + BASE).model_hash() != spec_of(LLAMA + BASE.replace("ab", "cd")).model_hash()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ('architecture = "mine"', 'model: architecture must be "built-in" or "huggingface"'),
        ("architecture = 3", "architecture must be"),
        (HF, "model.config is missing"),
        (HF + "config = {}", "model.config: needs model_type"),
        (HF + "config = { model_type = 3 }", "needs model_type"),
        (HF + 'preset = "nano"\nconfig = { model_type = "llama" }', "unknown key model.preset"),
        ('config = { model_type = "llama" }', "unknown key model.config"),
        (HF + 'config = { model_type = "llama", auto_map = { a = "b.C" } }', "auto_map names code"),
        (HF + 'config = { model_type = "llama", trust_remote_code = true }', "trust_remote_code names code"),
        (HF + 'config = { model_type = "llama", _attn_implementation = "x" }', "_attn_implementation names code"),
        (
            HF + 'config = { model_type = "llama", quantization_config = {} }',
            "quantization_config names code",
        ),
        (HF + 'config = { model_type = "llama", hidden_act = "me/kernels:relu" }', "a short name without slashes"),
        (HF + 'config = { model_type = "llama", "a b" = 1 }', "is not a valid key"),
        (
            HF + 'config = { model_type = "llama", hidden_size = 99999999999 }',
            "hidden_size = 99999999999 is out of range",
        ),
        (
            HF + 'config = { model_type = "llama", num_hidden_layers = 1023 }',
            "num_hidden_layers = 1023 is out of range; its magnitude is at most 1022",
        ),
        (
            HF + 'config = { model_type = "mixtral", num_local_experts = 5000 }',
            "num_local_experts = 5000 is out of range",
        ),
        (HF + 'config = { model_type = "llama", rms_norm_eps = nan }', "rms_norm_eps must be finite"),
        (HF + 'config = { model_type = "llama", day = 2026-01-01 }', "day must be a number"),
        (HF + 'config = { model_type = "llama", a = { b = { c = { d = 1 } } } }', "at most 3"),
        (HF + 'config = { model_type = "llama", a = [[1]] }', "a must be a number"),
        (HF + f'config = {{ model_type = "llama", a = {["x" * 79] * 900} }}', "at most 65536 bytes"),
        (LLAMA + 'config_nulls = ["hidden_size"]', "hidden_size is set in config and also listed"),
        (LLAMA + ADAPTER, "an adapter needs pretrained weights"),
        (LLAMA + BASE + "[model.adapter]\ntargets = []", "model.adapter.targets"),
        (LLAMA + BASE + '[model.adapter]\ntargets = [".*"]', "model.adapter.targets.0"),
        (LLAMA + BASE + ADAPTER + "rank = 0", "model.adapter.rank"),
        (LLAMA + BASE + ADAPTER + "dropout = 0.1", "unknown key model.adapter.dropout"),
        (LLAMA.replace(", vocab_size = 300", "") + BASE, "config must set vocab_size"),
        (LLAMA + BASE.replace("somebody/tiny", "\\u001b[2J"), "model.base.name"),
        (LLAMA + "[model.base]\nfiles = {}", "must name 1 to 1024 files"),
        (LLAMA + BASE.replace("model.saf", "../model.saf"), "is not the name of a .safetensors file"),
        (LLAMA + BASE.replace("model.safetensors", "pytorch_model.bin"), "is not the name of a .safetensors file"),
        (LLAMA + BASE.replace("model.safetensors", "a.safetensors"), "must have either model.safetensors, or"),
        (LLAMA + BASE.replace(DIGEST, "ab"), "model.base.files"),
    ],
)
def test_an_invalid_model_section_is_refused_and_the_key_is_named(model: str, words: str) -> None:
    with pytest.raises(RunSpecError) as caught:
        spec_of(model)
    assert words in str(caught.value)
    assert "huggingface." not in str(caught.value)  # the tag of the parser stays out of messages
