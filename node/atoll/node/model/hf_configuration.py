"""Configuration objects of `transformers` and `peft`, built from a run spec with every key checked.

Only classes of the libraries themselves are used. A key that the model family does not have is refused: `transformers`
would accept it silently, and a misspelt size would keep its default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

from atoll.core.errors import ConfigError, UnsupportedModel
from atoll.core.model_spec import MAX_CONFIG_LAYERS, AdapterSection
from atoll.node.model.tokenizer import HF_REMEDY

_LEGACY_ROPE = {"rope_theta", "rope_scaling", "rotary_pct", "rotary_emb_base", "partial_rotary_factor"}
_UNDECLARED = {"head_dim"}  # families read this key although their configuration need not declare it
NON_MODEL_KEYS = {  # keys of every configuration: labels, outputs, facts about the file
    *("transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id", "problem_type"),
    *("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("use_cache", "_name_or_path", "auto_map"),
}


def build_configuration(
    data: Mapping[str, Any], vocabulary: int, sequence_length: int, nulls: Collection[str] = ()
) -> Any:
    """Build a `transformers` configuration; `vocab_size` defaults to the tokenizer's `vocabulary`.

    Raises `UnsupportedModel`, and `ConfigError` if the library is missing.
    """
    require_library("transformers")
    from transformers import CONFIG_MAPPING

    kind = data["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"[model] config: the installed transformers knows no model_type {kind!r}",
            "check its spelling; newer families need a newer transformers: pip install -U transformers",
        )
    cls: Any = CONFIG_MAPPING[kind]
    unknown = sorted({*data, *nulls} - known_keys(cls))
    if unknown:
        raise UnsupportedModel(
            f"[model] config: {kind} has no key {', '.join(unknown)}", "remove it, or correct its spelling"
        )
    chosen = {"vocab_size": vocabulary, "use_cache": False, **data, **dict.fromkeys(nulls)}
    chosen.pop("model_type")
    try:
        made: Any = cls(**chosen)
    except Exception as error:  # untrusted data, which every family checks in a different way
        raise UnsupportedModel(
            f"[model] config: {_reason(error)}", "correct the value; sizes must fit together"
        ) from error
    _check_sizes(made, vocabulary, sequence_length)
    return made


def known_keys(cls: Any) -> set[str]:
    """List the keys of a family's configuration."""
    own = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    legacy = _LEGACY_ROPE if "rope_parameters" in own else set()
    names = {*own, *cls.attribute_map, *cls.attribute_map.values(), *legacy, *_UNDECLARED, "model_type"}
    return names - NON_MODEL_KEYS


def _check_sizes(config: Any, vocabulary: int, sequence_length: int) -> None:
    kind = config.model_type
    if config.get_text_config() is not config:
        raise UnsupportedModel(
            f"[model] config: {kind} contains several models", "set model_type to that of its text model"
        )
    if not 1 <= config.num_hidden_layers <= MAX_CONFIG_LAYERS:
        raise UnsupportedModel(
            f"[model] config: {kind} of {config.num_hidden_layers} blocks", f"choose 1 to {MAX_CONFIG_LAYERS} blocks"
        )
    if config.vocab_size < vocabulary:
        raise UnsupportedModel(
            f"[model] config: vocab_size {config.vocab_size} is smaller than the tokenizer's {vocabulary}",
            "increase vocab_size, or choose another [data] tokenizer",
        )
    longest = getattr(config, "max_position_embeddings", None) or sequence_length
    if longest < sequence_length:
        raise UnsupportedModel(
            f"[data] sequence_length {sequence_length} is more than the model's max_position_embeddings {longest}",
            "lower sequence_length, or set a larger max_position_embeddings in config",
        )


def lora_configuration(section: AdapterSection) -> Any:
    """Build a `peft.LoraConfig`. Raises `ConfigError` if the library is missing."""
    require_library("peft")
    from peft import LoraConfig

    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # peft divides it by the rank; a float is fine
        target_modules=list(section.targets),
        task_type="CAUSAL_LM",
    )


def check_lora_targets(targets: tuple[str, ...], trained: tuple[str, ...]) -> None:
    """Check that every target has an adapter among the trained parameters. Raises `UnsupportedModel`."""
    adapted = {name.partition(".lora_")[0] for name in trained}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in adapted):
            raise UnsupportedModel(
                f"[model.adapter] targets: no linear module of the model is called {target!r}",
                "name the ends of modules, such as q_proj and v_proj of Llama",
            )


def require_library(name: str) -> None:
    """Raise `ConfigError` unless a library of the `hf` extra is installed."""
    try:
        import_module(name)
    except ImportError as error:
        raise ConfigError(f"a Hugging Face architecture needs the library {error.name}", HF_REMEDY) from error


def _reason(error: Exception) -> str:
    """Return the last line of the message: the libraries state the cause there."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].removeprefix("ValueError: ") if lines else type(error).__name__
