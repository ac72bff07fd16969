"""Pretrained weights of a span, loaded by name from a local directory of safetensors files.

Tensors outside the span are not read. Checkpoints name and split some tensors differently from the model; for example,
they store the experts of a mixture one by one. `transformers` knows the differences. Its own conversions are applied
here to the few tensors that become one parameter, so that at most one parameter is in memory twice.
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

_PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # other dtypes are quantised values, which need a scale


def _trusted(_: str) -> None:
    """Accept every file, because this program wrote the directory."""


def load(
    architecture: HuggingFaceArchitecture, directory: Path, model: TrainableModel, check: Check = _trusted
) -> None:
    """Load a span's parameters from a checkpoint; adapters do not change. Raises `CheckpointCorrupt`.

    `check` gets the name of every file before it is read, and raises if the file must not be read.
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
        raise CheckpointCorrupt(
            f"{directory} lacks {', '.join(sorted(wanted))}",
            "name the directory of a checkpoint of the run's architecture",
        )


def _fill(wanted: dict[str, list[Tensor]], found: Mapping[str, Tensor], directory: Path) -> None:
    for name, values in found.items():
        for view in wanted.pop(name, ()):
            if values.shape != view.shape or values.dtype not in _PLAIN:
                what = f"{values.dtype} {list(values.shape)}"
                raise CheckpointCorrupt(
                    f"{directory}: {name} is {what}; the model's has shape {list(view.shape)}",
                    "use a checkpoint of the run's architecture, in fp32, bf16 or fp16",
                )
            view.copy_(values)


class _Sources:
    """Checkpoint tensors that become one parameter, or one tensor that becomes several parameters."""

    def __init__(self, converter: Any, model: Any) -> None:
        self._converter, self._model = deepcopy(converter), model
        self._tensors: list[tuple[str, str, str | None]] = []  # file, name, the converter's pattern for it

    @property
    def files(self) -> set[str]:
        """Names of the files that contain the tensors."""
        return {file for file, _, _ in self._tensors}

    def add(self, file: str, name: str, pattern: str | None) -> None:
        self._tensors.append((file, name, pattern))

    def read(self, directory: Path, target: str) -> dict[str, Tensor]:
        """Read and convert the tensors to parameters by name. Raises `CheckpointCorrupt`."""
        if self._converter is None:
            file, name, _ = self._tensors[-1]
            return {target: read_tensor(directory / file, name)}
        for file, name, pattern in self._tensors:
            self._converter.add_tensor(target, name, pattern, partial(read_tensor, directory / file, name))
        try:
            made = self._converter.convert(target, model=self._model, config=self._model.config)
        except (RuntimeError, ValueError, IndexError) as error:
            raise CheckpointCorrupt(
                f"{directory}: {target} cannot be converted from the checkpoint's tensors: {error}"
            ) from error
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def _sources(
    architecture: HuggingFaceArchitecture, files: Mapping[str, str], model: TrainableModel, wanted: Collection[str]
) -> dict[str, _Sources]:
    """Find the checkpoint tensors for the span's parameters.

    The key is the name of a parameter; for parameters that are made together, the name of the first.
    """
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
    """Map each tensor of a checkpoint to its file. Raises `CheckpointCorrupt`."""
    index = directory / SAFE_WEIGHTS_INDEX_NAME
    try:
        if not index.exists():
            return dict.fromkeys(tensor_names(directory / SAFE_WEIGHTS_NAME), SAFE_WEIGHTS_NAME)
        if index.stat().st_size > _MAX_INDEX_BYTES:
            raise CheckpointCorrupt(f"{index} has more than {_MAX_INDEX_BYTES >> 20} MiB, too many for an index")
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return dict(_checked(weight_map, index))
    except (OSError, CheckpointCorrupt, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{directory} has no readable safetensors files: {error}",
            f"name a directory with {SAFE_WEIGHTS_NAME} or {SAFE_WEIGHTS_INDEX_NAME}",
        ) from error


def _checked(weight_map: Mapping[object, object], index: Path) -> Iterator[tuple[str, str]]:
    for name, file in weight_map.items():
        if not isinstance(name, str) or not isinstance(file, str) or Path(file).name != file:
            raise CheckpointCorrupt(f"{index}: {name!r} is in {file!r}, which is not a file name in the same directory")
        yield name, file
