"""Decoders with weights large enough to matter, and their checkpoints, for tests of what is made of checkpoints."""

from __future__ import annotations

import torch
from support.decoders import initialise
from support.small_state import of_vectors

from atoll.core.built_in_shape import layer_table, resolve_shape
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.llama import Decoder
from atoll.node.state.checkpoint import CheckpointState
from atoll.node.state.tensor_file import LayerLayout

MODELS = {
    "untied": "dimension = 64\nlayers = 3\nheads = 4\nkv_heads = 4\nhidden_dimension = 96",
    "tied": "dimension = 64\nlayers = 2\nheads = 4\nkv_heads = 4\nhidden_dimension = 96\ntie_embeddings = true",
    "grouped": "dimension = 96\nlayers = 2\nheads = 6\nkv_heads = 2\nhidden_dimension = 64\nrope_theta = 500000.0",
    "one key-value head, padded vocabulary": (
        "dimension = 32\nlayers = 1\nheads = 4\nkv_heads = 1\nhidden_dimension = 32\nvocabulary = 300"
    ),
    "nano": "",
}


def spec_of(model: str, tokenizer: str = "bytes", run: str = "reef") -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "{run}"\nstop_tokens = 1000\n[model]\n{model}\n'
        f'[data]\npath = "corpus"\ntokenizer = "{tokenizer}"\nsequence_length = 128\n[sync]\nround_tokens = 100\n'
    )


def trained(
    model: str, run: str = "reef", number: int = 7, tokenizer: str = "bytes", vocabulary: int = 256
) -> tuple[Decoder, RunSpec, CheckpointState]:
    """A decoder with weights large enough to matter, and its checkpoint."""
    spec = spec_of(model, tokenizer, run)
    shape = resolve_shape(spec.model, vocabulary)
    decoder = Decoder(shape)
    initialise(decoder, 5)
    anchor_E = torch.empty(FlatLayout.of(decoder).elements)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(2.0).add_(torch.randn(parameter.shape) * 0.02)
        named = dict(decoder.named_parameters())
        for name, view_E in FlatLayout.of(decoder).views(anchor_E):
            view_E.copy_(named[name])
    layers = LayerLayout.of(layer_table(spec, shape))
    return decoder.eval(), spec, of_vectors(number, anchor_E, torch.zeros_like(anchor_E), layers, run)
