"""Export of a checkpoint as a Hugging Face directory: `atoll export`.

The built-in decoder has the equations of Llama (`model/llama.py`), so its export renames parameters: `transformers`
loads the directory as `LlamaForCausalLM` and needs no code of ours. `transformers_model.py` exports Hugging Face
decoders. The files are written to a temporary directory beside the target, synced, and renamed when they are complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from atoll.core.built_in_shape import ModelShape, layer_table, resolve_shape
from atoll.core.disk import OS_DISK
from atoll.core.errors import AlreadyExists, ConfigError, DataDirUnusable, UsageError
from atoll.core.model_spec import HuggingFaceModel, ModelSection
from atoll.node.data.open_corpus import CacheFolder, load_run_tokenizer
from atoll.node.export.safetensors_writer import OutputFormat, TensorGroup, stored_tensor_group, write
from atoll.node.export.stored_model import StoredModel
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.llama import NORM_EPSILON, Decoder
from atoll.node.model.tokenizer import Tokenizer
from atoll.node.state.tensor_file import LayerLayout

ORIGIN_FILE = "atoll.json"  # of adapters; a separate file, because `peft` warns of unknown keys
DEFAULT_SHARD_BYTES = 50e9  # the default of `transformers`
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_BLOCK_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def export_huggingface(
    model: StoredModel,
    target: Path,
    dtype: str = "fp32",
    base: Path | None = None,
    shard_bytes: float = DEFAULT_SHARD_BYTES,
    cache: CacheFolder | None = None,
) -> None:
    """Write config.json, generation_config.json, model.safetensors or its shards, and the tokenizer to `target`.

    A run of adapters gives adapter_config.json, adapter_model.safetensors and atoll.json instead. With `base`, the
    directory of its pretrained weights, it gives the whole model with the adapters merged. One parameter is in memory
    at a time; one layer if adapters are merged. `cache`: the node's folder for its corpus, which may contain the
    tokenizer.

    Raises `AlreadyExists`, `ConfigError` if the checkpoint does not match its run spec or the tokenizer cannot be
    loaded, `UsageError` for a `base` that the run does not use, `PretrainedWeightsUnusable`, `CheckpointCorrupt` and
    `DataDirUnusable`.
    """
    if target.exists():
        raise AlreadyExists(f"{target} already exists", "name a directory that does not exist: nothing is overwritten")
    _check_whole(model)
    tokenizer = load_run_tokenizer(model.spec.data, cache)
    temporary = target.with_name(f".{target.name}.tmp-{secrets.token_hex(4)}")
    output_format = OutputFormat(temporary, DTYPES[dtype], shard_bytes)
    try:
        temporary.mkdir(parents=True)
        section = model.spec.model
        if isinstance(section, HuggingFaceModel):
            # importing transformers takes seconds
            from atoll.node.export.transformers_model import write_huggingface_model

            write_huggingface_model(model, section, output_format, tokenizer, _provenance(model), base)
            if section.adapter is not None and base is None:
                _write_json(temporary / ORIGIN_FILE, _provenance(model))
        elif base is not None:
            raise UsageError("this run trained the whole model, so there are no adapters to merge", "leave out --base")
        else:
            shape = shape_of(model, section)
            write(output_format, _tensor_groups(model, shape))
            _write_json(temporary / "config.json", _config(model, shape, tokenizer, dtype))
            _write_json(temporary / "generation_config.json", _generation(tokenizer))
        tokenizer.save(temporary)
        _sync(temporary)
        OS_DISK.rename(temporary, target)
        OS_DISK.sync_directory(target.absolute().parent)
    except OSError as error:
        raise DataDirUnusable(
            f"cannot write {target}: {error.strerror or error}",
            "free some space there, or name another directory with --to",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            shutil.rmtree(temporary)


def _sync(directory: Path) -> None:
    """Sync all files in a directory, and the directory itself, to disk. Raises `OSError`."""
    for path in directory.rglob("*"):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    OS_DISK.sync_directory(directory)


def _check_whole(model: StoredModel) -> None:
    """Raise `ConfigError` unless the checkpoint contains all layers."""
    held, layers = model.layers.numbers, len(model.head.manifest.layers)
    if held != slice(0, layers):
        raise ConfigError(
            f"the checkpoint holds only layers {held.start} to {held.stop - 1} of {layers}",
            "name a checkpoint of every stage of a route: --checkpoint DIR --checkpoint DIR",
        )


def shape_of(model: StoredModel, section: ModelSection) -> ModelShape:
    """Compute the model's shape, with the vocabulary that was trained.

    Raises `ConfigError` if the checkpoint's layers do not match its run spec.
    """
    shape = resolve_shape(section, 1)
    vocabulary, rest = divmod(model.layers.offsets[1], shape.dimension) if model.layers.names else (0, 0)
    shape = replace(shape, vocabulary=vocabulary)
    if rest or LayerLayout.of(layer_table(model.spec, shape)) != model.layers:
        raise ConfigError("the checkpoint's layers do not match the [model] of its run spec", "use another checkpoint")
    return shape


def _tensor_groups(model: StoredModel, shape: ModelShape) -> list[TensorGroup]:
    """List every parameter under its name in Llama, one per group."""
    with torch.device("meta"):
        layout = FlatLayout.of(Decoder(shape))
    return [stored_tensor_group(model, slot, _llama_name(slot.name, shape.layers)) for slot in layout.slots]


def _llama_name(name: str, blocks: int) -> str:
    found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    assert found is not None
    layer, parameter = int(found[1]), found[2]
    if layer == 0:
        return "model.embed_tokens.weight"
    if layer == blocks + 1:
        return "model.norm.weight" if parameter == "norm.weight" else "lm_head.weight"
    return f"model.layers.{layer - 1}.{_BLOCK_NAMES[parameter]}"


def _config(model: StoredModel, shape: ModelShape, tokenizer: Tokenizer, dtype: str) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.dimension,
        "intermediate_size": shape.hidden_dimension,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dimension,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": shape.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": model.spec.data.sequence_length,
        "torch_dtype": str(DTYPES[dtype]).removeprefix("torch."),
        **_generation(tokenizer),
        "atoll": _provenance(model),
    }


def _provenance(model: StoredModel) -> dict[str, object]:
    """Record the run and the round from which a model was exported."""
    head = model.head
    return {
        "run": model.spec.run.name,
        "round": head.round,
        "manifest": head.hash.hex(),
        "committed_tokens": head.committed_tokens,
    }


def _generation(tokenizer: Tokenizer) -> dict[str, object]:
    end = tokenizer.separator[0] if tokenizer.separator else None
    return {"bos_token_id": None, "eos_token_id": end, "pad_token_id": None}


def _write_json(path: Path, document: dict[str, object]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")
