"""The loss of an inner step is the mean over the targets that count in its whole batch, however it is divided."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routes import RouteStages
from torch import Tensor, nn

from atoll.core.errors import PeerMisbehaved
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.data.held_out import HeldOutLoss
from atoll.node.model.run_model import run_model
from atoll.node.pipeline.evaluation import Evaluation
from atoll.node.pipeline.messages import Activation, Begin
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.device_group import DeviceGroup, no_other_ranks
from atoll.node.training.loader import Batch
from atoll.node.training.loop import InnerLoop
from atoll.node.training.sample_feed import SampleNumbers
from atoll.node.training.targets import IGNORED, count_targets, cross_entropy, divisor, inputs_and_targets

pytestmark = pytest.mark.usefixtures("one_thread")
SAMPLES, MICRO_BATCHES, TOKENS = 2, 2, 8


def spec_of(optimizer: str = "", accumulate: int = MICRO_BATCHES) -> RunSpec:
    return parse_run_spec(
        'version = 1\n[run]\nname = "t"\nseed = 5\nstop_tokens = 100000\n'
        "[model]\ndimension = 32\nlayers = 2\nheads = 4\nkv_heads = 2\nhidden_dimension = 48\n"
        f'[data]\npath = "x"\nsequence_length = {TOKENS}\nvalidation_samples = 6\n'
        f'[optimizer]\nname = "adamw"\nschedule = "constant"\nlearning_rate = 0.01\n'
        f"micro_batch_samples = {SAMPLES}\naccumulate = {accumulate}\n{optimizer}\n[sync]\nround_tokens = 1000\n"
    )


class MarkedCorpus(Corpus):
    """A corpus in memory of which most tokens are input only, more in some windows than in others."""

    def windows(self, indices, soon=False):  # type: ignore[no-untyped-def]
        found = super().windows(indices)
        for row, index in zip(found, indices, strict=True):
            for place in range(TOKENS + 1):
                if index % 4 == 3 or (index * 7 + place) % (2 + index % 5):
                    row[place] = ~row[place]
        return found


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 200)
    return load_corpus(spec_of(), str(tmp_path / "text.txt"))


def marked(corpus: Corpus) -> MarkedCorpus:
    return MarkedCorpus(**{name: getattr(corpus, name) for name in Corpus.__dataclass_fields__})


def by_hand(logits_BTV: Tensor, tokens_BT: Tensor) -> Tensor:
    """The mean over targets that count, one by one."""
    logs = torch.log_softmax(logits_BTV.double(), dim=-1)
    losses = [
        -logs[row, place, int(token)]
        for row, tokens in enumerate(tokens_BT)
        for place, token in enumerate(tokens[1:])
        if token >= 0
    ]
    return torch.stack(losses).mean()


def plain(tokens_BT: Tensor) -> Tensor:
    return torch.where(tokens_BT < 0, ~tokens_BT, tokens_BT)


@given(st.lists(st.lists(st.integers(-300, 299), min_size=3, max_size=3), min_size=1, max_size=5))
def test_inputs_are_all_tokens_and_targets_those_without_a_mark(rows: list[list[int]]) -> None:
    tokens_BT = torch.tensor(rows)
    inputs_BT, targets_BT = inputs_and_targets(tokens_BT)
    assert inputs_BT.tolist() == [[~token if token < 0 else token for token in row[:-1]] for row in rows]
    assert targets_BT.tolist() == [[IGNORED if token < 0 else token for token in row[1:]] for row in rows]
    assert count_targets(tokens_BT) == sum(token >= 0 for row in rows for token in row[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_targets_the_loss_and_its_gradient_are_zero(dtype: torch.dtype) -> None:
    logits_BTV = torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    loss = cross_entropy(logits_BTV, torch.full((2, 3), IGNORED)) / divisor(0, 0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0.0
    assert logits_BTV.grad is not None
    assert not logits_BTV.grad.any()


@given(st.integers(1, 40), st.integers(2, 60), st.integers(0, 2**32))
def test_without_marks_loss_and_gradient_have_the_bits_of_the_plain_mean(rows: int, vocabulary: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_BTV = torch.randn(rows, 3, vocabulary, generator=generator).requires_grad_()
    tokens_BT = torch.randint(0, vocabulary, (rows, 4), generator=generator)
    loss = cross_entropy(logits_BTV, inputs_and_targets(tokens_BT)[1]) / divisor(rows * 3 * 7, rows * 3)
    (gradient,) = torch.autograd.grad(loss, logits_BTV)
    earlier = nn.functional.cross_entropy(logits_BTV.reshape(-1, vocabulary), tokens_BT[:, 1:].flatten()) / 7
    (expected,) = torch.autograd.grad(earlier, logits_BTV)
    assert torch.equal(loss, earlier)
    assert torch.equal(gradient, expected)
    assert divisor(rows * 3 * 7, rows * 3) == 7


def batch_of(corpus: Corpus, count: int = SAMPLES * MICRO_BATCHES, first: int = 0) -> Tensor:
    return torch.from_numpy(corpus.windows(range(first, first + count)))


def gradient_of(loop: InnerLoop, tokens_BT: Tensor) -> tuple[float, Tensor]:
    """The step's mean loss and gradient, by the loop's own micro-batches."""
    total = torch.zeros(())
    for part_BT, times in loop._micro_batches(tokens_BT):
        loss = loop.loss(part_BT) / times
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    gradient_E = loop.model.gradients_E.clone()  # type: ignore[attr-defined]
    loop.model.zero_gradients()
    return float(total), gradient_E


def test_a_step_takes_the_mean_over_all_micro_batches(corpus: Corpus) -> None:
    loop = InnerLoop(spec_of(), marked(corpus), "cpu")
    try:
        started(loop)
        tokens_BT = batch_of(loop.corpus)  # type: ignore[arg-type]
        counts = [count_targets(part) for part in torch.split(tokens_BT, SAMPLES)]
        assert len(set(counts)) == 2, "micro-batches differ in their targets"
        loss, gradient_E = gradient_of(loop, tokens_BT)
        expected = by_hand(loop.model.run(plain(tokens_BT)[:, :-1]), tokens_BT)
        expected.backward()  # type: ignore[no-untyped-call]
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6)
        torch.testing.assert_close(gradient_E, loop.model.gradients_E, rtol=1e-4, atol=1e-7)  # type: ignore[attr-defined]
    finally:
        loop.close()


def started(loop: InnerLoop) -> Tensor:
    anchor_E = torch.empty(loop.layout.elements)
    loop.initialise_into(anchor_E)
    loop.load(anchor_E, ranges=((0, 10_000),))
    return anchor_E


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_without_any_target_is_no_disaster(corpus: Corpus, precision: str, name: str) -> None:
    spec = spec_of(f'precision = "{precision}"')
    spec = replace_optimizer(spec, name)
    loop = InnerLoop(spec, corpus, "cpu")
    try:
        started(loop)
        batch = Batch(~batch_of(corpus), SampleNumbers((0, 1, 2, 3), 4))
        loop._loader.next = lambda: batch  # type: ignore[method-assign]
        assert loop.step().loss == 0.0
        assert loop.skipped_steps == 0
        assert torch.isfinite(loop.weights_E).all()
    finally:
        loop.close()


def replace_optimizer(spec: RunSpec, name: str) -> RunSpec:
    return spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"name": name})})


def test_the_held_out_loss_is_the_mean_over_all_held_out_targets(corpus: Corpus) -> None:
    loop = InnerLoop(spec_of(accumulate=1), marked(corpus), "cpu")
    try:
        anchor_E = started(loop)
        tokens_BT = torch.from_numpy(loop.corpus.windows(list(loop.corpus.validation_windows())))
        expected = by_hand(loop.model.run(plain(tokens_BT)[:, :-1]).detach(), tokens_BT)
        assert loop.evaluate(anchor_E) == pytest.approx(float(expected), rel=1e-6)
        outcomes: list[object] = []
        evaluation = Evaluation(loop.corpus, SAMPLES, 0, outcomes.append)
        while not outcomes:
            flush_BT = torch.cat(evaluation.next(1))
            logits_BTV = loop.model.run(plain(flush_BT)[:, :-1]).detach()
            evaluation.add(float(by_hand(logits_BTV, flush_BT)) if count_targets(flush_BT) else 0.0)
        assert outcomes == [HeldOutLoss(pytest.approx(float(expected), rel=1e-6))]
    finally:
        loop.close()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_route_takes_the_mean_over_all_micro_batches(corpus: Corpus, stages: int) -> None:
    spec, text = spec_of(), marked(corpus)
    loop = InnerLoop(spec, text, "cpu")
    try:
        anchor_E = started(loop)
        route = RouteStages(loop.run.architecture, stages, spec.optimizer, MicroBatchShape(SAMPLES, TOKENS))
        route.load(anchor_E)
        for first in range(0, 40, SAMPLES * MICRO_BATCHES):
            tokens_BT = batch_of(text, first=first)
            expected = by_hand(loop.model.run(plain(tokens_BT)[:, :-1]).detach(), tokens_BT)
            batch = Batch(tokens_BT, SampleNumbers(tuple(range(4)), 4))
            loop._loader.next = lambda batch=batch: batch  # type: ignore[method-assign]
            flushed = route.route.flush(list(torch.split(tokens_BT, SAMPLES)))
            assert flushed.loss == pytest.approx(float(expected), rel=1e-6)
            assert loop.step().loss == flushed.loss
            assert torch.equal(route.weights(), loop.weights_E)
        nothing = route.route.flush(list(torch.split(~batch_of(corpus), SAMPLES)))
        assert nothing.loss == 0.0
        assert torch.isfinite(route.weights()).all()
    finally:
        loop.close()


def test_a_lying_driver_or_stage_is_refused(corpus: Corpus) -> None:
    spec = spec_of()
    architecture = run_model(spec, 256).architecture
    stage = RouteStages(architecture, 2, spec.optimizer, MicroBatchShape(SAMPLES, TOKENS)).stages[1]
    x_BTD, targets_BT = torch.zeros(1, TOKENS, 32), torch.full((1, TOKENS), IGNORED)
    stage.check(Begin(1, 2, None, 2 * SAMPLES * TOKENS))
    stage.check(Activation(1, 0, x_BTD, targets_BT))
    for message in (
        Begin(1, 2, None, 2 * SAMPLES * TOKENS + 1),
        Activation(1, 0, x_BTD, targets_BT + 1),
        Activation(1, 0, x_BTD, targets_BT - 1),
    ):
        with pytest.raises(PeerMisbehaved, match="targets"):
            stage.check(message)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=9),
    st.integers(1, 4),
    st.integers(1, 5),
)
def test_every_target_has_the_same_weight_on_any_number_of_devices(
    marks: list[list[bool]], size: int, at_most: int
) -> None:
    numbers_BT = torch.arange(len(marks) * 4).view(len(marks), 4)
    batch_BT = torch.where(torch.tensor(marks), ~numbers_BT, numbers_BT)
    weights = torch.zeros(len(marks) * 4)
    for rank in range(size):
        group = DeviceGroup(rank, size, torch.device("cpu"), None, no_other_ranks)  # type: ignore[arg-type]
        for share_BT, times in group.rank_micro_batches(batch_BT, at_most):
            for token in share_BT[:, 1:].flatten().tolist():
                if token >= 0 and not math.isinf(times):
                    weights[token] += 1 / count_targets(share_BT) / times
    total = count_targets(batch_BT)
    counted = torch.zeros_like(weights)
    counted[batch_BT[:, 1:][batch_BT[:, 1:] >= 0]] = 1 / max(1, total)
    torch.testing.assert_close(weights, counted)
