"""Runs over short documents, and what a model computes for the same documents one per row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from support.hf_runs import config_of, model_section
from torch import Tensor, nn

from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.card import ShardName, start_bit, top_bit
from atoll.node.data.corpus import Corpus
from atoll.node.data.sharded_corpus import ShardedCorpus
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
    return unpacked_pieces(run, weights_E, [piece for window in windows_BT.tolist() for piece in _documents(window)])


def unpacked_pieces(run: RunModel, weights_E: Tensor, pieces: Sequence[Sequence[int]]) -> tuple[float, Tensor]:
    """The same of pieces of documents. A token that is input only is its complement."""
    rows = [torch.tensor(piece) for piece in pieces if len(piece) > 1]  # else nothing is predicted
    inputs_BT = torch.zeros(len(rows), max(map(len, rows)) - 1, dtype=torch.int64)
    targets_BT = torch.full_like(inputs_BT, -100)
    for row, tokens_T in enumerate(rows):
        inputs_BT[row, : len(tokens_T) - 1] = torch.where(tokens_T < 0, ~tokens_T, tokens_T)[:-1]
        targets_BT[row, : len(tokens_T) - 1] = torch.where(tokens_T < 0, -100, tokens_T)[1:]
    model = allocate_span(run, Span(0, run.architecture.layers - 1), torch.device("cpu"))
    model.weights_E.copy_(weights_E)
    logits_BTV = model.run(inputs_BT)
    loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=-100)
    loss.backward()
    model.gather_gradients()
    return loss.item(), model.gradients_E


def pieces_of(folder: Path, corpus: ShardedCorpus, windows: Sequence[int]) -> list[list[list[int]]]:
    """The pieces of documents in each window, as its files tell them; a token that is input only is its complement."""
    found, card = [], corpus.card
    for window in windows:
        source, shard, start, stop = corpus.place(window)
        name = ShardName(card.sources[source].name, shard)
        stored = np.fromfile(folder / name.path("tokens"), card.dtype).astype(np.int64)
        first, last = start // card.token_bytes, stop // card.token_bytes
        ends = np.fromfile(folder / name.path("documents"), "<u8").astype(np.int64)
        bounds = [first, *ends[(ends > first) & (ends < last)].tolist(), last]
        numbers = stored & (start_bit(card.dtype) - 1)
        tokens = np.where(stored & top_bit(card.dtype), ~numbers, numbers).tolist()
        found.append([tokens[begin:end] for begin, end in itertools.pairwise(bounds)])
    return found


def _documents(window: list[int]) -> list[list[int]]:
    found: list[list[int]] = [[]]
    for token in window:
        found[-1].append(token)
        if token == SEPARATOR:
            found.append([])
    return found
