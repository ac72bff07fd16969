"""Span definitions of Hugging Face decoders, with the unchanged code of `transformers`.

Nothing here depends on a model family. The modules of a model are found by their roles (`module_paths.py`), and those
outside the span are replaced by placeholders. The family's own `forward` runs the rest. It computes masks, positions
and rotary embeddings on every span as for the whole model, because blocks keep their numbers.

Shape suffixes: B batch, T sequence, D model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from atoll.core.errors import AtollError, ConfigError, UnsupportedModel
from atoll.node.model.document_masks import document_positions
from atoll.node.model.hf_document_masks import RecordingBlock, gets_documents
from atoll.node.model.module_paths import PassThroughBlock, find_module_paths, rebuild_buffers
from atoll.node.model.span import Span
from atoll.node.model.span_model import Run, SpanDefinition, Tie


class HuggingFaceArchitecture:
    """A causal language model as an `Architecture`; with `lora`, adapters are trained and the rest is frozen."""

    def __init__(self, config: Any, lora: Any = None) -> None:
        """Build the model on the meta device. `config`: of `transformers`; `lora`: a `peft.LoraConfig`.

        Raises `UnsupportedModel`.
        """
        self.config = config
        self._lora = lora
        _refuse_remote_code(config)
        whole = self._build()
        self.module_paths = find_module_paths(whole)
        self.names = tuple(name.replace(".base_layer.", ".") for name, _ in whole.named_parameters())
        self.trained_names = tuple(name for name, each in whole.named_parameters() if each.requires_grad)
        self._check_body_is_identity(whole)

    @property
    def has_adapters(self) -> bool:
        """True if adapters are trained and the rest is frozen."""
        return self._lora is not None

    @property
    def layers(self) -> int:
        return self.module_paths.blocks_count + 2

    @property
    def tie(self) -> Tie | None:
        """The tie of the head's matrix to the embedding's, if the model has one."""
        if not self.config.get_text_config().tie_word_embeddings:
            return None
        return Tie(f"{self.module_paths.embedding}.weight", f"{self.module_paths.head}.weight")

    def span_definition(self, span: Span, activation_checkpointing: bool = False) -> SpanDefinition:
        """Define a span, without allocation.

        Raises `InvalidRequest` for layers outside the model, `UnsupportedModel`.
        """
        span.check_within(self.layers)
        model = self._build()
        if activation_checkpointing:
            self._checkpoint(model)
        self._remove_other_layers(model, span)
        rebuild_buffers(model, self.config)
        rows: list[dict[str, nn.Parameter]] = [{} for _ in range(len(span))]
        for name, parameter in model.named_parameters():
            rows[self.module_paths.layer_of(name) - span.first][name] = parameter
        config = self.config.get_text_config()
        return SpanDefinition(
            span,
            self.layers,
            config.hidden_size,
            config.vocab_size,
            model,
            self._runner(model, span),
            tuple(rows),
            f"{self.module_paths.embedding}.weight",
            tie=self.tie if self._lora is None else None,
            copy=self.tie if self._lora is not None else None,
        )

    def _build(self) -> Any:
        """Build the whole model on the meta device; a tied head gets a separate matrix."""
        from transformers import AutoModelForCausalLM

        auto: Any = AutoModelForCausalLM
        with torch.device("meta"):
            try:
                model = auto.from_config(self.config, dtype=torch.float32, trust_remote_code=False)
            except ValueError as error:
                raise UnsupportedModel(
                    f"{self.config.model_type} is not a causal language model in the installed transformers",
                    "choose a decoder such as Llama, Qwen 3, GPT-NeoX or Mixtral",
                ) from error
            head = model.get_output_embeddings()
            if head is not None:
                head.weight = nn.Parameter(torch.empty_like(head.weight))
            if self._lora is not None:
                _adapt(model, self._lora)
        return model.train()

    @property
    def attention_heads(self) -> tuple[int, int, int]:
        """Heads of a block, its key-value heads, and a head's dimension."""
        text = self.config.get_text_config()
        heads = int(getattr(text, "num_attention_heads", None) or 1)
        dimension = getattr(text, "head_dim", None) or text.hidden_size // heads
        return heads, int(getattr(text, "num_key_value_heads", None) or heads), int(dimension)

    def _checkpoint(self, model: Any) -> None:
        try:
            model.activation_checkpointing_enable({"use_reentrant": False})
        except ValueError as error:
            raise UnsupportedModel(
                f"{self.config.model_type} does not support activation checkpointing",
                "remove activation_checkpointing from [optimizer]",
            ) from error

    def _remove_other_layers(self, model: Any, span: Span) -> None:
        module_paths = self.module_paths
        for index in range(module_paths.blocks_count):
            if index + 1 not in span:
                model.set_submodule(f"{module_paths.blocks}.{index}", PassThroughBlock())
        if span.first > 0:
            model.set_submodule(module_paths.embedding, nn.Identity())
        if span.last < self.layers - 1:
            model.set_submodule(module_paths.norm, nn.Identity())
            model.set_submodule(module_paths.head, nn.Identity())

    def _runner(self, model: Any, span: Span) -> Run:
        """Return a function of tokens or activations that computes logits, or activations after the body."""
        whole = span.last == self.layers - 1
        part = model if whole else model.get_submodule(self.module_paths.body)
        key = "input_ids" if span.first == 0 else "inputs_embeds"

        def run(x: Tensor, starts_BT: Tensor | None = None) -> Tensor:
            given = {key: x} if starts_BT is None else {key: x, "position_ids": document_positions(starts_BT)}
            output = part(**given, use_cache=False)  # the library masks documents where positions restart
            return cast("Tensor", output.logits if whole else output.last_hidden_state)

        return run

    def _check_body_is_identity(self, model: Any) -> None:
        """Check that the body returns its input if all layers are removed. Raises `UnsupportedModel`.

        Otherwise a span in the middle would compute something that is not part of any layer.
        """
        self._remove_other_layers(model, Span(0, 0))
        rebuild_buffers(model, self.config)
        given_BTD = torch.linspace(-1.0, 1.0, 4 * self.config.get_text_config().hidden_size).view(1, 4, -1)
        with torch.no_grad():
            passed = self._runner(model, Span(1, 1))(given_BTD)
        if not isinstance(passed, Tensor) or not torch.equal(passed, given_BTD):
            raise UnsupportedModel(
                f"{self.config.model_type} cannot be cut into layers: its {self.module_paths.body} does more to "
                "activations than its blocks do (scaled or positional embeddings, several streams, blocks that return "
                "tuples)",
                "choose a decoder whose body is embedding, blocks and final norm",
            )

    def check_document_masks(self) -> None:
        """Check that every block gets a mask of documents, and positions that restart. Raises `UnsupportedModel`.

        Placeholders for the blocks record what the family's body gives them for a sample of three documents.
        """
        model, paths = self._build(), self.module_paths
        blocks = [model.get_submodule(f"{paths.blocks}.{index}") for index in range(paths.blocks_count)]
        # blocks with state, such as state-space blocks
        mixes = any(isinstance(part, nn.Conv1d) for block in blocks for part in block.modules())
        recorders = [RecordingBlock() for _ in blocks]
        self._remove_other_layers(model, Span(0, 0))
        for index, recorder in enumerate(recorders):
            model.set_submodule(f"{paths.blocks}.{index}", recorder)
        rebuild_buffers(model, self.config)
        starts_BT = torch.tensor([[True, False, True, False, False, True]])
        given_BTD = torch.zeros(1, starts_BT.shape[1], self.config.get_text_config().hidden_size)
        with torch.no_grad():
            self._runner(model, Span(1, 1))(given_BTD, starts_BT)
        if mixes or not all(gets_documents(recorder.given, starts_BT) for recorder in recorders):
            raise UnsupportedModel(
                f"{self.config.model_type} cannot be trained with document_masks: its blocks do not keep documents "
                "apart with a mask of attention and positions that restart",
                "remove document_masks from [data], or choose a decoder such as Llama, Qwen 3 or GPT-NeoX",
            )


