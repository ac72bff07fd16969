"""Module paths of a Hugging Face decoder, found by each module's role and not by a family's names.

    body: embedding → blocks (a module list) → final norm;   then the head

A model with another structure is refused, and the error names what is missing. `huggingface.py` uses the paths to cut a
model into spans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from atoll.core.errors import UnsupportedModel

_RANDOM = ("dropout", "jitter")  # parts of the attribute names of random operations other than `nn.Dropout`


@dataclass(frozen=True)
class ModulePaths:
    """Paths of the modules that make up the layers of a model."""

    body: str
    embedding: str
    blocks: str
    blocks_count: int
    norm: str
    head: str

    def layer_of(self, parameter: str) -> int:
        """Return the number of the layer that contains a parameter. Raises `KeyError` if no layer contains it."""
        if parameter.startswith(f"{self.embedding}."):
            return 0
        if parameter.startswith((f"{self.norm}.", f"{self.head}.")):
            return self.blocks_count + 1
        if parameter.startswith(f"{self.blocks}."):
            return int(parameter.removeprefix(f"{self.blocks}.").partition(".")[0]) + 1
        raise KeyError(parameter)


class PassThroughBlock(nn.Module):
    """Placeholder for a block that another span holds; returns its input."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states


def find_module_paths(model: Any) -> ModulePaths:
    """Find the module paths of a model. Raises `UnsupportedModel`."""
    kind, count = model.config.model_type, model.config.get_text_config().num_hidden_layers
    paths = {module: name for name, module in model.named_modules()}
    body: Any = getattr(model, model.base_model_prefix, None)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    _require(body is not None, kind, f"a body under the name {model.base_model_prefix!r}")
    _require(embedding is not None, kind, "an input embedding")
    _require(head is not None, kind, "an output embedding")
    lists = [child for child in body.children() if isinstance(child, nn.ModuleList) and len(child) == count]
    _require(len(lists) == 1, kind, f"one list of {count} blocks (it has {len(lists)})")
    rest = [child for child in body.children() if child is not embedding and child is not lists[0]]
    norms = [child for child in rest if any(True for _ in child.parameters())]
    _require(len(norms) == 1, kind, f"one final norm (it has {len(norms)} other modules with parameters)")
    found = ModulePaths(paths[body], paths[embedding], paths[lists[0]], count, paths[norms[0]], paths[head])
    _require_all(model, found)
    return found


def _require_all(model: Any, module_paths: ModulePaths) -> None:
    """Check that every parameter belongs to a layer and that nothing is random. Raises `UnsupportedModel`.

    Randomness is refused because the backward pass repeats a span's forward pass and must get the same result.
    """
    kind = model.config.model_type
    for name, _ in model.named_parameters():
        try:
            module_paths.layer_of(name)
        except KeyError:
            _require(False, kind, f"a layer for its parameter {name}")
    for name, module in model.named_modules():
        dropout = isinstance(module, nn.Dropout) and module.p > 0
        chances = [value for key, value in vars(module).items() if any(word in key for word in _RANDOM)]
        draws = dropout or any(_number(value) > 0 for value in chances)
        _require(not draws, kind, f"a deterministic forward pass (dropout or jitter in {name} is above 0: set it to 0)")
    balances = getattr(model.config, "output_router_logits", False)
    _require(not balances, kind, "a loss that depends on the logits alone (set output_router_logits to false)")


def rebuild_buffers(model: Any, config: Any) -> None:
    """Replace modules whose buffers are on the meta device (rotary frequencies) by modules with computed buffers.

    A module can be rebuilt if it has no parameters and its buffers are not in its state dict. Raises
    `UnsupportedModel`.
    """
    for name, module in list(model.named_modules()):
        buffers = [key for key, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if not buffers:
            continue
        pure = not any(True for _ in module.parameters()) and not set(buffers) & set(module.state_dict())
        try:
            rebuilt = type(module)(config=config) if pure else None
        except (TypeError, AttributeError):
            rebuilt = None
        _require(rebuilt is not None, config.model_type, f"a way to compute the buffers {buffers} of {name}")
        model.set_submodule(name, rebuilt)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _require(holds: bool, kind: str, what: str) -> None:
    if not holds:
        raise UnsupportedModel(
            f"{kind} cannot be cut into layers: it lacks {what}",
            "choose a decoder that is embedding, blocks, final norm and head, such as Llama, Qwen 3 or GPT-NeoX",
        )
