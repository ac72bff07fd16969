"""Runs over short documents, and what a model computes for the same documents one per row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from support.hf_runs import config_of, model_section
from torch import Tensor, nn

from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.corpus import Corpus
from atoll.node.model.run_model import RunModel, allocate_span
from atoll.node.model.span import Span

SEPARATOR = 0  # of the byte tokenizer
TOKENS = 24
_RATE, _EPSILON = 10.0, 100.0
BUILT_IN = "[model]\ndimension = 64\nlayers = 2\nheads = 4\nkv_heads = 2\nhidden_dimension = 48"


def document_spec(family: str = "", *, masks: bool = True, model: str = "", optimizer: str = "") -> RunSpec:
    """A run whose first step tells the gradient: `gradient_of`. `family`: of Hugging Face; empty: built in."""
    return parse_run_spec(document_spec_text(family, masks=masks, model=model, optimizer=optimizer))


def document_spec_text(family: str = "", *, masks: bool = True, model: str = "", optimizer: str = "") -> str:
    section = model_section(config_of(family, tie_word_embeddings=False)) if family else f"{BUILT_IN}\n{model}"
    return (
        f'version = 1\n[run]\nname = "t"\nseed = 5\nstop_tokens = 100000\n{section}\n'
        f'[data]\nsource = "jsonl"\npath = "x"\nsequence_length = {TOKENS}\nvalidation_samples = 5\n'
        f"document_masks = {str(masks).lower()}\n"
        f'[optimizer]\nname = "adamw"\nschedule = "constant"\nlearning_rate = {_RATE}\nepsilon = {_EPSILON}\n'
        f"weight_decay = 0.0\nclip_norm = 1e9\nmicro_batch_samples = 3\naccumulate = 2\n{optimizer}\n"
        '[sync]\nround_tokens = 100000\n[pipeline]\ncodec = "fp32"\n'
    )


def write_documents(path: Path) -> Path:
    """Documents of 1 to 40 bytes, so that samples contain some and begin and end within some."""
    words = "a reef is a ring of islands around a lagoon"
    texts = [words[number % 5 : number % 5 + 1 + number * 7 % 40] for number in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def gradient_of(moved_E: Tensor) -> Tensor:
    """The gradient of the first step of AdamW, from weights before it minus weights after it."""
    return moved_E * _EPSILON / (_RATE - moved_E.abs())


def windows_of(corpus: Corpus, windows: Sequence[int]) -> Tensor:
    """Tokens as they are, [B, T+1]."""
    length = corpus.sequence_length
    return torch.stack([torch.tensor(corpus.tokens[at * length : at * length + length + 1].tolist()) for at in windows])


def unpacked(run: RunModel, weights_E: Tensor, windows_BT: Tensor) -> tuple[float, Tensor]:
    """Mean loss and gradient of the windows' documents, each in a row of its own that is padded and not masked."""
    rows = [
        document
        for window in windows_BT.tolist()
        for document in _documents(window)
        if len(document) > 1  # else nothing is predicted
    ]
    inputs_BT = torch.zeros(len(rows), windows_BT.shape[1] - 1, dtype=torch.int64)
    targets_BT = torch.full_like(inputs_BT, -100)
    for row, document in enumerate(rows):
        inputs_BT[row, : len(document) - 1] = torch.tensor(document[:-1])
        targets_BT[row, : len(document) - 1] = torch.tensor(document[1:])
    model = allocate_span(run, Span(0, run.architecture.layers - 1), torch.device("cpu"))
    model.weights_E.copy_(weights_E)
    logits_BTV = model.run(inputs_BT)
    loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100)
    loss.backward()
    model.gather_gradients()
    return loss.item(), model.gradients_E


def _documents(window: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in window:
        found[-1].append(token)
        if token == SEPARATOR:
            found.append([])
    return found
