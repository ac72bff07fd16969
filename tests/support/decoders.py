"""Built-in decoders with initial weights, for tests."""

from __future__ import annotations

from atoll.node.model.llama import Decoder, draw_parameters


def initialise(model: Decoder, seed: int) -> None:
    """Fill every parameter from `seed`, as genesis does; a tied matrix is drawn once, under its owner's name."""
    model.load_state_dict(dict(draw_parameters(model, seed)), strict=False)
