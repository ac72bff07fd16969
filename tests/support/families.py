"""Small Hugging Face decoders, one configuration a family."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from atoll.node.model.span_model import SpanModel

VOCABULARY = 48

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}

FAMILIES = ("llama", "qwen3", "gpt_neox", "mixtral", "qwen3_moe")
ADAPTED = {  # what LoRA adapts
    "gpt_neox": ["query_key_value", "dense_h_to_4h"],
    "mixtral": ["q_proj", "v_proj"],
    "qwen3_moe": ["q_proj", "v_proj"],
}


def config_of(family: str, tied: bool = False, **changed: Any) -> Any:
    """With two blocks of 32 numbers a token, unless something else is said."""
    import transformers

    made = {
        "llama": lambda more: transformers.LlamaConfig(**{**_GROUPED, **more}),
        "qwen3": lambda more: transformers.Qwen3Config(**{**_GROUPED, "head_dim": 8, **more}),
        "gpt_neox": lambda more: transformers.GPTNeoXConfig(**{**_COMMON, **more}),
        "mixtral": lambda more: transformers.MixtralConfig(**{**_GROUPED, "num_local_experts": 4, **more}),
        "qwen3_moe": lambda more: transformers.Qwen3MoeConfig(
            **{
                **_GROUPED,
                "head_dim": 8,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                **more,
            }
        ),
    }
    return made[family]({"tie_word_embeddings": tied, **changed})


def lora_of(family: str) -> Any:
    """Adapters of rank 4 on some matrices of every block."""
    import peft

    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED.get(family, ["q_proj", "v_proj", "gate_proj"]))


def initialise_span(model: SpanModel, seed: int, standard_deviation: float = 0.02) -> None:
    """Fill all of it, frozen or not, with weights that do not depend on the cut."""
    for name, view in model.tensors():
        view.copy_(_values(name, tuple(view.shape), seed, standard_deviation))


def _values(name: str, shape: tuple[int, ...], seed: int, standard_deviation: float) -> Tensor:
    """One parameter by the name that a whole model has for it.

    Matrices are normal, weights of norms one, biases and second factors of adapters zero.
    """
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(shape)
    if "lora_B" in name or (values.dim() < 2 and name.endswith("bias")):
        return values.zero_()
    if "lora_A" in name:
        bound = shape[-1] ** -0.5
        return values.uniform_(-bound, bound, generator=generator)
    if values.dim() < 2:
        return values.fill_(1.0)
    return values.normal_(0.0, standard_deviation, generator=generator)
