"""The inner optimiser's state on this node's own disk, so that a restarted node continues with it.

The file is torch's own format, read without unpickling code (`weights_only`). It never comes from or goes to another
node. State of another run, model, span or optimiser is not used.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atoll.core.disk import OS_DISK
from atoll.core.errors import CheckpointCorrupt, DataDirUnusable, InvalidTransition
from atoll.node.training.inner_optimizer import InnerOptimizer

_STATE, _OWNER = "state", "owner"

Owner = Mapping[str, str]  # identity of the state's run, model, span and optimiser


def keep(optimizer: InnerOptimizer, owner: Owner, path: Path) -> None:
    """Replace `path` by the state. Raises `InvalidTransition` if nothing was trained yet, `DataDirUnusable`."""
    states = [part["state"] for part in optimizer.state_dict()]
    if not all(states):
        raise InvalidTransition("the optimiser has made no step yet")
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            torch.save({_OWNER: dict(owner), _STATE: states}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        OS_DISK.sync_directory(path.parent)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as a RuntimeError
        temporary.unlink(missing_ok=True)
        raise DataDirUnusable(f"cannot write {path}: {error}", "free some space on this disk") from error


def restore(optimizer: InnerOptimizer, owner: Owner, path: Path) -> None:
    """Load a kept state into the optimiser; its learning rates and other settings do not change.

    Raises `CheckpointCorrupt`, and then changes nothing.
    """
    parts = optimizer.optimizers
    on_host = all(parameter.device.type == "cpu" for part in parts for parameter in _parameters(part))
    try:
        stored = torch.load(path, map_location="cpu", weights_only=True, mmap=not on_host)
        if stored[_OWNER] != dict(owner):
            raise CheckpointCorrupt(f"{path} is the state of something else: {stored[_OWNER]}")
        states = stored[_STATE]
        for part, state in zip(parts, states, strict=True):
            _check(part, state)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, pickle.UnpicklingError) as error:
        raise CheckpointCorrupt(f"{path} is not the state of this optimiser: {error}") from error
    for part, state in zip(parts, states, strict=True):
        part.load_state_dict({**part.state_dict(), "state": state})


def _check(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Raise `ValueError` unless every parameter has a finite state of the parameter's shape."""
    parameters = _parameters(optimizer)
    if sorted(state) != list(range(len(parameters))):
        raise ValueError(f"it is of {len(state)} parameters, and not of {len(parameters)}")
    for number, parameter in enumerate(parameters):
        for tensor in _tensors(state[number]):
            if tensor.dim() and tensor.shape != parameter.shape:
                raise ValueError(f"a state of {tuple(tensor.shape)} for a parameter of {tuple(parameter.shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError("it has NaN or infinite values")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _tensors(state: Mapping[str, Any]) -> Iterator[Tensor]:
    yield from (value for value in state.values() if isinstance(value, Tensor))
