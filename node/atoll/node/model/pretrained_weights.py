"""A span's weights out of a local directory of safetensors, by name: what lies outside the span is not read.

Checkpoints name and slice some tensors otherwise than the model does (the experts of a mixture lie one by one). How,
is known to `transformers`; its own conversions are applied here to the few tensors that become one parameter, so that
at most a parameter's worth is in memory twice.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.errors import CheckpointCorrupt
from atoll.core.model_spec import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from atoll.node.model.huggingface import HuggingFaceArchitecture
from atoll.node.model.safetensors_reader import read_tensor, tensor_names
from atoll.node.model.span_model import TrainableModel

Check = Callable[[str], None]
_MAX_INDEX_BYTES = 64 << 20

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # other dtypes stand for other values than they hold


def _trusted(_: str) -> None:
    """Files of our own."""


def load(
    architecture: HuggingFaceArchitecture, directory: Path, model: TrainableModel, check: Check = _trusted
) -> None:
    """Fill what was in the checkpoint; adapters stay as they are. Raises `CheckpointCorrupt`.

    `check` is told the name of every file before it is read, and raises if it must not be.
    """
    wanted: dict[str, list[Tensor]] = defaultdict(list)
    for name, view in model.tensors():
        if "lora_" not in name:
            wanted[name].append(view)
    check(SAFE_WEIGHTS_INDEX_NAME if (directory / SAFE_WEIGHTS_INDEX_NAME).exists() else SAFE_WEIGHTS_NAME)
    files = tensor_files(directory)
    for name, sources in _sources(architecture, files, model, wanted).items():
        for file in sources.files:
            check(file)
        _fill(wanted, sources.read(directory, name), directory)
    if wanted:
        raise CheckpointCorrupt(f"{directory} lacks {', '.join(sorted(wanted))}", "is it of this architecture?")


def _fill(wanted: dict[str, list[Tensor]], found: Mapping[str, Tensor], directory: Path) -> None:
    for name, values in found.items():
        for view in wanted.pop(name, ()):
            if values.shape != view.shape or values.dtype not in _PLAIN:
                what = f"{values.dtype} {list(values.shape)}"
                raise CheckpointCorrupt(f"{directory}: {name} is {what}, the model's has shape {list(view.shape)}")
            view.copy_(values)


class _Sources:
    """The tensors of a checkpoint that become one parameter, or several that lie in one tensor there."""

    def __init__(self, converter: Any, model: Any) -> None:
        self._converter, self._model = deepcopy(converter), model
        self._tensors: list[tuple[str, str, str | None]] = []  # file, name, the converter's pattern for it

    @property
    def files(self) -> set[str]:
        """Those in which they lie."""
        return {file for file, _, _ in self._tensors}

    def add(self, file: str, name: str, pattern: str | None) -> None:
        self._tensors.append((file, name, pattern))

    def read(self, directory: Path, target: str) -> dict[str, Tensor]:
        """Parameters by name. Raises `CheckpointCorrupt`."""
        if self._converter is None:
            file, name, _ = self._tensors[-1]
            return {target: read_tensor(directory / file, name)}
        for file, name, pattern in self._tensors:
            self._converter.add_tensor(target, name, pattern, partial(read_tensor, directory / file, name))
        try:
            made = self._converter.convert(target, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointCorrupt(f"{directory}: {target} cannot be made of its parts: {error}") from error
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def _sources(
    architecture: HuggingFaceArchitecture, files: Mapping[str, str], model: TrainableModel, wanted: Collection[str]
) -> dict[str, _Sources]:
    """What the span's parameters are made of, under the name of the first of those that are made together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    module: Any = model.span_definition.module
    mapping = get_model_conversion_mapping(module)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    known = dict.fromkeys(architecture.names, True)
    layers = {architecture.module_paths.layer_of(name) for name in wanted}
    found: dict[str, _Sources] = {}
    for name in sorted(files, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, known)
        if target in known and architecture.module_paths.layer_of(target) in layers:
            converter = None if pattern is None else by_pattern[pattern]
            found.setdefault(target, _Sources(converter, module)).add(files[name], name, pattern)
    return found


def tensor_files(directory: Path) -> dict[str, str]:
    """Which file each tensor lies in. Raises `CheckpointCorrupt`."""
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    try:
        if not index.exists():
            return dict.fromkeys(tensor_names(directory / SAFE_WEIGHTS_NAME), SAFE_WEIGHTS_NAME)
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointCorrupt(f"{index} is too large to be an index")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return dict(_checked(weight_map, index))
    except (OSError, CheckpointCorrupt, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{directory} holds no safetensors that can be read: {error}",
            f"it needs {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}",
        ) from error


def _checked(weight_map: Mapping[object, object], index: Path) -> Iterator[tuple[str, str]]:
    for name, file in weight_map.items():
        if not isinstance(name, str) or not isinstance(file, str) or Path(file).name != file:
            raise CheckpointCorrupt(f"{index}: {name!r} lies in {file!r}, which is no file beside it")
        yield name, file
