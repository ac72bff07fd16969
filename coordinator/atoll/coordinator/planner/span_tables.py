"""Memory and traffic of every span of a model, as tables. NumPy only, and quick to import.

Spans are half-open, as in `cost_tables.py`: entry `[a, b]` of an (L + 1) × (L + 1) array is for layers a … b − 1.
"""

from __future__ import annotations

import numpy as np

from atoll.coordinator.planner.problem import FP32_BYTES, BoolArray, FloatArray, Problem
from atoll.core.layer_kinds import is_block

_TOKENS_BYTES = 16  # a token of a sample and the token to predict


class SpanTables:
    """Memory and traffic of spans, [a, b]; names say the units."""

    def __init__(self, problem: Problem) -> None:
        training, layers = problem.training, problem.layers
        count = len(layers)
        start, end = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
        self.is_span: BoolArray = end > start
        self.is_whole: BoolArray = (start == 0) & (end == count)
        self.parameters = self._sums([layer.parameters for layer in layers])
        self.frozen = self._sums([layer.frozen_parameters for layer in layers])
        self.borrowed_parameters, self.lent_parameters = self._ties(problem)
        leaves = np.array([0.0, *(layer.activation_bytes_per_token for layer in layers)])
        leaves[count] = 0.0  # the head outputs only the loss
        self.cut_bytes_per_token: FloatArray = leaves  # [L + 1], fp32, over the cut before layer b
        sent = leaves[end] * training.activation_ratio + leaves[start] * training.gradient_ratio
        received = leaves[start] * training.activation_ratio + leaves[end] * training.gradient_ratio
        self.sent_bytes_per_token, self.received_bytes_per_token = sent, received
        self.recomputes: BoolArray = ~self.is_whole | training.activation_checkpointing
        self.reruns_forward: BoolArray = self.recomputes & ((end < count) | self.is_whole)  # last stage keeps its graph
        self.device_bytes = self._device_bytes(problem, leaves[start], leaves[end])
        self.host_bytes = self.parameters * training.host_bytes_per_parameter

    def _device_bytes(self, problem: Problem, enters: FloatArray, leaves: FloatArray) -> FloatArray:
        training, layers = problem.training, problem.layers
        held = self.parameters * training.device_bytes_per_parameter + self.frozen * FP32_BYTES
        held += self.borrowed_parameters * training.tied_user_bytes_per_parameter
        held += self.lent_parameters * training.tied_owner_bytes_per_parameter
        blocks = self._sums([int(is_block(it.kind)) for it in layers])
        held += (blocks > 0) * training.masks.once + blocks * training.masks.per_block
        kept = self._sums([it.saved_bytes_per_token or it.activation_bytes_per_token for it in layers[:-1]] + [0])
        stages = len(layers) - np.arange(len(layers))  # most stages from this layer on
        most = np.array([*(training.in_flight(int(it)) for it in stages), 1])[:, None]
        waiting = (enters + leaves + _TOKENS_BYTES) * np.where(self.is_whole, 1, most)
        at_once = self._sums([float(it.saved_bytes_per_token or it.workspace_bytes_per_token) for it in layers])
        tokens, phases = training.micro_batch_tokens, _layer_peak_bytes(problem)
        last = self._maxima([0.0 if it.kind == "embedding" else each for it, each in zip(layers, phases, strict=True)])
        alone = self._maxima([each if it.kind == "embedding" else 0.0 for it, each in zip(layers, phases, strict=True)])
        recomputed = tokens * waiting + np.maximum(tokens * kept + last, alone)
        whole = tokens * at_once + self._maxima([float(it.workspace_bytes) for it in layers])
        return np.asarray(held + np.where(self.recomputes, recomputed, whole))

    def _sums(self, values: list[float] | list[int]) -> FloatArray:
        ends = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
        return np.where(self.is_span, ends[None, :] - ends[:, None], 0.0)

    def _maxima(self, values: list[float]) -> FloatArray:
        found = np.zeros(self.is_span.shape)
        for start in range(len(values)):
            found[start, start + 1 :] = np.maximum.accumulate(values[start:])
        return found

    def _ties(self, problem: Problem) -> tuple[FloatArray, FloatArray]:
        """Parameters that a span borrows from layers outside it, and that it lends to them; each owner once."""
        places = {layer.name: index for index, layer in enumerate(problem.layers)}
        borrowed, lent = np.zeros(self.is_span.shape), np.zeros(self.is_span.shape)
        pairs = {(places[name], index) for index, layer in enumerate(problem.layers) for name in layer.tied_to}
        for owner, borrower in pairs:
            has_owner, has_borrower = self._holds(owner), self._holds(borrower)
            borrowed += (has_borrower & ~has_owner) * float(problem.layers[owner].parameters)
            lent += (has_owner & ~has_borrower) * float(problem.layers[owner].parameters)
        return borrowed, lent

    def _holds(self, layer: int) -> BoolArray:
        index = np.arange(self.is_span.shape[0])
        return (index[:, None] <= layer) & (index[None, :] > layer)


def _layer_peak_bytes(problem: Problem) -> list[float]:
    """Bytes that exist only while one layer is differentiated, by layer. The layers follow one after another.

    A head holds its logits, their log-softmax and its gradient; later the gradients of logits and of its matrix. When
    the embedding is differentiated, the blocks keep nothing any more.
    """
    tokens, owners = problem.training.micro_batch_tokens, {layer.name: layer.parameters for layer in problem.layers}
    found = []
    for layer in problem.layers:
        begins, ends = tokens * layer.workspace_bytes_per_token, float(layer.workspace_bytes)
        if layer.kind == "head":
            matrix = max(ends, *(FP32_BYTES * owners[name] for name in layer.tied_to)) if layer.tied_to else ends
            found.append(max(begins, begins - 2 * tokens * layer.activation_bytes_per_token + matrix))
        else:
            found.append(begins + ends)
    return found
