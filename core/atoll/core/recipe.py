"""Default training settings of a run whose spec does not set them: optimiser, rates, weight decay, outer step. Pure.

A model with random initial weights trains with Muon and an outer step with little momentum. A model with pretrained
weights trains with AdamW, because the weights were probably trained with it. The values were measured with small models
(docs/adr/0013); the rule for the width keeps the spectral norm of updates constant (Yang et al. 2023,
arXiv:2310.17813). Elements of Muon's updates have a constant size, so the rate falls with the square root of the width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from atoll.core.model_spec import HuggingFaceModel, ModelSection

PRESET_DIMENSIONS = {
    "nano": 128, "micro": 256, "30m": 512, "125m": 768, "350m": 1024, "1b": 2048, "3b": 3072, "7b": 4096
}  # fmt: skip
_WIDTH_KEYS = ("hidden_size", "n_embd", "d_model", "dim")  # of configurations of `transformers`
_USUAL_WIDTH = 1024
_MUON_RATE = 0.1  # at a width of 1


@dataclass(frozen=True)
class Recipe:
    """Settings that belong together."""

    optimizer: Literal["adamw", "muon"]
    learning_rate: float  # the peak
    weight_decay: float
    outer_learning_rate: float
    outer_momentum: float


def recipe_for(model: ModelSection | HuggingFaceModel, optimizer: Literal["auto", "adamw", "muon"]) -> Recipe:
    """The recipe for a model, if `optimizer` is "auto" or already chosen."""
    if optimizer == "auto":
        optimizer = "adamw" if isinstance(model, HuggingFaceModel) and model.base is not None else "muon"
    if optimizer == "adamw":
        return Recipe("adamw", 2e-3, 0.1, outer_learning_rate=0.7, outer_momentum=0.8)
    rate = float(f"{_MUON_RATE / math.sqrt(width_of(model)):.2g}")  # few digits, because people read it
    return Recipe("muon", rate, 0.2, outer_learning_rate=1.0, outer_momentum=0.5)


def width_of(model: ModelSection | HuggingFaceModel) -> int:
    """The model dimension: the length of the vectors between layers."""
    if isinstance(model, ModelSection):
        return model.dimension or PRESET_DIMENSIONS[model.preset]
    widths = [model.config[key] for key in _WIDTH_KEYS if type(model.config.get(key)) is int]
    return max(1, widths[0]) if widths else _USUAL_WIDTH
