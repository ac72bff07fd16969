"""From the data of a run spec to objects of `transformers` and `peft`, with every key checked.

Only classes of the libraries themselves are made. A key that the family's configuration does not have is refused:
`transformers` would keep it silently, and a misspelt size would be the default's.
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
_UNDECLARED = {"head_dim"}  # which families read whether or not their configuration declares it
NON_MODEL_KEYS = {  # of every configuration: labels, outputs, what a file says about itself
    *("transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id", "problem_type"),
    *("output_hidden_states", "output_attentions", "return_dict", "chunk_size_feed_forward", "is_encoder_decoder"),
    *("use_cache", "_name_or_path", "auto_map"),
}


def build_configuration(
    data: Mapping[str, Any], vocabulary: int, sequence_length: int, nulls: Collection[str] = ()
) -> Any:
    """A configuration of `transformers`; without `vocab_size` it is the tokenizer's `vocabulary`.

    Raises `UnsupportedModel`, and `ConfigError` where the library is missing.
    """
    require_library("transformers")
    from transformers import CONFIG_MAPPING

    kind = data["model_type"]
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"[model] config: this transformers knows no model_type {kind!r}",
            "check its spelling; newer families need a newer transformers: pip install -U transformers",
        )
    cls: Any = CONFIG_MAPPING[kind]
    unknown = sorted({*data, *nulls} - known_keys(cls))
    if unknown:
        raise UnsupportedModel(f"[model] config: {kind} has no key {', '.join(unknown)}", "leave it out, or spell it")
    chosen = {"vocab_size": vocabulary, "use_cache": False, **data, **dict.fromkeys(nulls)}
    chosen.pop("model_type")
    try:
        made: Any = cls(**chosen)
    except Exception as error:  # it is a stranger's, and every family checks it in its own way
        raise UnsupportedModel(f"[model] config: {_reason(error)}", "sizes must fit together") from error
    _check_sizes(made, vocabulary, sequence_length)
    return made


def known_keys(cls: Any) -> set[str]:
    """What a family's configuration is made of."""
    own = {field.name for field in fields(cls)} if is_dataclass(cls) else set()
    legacy = _LEGACY_ROPE if "rope_parameters" in own else set()
    names = {*own, *cls.attribute_map, *cls.attribute_map.values(), *legacy, *_UNDECLARED, "model_type"}
    return names - NON_MODEL_KEYS


def _check_sizes(config: Any, vocabulary: int, sequence_length: int) -> None:
    kind = config.model_type
    if config.get_text_config() is not config:
        raise UnsupportedModel(f"[model] config: {kind} is made of several models", "name its text model's type")
    if not 1 <= config.num_hidden_layers <= MAX_CONFIG_LAYERS:
        raise UnsupportedModel(f"[model] config: {kind} of {config.num_hidden_layers} blocks", "it needs 1 to 1022")
    if config.vocab_size < vocabulary:
        raise UnsupportedModel(
            f"[model] config: vocab_size {config.vocab_size} is smaller than the tokenizer's {vocabulary}",
            "make it larger, or choose another [data] tokenizer",
        )
    longest = getattr(config, "max_position_embeddings", None) or sequence_length
    if longest < sequence_length:
        raise UnsupportedModel(
            f"[data] sequence_length {sequence_length} is more than the model's max_position_embeddings {longest}",
            "shorten samples, or give config a larger max_position_embeddings",
        )


def lora_configuration(section: AdapterSection) -> Any:
    """A `peft.LoraConfig`. Raises `ConfigError` where the library is missing."""
    require_library("peft")
    from peft import LoraConfig

    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,  # type: ignore[arg-type]  # it is divided by the rank; whole numbers are not needed
        target_modules=list(section.targets),
        task_type="CAUSAL_LM",
    )


def check_lora_targets(targets: tuple[str, ...], trained: tuple[str, ...]) -> None:
    """Every target must have an adapter among the trained parameters. Raises `UnsupportedModel`."""
    adapted = {name.partition(".lora_")[0] for name in trained}
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in adapted):
            raise UnsupportedModel(
                f"[model.adapter] targets: no linear module of the model is called {target!r}",
                "name the ends of modules, such as q_proj and v_proj of Llama",
            )


def require_library(name: str) -> None:
    """Raise `ConfigError` unless a library of the extra is installed."""
    try:
        import_module(name)
    except ImportError as error:
        raise ConfigError(f"a Hugging Face architecture needs the library {error.name}", HF_REMEDY) from error


def _reason(error: Exception) -> str:
    """In one line: the libraries put the matter into the last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].removeprefix("ValueError: ") if lines else type(error).__name__
