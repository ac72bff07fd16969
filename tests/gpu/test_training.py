"""The inner loop on an accelerator: it learns at every precision, and rounds are as exact as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.documents import document_spec, unpacked, windows_of, write_documents
from support.hf_runs import config_of, model_section

from atoll.core.run_spec import parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.node.training.device import choose_device
from atoll.node.training.loop import InnerLoop

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # `fp32` means fp32
    pytest.mark.skipif(choose_device("auto").type == "cpu", reason="there is no accelerator here"),
]


BUILT_IN = "[model]\ndimension = 64\nlayers = 2"
LLAMA = model_section(config_of("llama", tie_word_embeddings=True))


@pytest.mark.parametrize("model", [BUILT_IN, LLAMA], ids=["built in", "llama"])
@pytest.mark.parametrize(
    "optimizer",
    [
        'precision = "fp32"',
        'precision = "bf16"',
        'precision = "fp16"',
        'precision = "bf16"\nactivation_checkpointing = true\naccumulate = 2',
        'precision = "bf16"\ncompile = true',
    ],
)
def test_the_loss_falls_and_a_round_is_exact(tmp_path: Path, optimizer: str, model: str) -> None:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 2000)
    spec = parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nstop_tokens = 1000000\n{model}\n'
        f'[data]\npath = "{tmp_path}"\nsequence_length = 64\nvalidation_samples = 8\n'
        f'[optimizer]\nname = "adamw"\nlearning_rate = 0.01\n{optimizer}\n[sync]\nround_tokens = 1000\n'
    )
    loop = InnerLoop(spec, load_corpus(spec), "auto")
    try:
        anchor_E = torch.empty(loop.layout.elements)
        loop.initialise_into(anchor_E)
        loop.load(anchor_E, ranges=((0, 10_000),))
        losses = [loop.step().loss for _ in range(60)]
        assert losses[-1] < 0.6 * losses[0]
        assert loop.evaluate(anchor_E) > loop.evaluate(loop.weights_E.cpu())
        loop.snapshot()
        weights_E, out_E = loop.weights_E.cpu().clone(), torch.empty_like(anchor_E)
        loop.step()
        loop.pseudo_gradient_into(out_E)
        assert torch.equal(out_E, anchor_E - weights_E)
        carried_E = loop.weights_E.cpu() - weights_E
        loop.apply(anchor_E)
        assert torch.equal(loop.weights_E.cpu(), carried_E + anchor_E)
    finally:
        loop.close()


@pytest.mark.parametrize(
    "optimizer",
    ["", "compile = true", "compile = true\nactivation_checkpointing = true"],
    ids=["plain", "flex", "both"],
)
@pytest.mark.parametrize("family", ["", "llama"], ids=["built in", "llama"])
def test_documents_are_kept_apart(tmp_path: Path, optimizer: str, family: str) -> None:
    spec = document_spec(family, optimizer=optimizer)
    corpus = load_corpus(spec, str(write_documents(tmp_path / "text.jsonl")))
    loop = InnerLoop(spec, corpus, "auto")
    try:
        anchor_E = torch.empty(loop.layout.elements)
        loop.initialise_into(anchor_E)
        loop.load(anchor_E.mul_(5), ranges=((0, 1000),))
        loss, _ = unpacked(loop.run, anchor_E, windows_of(corpus, [corpus.window(sample) for sample in range(6)]))
        held_out, _ = unpacked(loop.run, anchor_E, windows_of(corpus, corpus.validation_windows()))
        assert abs(loop.step().loss - loss) < 1e-2  # products are rounded in another order
        assert abs(loop.evaluate(anchor_E) - held_out) < 1e-2
    finally:
        loop.close()
