"""With document masks, packed samples have the loss and the gradient of their documents one per row."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.documents import document_spec, gradient_of, unpacked, windows_of, write_documents
from torch import Tensor, nn

from atoll.core.run_spec import RunSpec
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.training.loop import InnerLoop
from atoll.node.training.targets import IGNORED, cross_entropy, divisor

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLES = 6  # of a step


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_documents(tmp_path / "text.jsonl")


@contextlib.contextmanager
def started(spec: RunSpec, text: Path) -> Iterator[tuple[InnerLoop, Tensor]]:
    """A loop with its initial weights, scaled so that attention matters."""
    loop = InnerLoop(spec, load_corpus(spec, str(text)), "cpu")
    try:
        anchor_E = torch.empty(loop.layout.elements)
        loop.initialise_into(anchor_E)
        anchor_E.mul_(5)
        loop.load(anchor_E, ranges=((0, 10_000),))
        yield loop, anchor_E
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("family", "model", "optimizer"),
    [
        ("", "", ""),
        ("", "tie_embeddings = true", "activation_checkpointing = true"),
        ("llama", "", ""),
        ("gpt_neox", "", "activation_checkpointing = true"),
    ],
)
def test_a_step_an_evaluation_and_an_audit_equal_unpacked_documents(
    text: Path, family: str, model: str, optimizer: str
) -> None:
    spec = document_spec(family, model=model, optimizer=optimizer)
    with started(spec, text) as (loop, anchor_E):
        corpus = loop.corpus
        assert isinstance(corpus, Corpus)
        windows = [corpus.window(sample) for sample in range(SAMPLES)]
        loss, gradient_E = unpacked(loop.run, anchor_E, windows_of(corpus, windows))
        assert abs(loop.step().loss - loss) < 1e-5
        torch.testing.assert_close(gradient_of(anchor_E - loop.weights_E), gradient_E, atol=1e-5, rtol=1e-5)
        held_out, _ = unpacked(loop.run, anchor_E, windows_of(corpus, corpus.validation_windows()))
        assert abs(loop.evaluate(anchor_E) - held_out) < 1e-5
        before, after = (
            [unpacked(loop.run, weights_E, windows_of(corpus, [corpus.window(sample)]))[0] for sample in range(4)]
            for weights_E in (anchor_E, 0.9 * anchor_E)
        )
        gained = [one - other for one, other in zip(before, after, strict=True)]
        found = loop.audit(anchor_E, 0.1 * anchor_E, [0, 1], [2, 3])
        assert abs(found.own - fmean(gained[:2])) < 1e-5
        assert abs(found.other - fmean(gained[2:])) < 1e-5


def test_documents_do_not_change_each_other_but_without_the_key_they_do(text: Path) -> None:
    for masks in (True, False):
        with started(document_spec(masks=masks), text) as (loop, anchor_E):
            corpus = loop.corpus
            assert isinstance(corpus, Corpus)
            loss, _ = unpacked(loop.run, anchor_E, windows_of(corpus, [corpus.window(it) for it in range(SAMPLES)]))
            assert (abs(loop.step().loss - loss) < 1e-5) is masks


def test_the_key_changes_neither_the_corpus_nor_generated_text(text: Path) -> None:
    found = set()
    for masks in (True, False):
        with started(document_spec(masks=masks), text) as (loop, anchor_E):
            found.add((loop.corpus.digest, loop.generate(anchor_E, b"a reef", 12)))
    assert len(found) == 1


# --- without the key --------------------------------------------------------------------------------------


@given(rows=st.integers(1, 70), part=st.integers(1, 70), tokens=st.integers(1, 1 << 20))
def test_without_ignored_targets_a_part_of_a_batch_counts_bit_for_bit_by_its_samples(
    rows: int, part: int, tokens: int
) -> None:
    assert divisor(rows * tokens, part * tokens) == rows / part


def test_without_ignored_targets_the_loss_has_the_bits_of_torch_s_mean() -> None:
    drawn = torch.Generator().manual_seed(1)
    logits_BTV = torch.randn(3, 7, 11, generator=drawn)
    targets_BT = torch.randint(0, 11, (3, 7), generator=drawn)
    ours, theirs = (logits_BTV.clone().requires_grad_() for _ in range(2))
    found = cross_entropy(ours, targets_BT)
    expected = nn.functional.cross_entropy(theirs.flatten(0, 1), targets_BT.flatten())
    (found / 3).backward()
    (expected / 3).backward()
    assert torch.equal(found, expected)
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_a_batch_without_any_target_has_no_loss_and_no_gradient() -> None:
    logits_BTV = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy(logits_BTV, torch.full((2, 3), IGNORED)) / divisor(10, 0)
    loss.backward()
    assert loss.item() == 0
    assert logits_BTV.grad is not None
    assert not logits_BTV.grad.any()


def test_a_run_without_the_key_makes_the_steps_of_a_plain_loop_bit_for_bit(text: Path) -> None:
    """With torch's own causal attention and mean; the digest of its corpus is that of releases without the key."""
    spec = document_spec(masks=False)
    with started(spec, text) as (loop, _):
        corpus = loop.corpus
        assert isinstance(corpus, Corpus)
        named = b'{"sequence_length": 24, "tokenizer": "bytes", "validation_samples": 5, "vocabulary": 256}\n'
        found = loop.step().loss
        assert corpus.digest == hashlib.sha256(named + corpus.tokens.tobytes()).hexdigest()
    with started(spec, text) as (plain, _):
        batch_BT = windows_of(corpus, [corpus.window(sample) for sample in range(SAMPLES)])
        total = torch.zeros(())
        for tokens_BT in torch.split(batch_BT, 3):
            logits_BTV = plain.model.run(tokens_BT[:, :-1])
            loss = nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten()) / 2
            loss.backward()
            total += loss.detach()
        plain._ready_stepper().step()
        assert found == float(total)
        assert torch.equal(loop.weights_E, plain.weights_E)