def build_architecture(config: Any, lora: Any = None) -> HuggingFaceArchitecture:
    """Build an architecture from an untrusted configuration. Raises `UnsupportedModel`, `ConfigError`."""
    try:
        return HuggingFaceArchitecture(config, lora)
    except AtollError:
        raise
    except Exception as error:  # the code of a family can raise any exception
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnsupportedModel(
            f"{config.model_type} cannot be built from [model] config: {reason}",
            "correct the sizes and names in config; they must fit together",
        ) from error


def read_configuration(directory: Path) -> Any:
    """Read the config.json of a local directory. Raises `ConfigError`.

    Nothing is downloaded, and no code from the directory is run.
    """
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # untrusted data, which every family checks in a different way
        raise ConfigError(
            f"{directory} has no configuration that the installed transformers knows: {error}",
            "name a directory with a config.json of a supported architecture",
        ) from error


def _refuse_remote_code(config: Any) -> None:
    """Raise `UnsupportedModel` if an untrusted configuration refers to code to download, or to quantised weights."""
    for part in (config, config.get_text_config()):
        for key, value in vars(part).items():
            if "implementation" in key and isinstance(value, str) and not value.isidentifier():
                raise UnsupportedModel(f"the configuration names foreign code in {key}: {value!r}", "remove this key")
        if getattr(part, "quantization_config", None):
            raise UnsupportedModel("the pretrained weights are quantised", "use a checkpoint in fp32, bf16 or fp16")


def _adapt(model: Any, lora: Any) -> None:
    """Insert LoRA adapters (Hu et al. 2021, arXiv:2106.09685) and freeze all other parameters. Raises `ConfigError`."""
    from peft import inject_adapter_in_model

    if lora.modules_to_save or lora.bias != "none":
        raise ConfigError(
            "the LoRA configuration sets modules_to_save or bias, but only adapters are trained", "remove both keys"
        )
    if getattr(lora, "use_dora", False) or getattr(lora, "init_lora_weights", True) is not True:
        raise ConfigError(
            "the LoRA configuration sets use_dora or init_lora_weights, which adapters here do not support",
            "remove both keys",
        )
    try:
        inject_adapter_in_model(lora, model)
    except ValueError as error:
        raise ConfigError(f"the LoRA configuration does not fit the model: {error}") from error
    if any("lora_embedding_" in name for name, _ in model.named_parameters()):
        raise ConfigError("adapters of embeddings are not supported", "leave the embedding out of target_modules")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
