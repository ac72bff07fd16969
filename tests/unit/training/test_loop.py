"""The inner loop learns, and the algebra of rounds is exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.core.clock import SystemClock
from atoll.core.errors import ChildDied, WeightsNotFinite
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.model.flat_layout import FlatLayout
from atoll.node.model.local_weights import ShardedWeights, ShardSlices, WholeWeights
from atoll.node.trainer.loading import measure_layer_times
from atoll.node.training import replica
from atoll.node.training.device import device_facts
from atoll.node.training.loader import Loader
from atoll.node.training.loop import InnerLoop
from atoll.node.training.progress import Snapshot
from atoll.node.training.replica import Replica

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = "dimension = 32\nlayers = 2\nheads = 4\nkv_heads = 2\nhidden_dimension = 48"
LoopMaker = Callable[..., InnerLoop]


def tiny_spec(model: str = "", optimizer: str = "") -> RunSpec:
    return parse_run_spec(
        f'version = 1\n[run]\nname = "t"\nseed = 5\nstop_tokens = 100000\n[model]\n{TINY}\n{model}\n'
        f'[data]\npath = "x"\nsequence_length = 16\nvalidation_samples = 8\n'
        f'[optimizer]\nname = "adamw"\nlearning_rate = 0.01\n{optimizer}\n[sync]\nround_tokens = 1000\n'
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 200)
    return load_corpus(tiny_spec(), str(tmp_path / "text.txt"))


@pytest.fixture
def make_loop(corpus: Corpus) -> Iterator[LoopMaker]:
    made: list[InnerLoop] = []

    def make(**sections: str) -> InnerLoop:
        made.append(InnerLoop(tiny_spec(**sections), corpus, "cpu"))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


def started(loop: InnerLoop, ranges: tuple[tuple[int, int], ...] = ((0, 10_000),)) -> torch.Tensor:
    anchor_E = torch.empty(loop.layout.elements)
    loop.initialise_into(anchor_E)
    loop.load(anchor_E, ranges=ranges)
    return anchor_E


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"optimizer": 'precision = "bf16"'},
        {"optimizer": "accumulate = 2\nactivation_checkpointing = true"},
        {"model": "tie_embeddings = true"},
    ],
    ids=["fp32", "bf16", "accumulation and checkpointing", "tied embeddings"],
)
def test_the_loss_falls(make_loop: LoopMaker, sections: dict[str, str]) -> None:
    loop = make_loop(**sections)
    anchor_E = started(loop)
    before = loop.evaluate(anchor_E)
    losses = [loop.step().loss for _ in range(60)]
    assert losses[0] == pytest.approx(math.log(256), abs=0.3)
    assert losses[-1] < 0.6 * losses[0]
    assert loop.evaluate(loop.weights_E) < 0.6 * before


def test_fp16_with_loss_scaling_trains_or_skips_but_never_breaks_the_weights(make_loop: LoopMaker) -> None:
    loop = make_loop(optimizer='precision = "fp16"')
    started(loop)
    losses = [loop.step().loss for _ in range(30)]
    assert losses[-1] < losses[0]
    assert bool(torch.isfinite(loop.weights_E).all())


def test_accumulation_equals_one_large_batch(make_loop: LoopMaker) -> None:
    """4 × 2 samples a step and 8 samples a step see the same tokens and end at nearly the same weights."""
    split = make_loop(optimizer="micro_batch_samples = 2\naccumulate = 4")
    whole = make_loop(optimizer="micro_batch_samples = 8")
    for loop in (split, whole):
        started(loop)
        for _ in range(3):
            assert loop.step().samples == 8
    torch.testing.assert_close(split.weights_E, whole.weights_E, rtol=1e-3, atol=1e-4)


def test_the_same_orders_give_the_same_bits(make_loop: LoopMaker) -> None:
    first, second = make_loop(), make_loop()
    second.probe()  # leaves no trace
    for loop in (first, second):
        started(loop)
        for _ in range(4):
            loop.step()
    assert torch.equal(first.weights_E, second.weights_E)
    assert first.progress.mark_snapshot() == second.progress.mark_snapshot()
    assert second.progress.steps_total == 4


def test_a_pseudo_gradient_is_anchor_minus_weights_as_of_the_snapshot(make_loop: LoopMaker) -> None:
    loop = make_loop()
    anchor_E = started(loop)
    for _ in range(3):
        loop.step()
    weights_E = loop.weights_E.clone()
    assert loop.snapshot() == Snapshot(3 * 4 * 16, 12, 3, 3 * 4 * 16)
    loop.step()
    out_E = torch.empty_like(anchor_E)
    loop.pseudo_gradient_into(out_E)
    assert torch.equal(out_E, anchor_E - weights_E)


class Allocations(TorchDispatchMode):
    """Elements of the largest tensor that is made, views of others left out."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
            self.largest = max(self.largest, made.numel())
        return made


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize(("start", "end"), [(0, None), (0, 3000), (1500, None), (1234, 5678), (7, 7)])
def test_a_pseudo_gradient_is_computed_in_chunks(
    devices: int, start: int, end: int | None, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "CHUNK_ELEMENTS", 1000)
    layout = FlatLayout.of_layers({f"p{rows}": torch.empty(rows, 40)} for rows in (50, 1, 49, 60))
    anchor_E, weights_E = (torch.randn(layout.elements, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    out_E, part = torch.zeros(layout.elements), slice(start, end)
    for rank in range(devices):
        pieces = ShardSlices.of(layout, rank, devices)
        spread = ShardedWeights(pieces, [torch.zeros(it.stop - it.start) for it in pieces.slices], torch.device("cpu"))
        weights = spread if devices > 1 else WholeWeights(torch.zeros(layout.elements))
        one = Replica(tiny_spec(), weights, Loader(corpus, 1, SystemClock()))
        one.load(anchor_E)
        weights.fill(weights_E)
        one.snapshot(part)
        with Allocations() as seen:
            one.pseudo_gradient_into(out_E)
        one.close()
        assert seen.largest <= 1000
    expected_E = torch.zeros(layout.elements)
    expected_E[part] = anchor_E[part] - weights_E[part]
    assert torch.equal(out_E, expected_E)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_raise_and_are_not_averaged(make_loop: LoopMaker, value: float) -> None:
    """They would never become good again: no step is taken with them, and the carry keeps them."""
    loop = make_loop()
    loop.weights_E[-1] = value
    loop.snapshot()
    with pytest.raises(WeightsNotFinite):
        loop.pseudo_gradient_into(torch.zeros(loop.weights_E.numel()))
    assert issubclass(WeightsNotFinite, ChildDied)  # so the session starts another trainer from the anchor


def test_apply_carries_what_was_trained_since_the_snapshot(make_loop: LoopMaker) -> None:
    loop = make_loop()
    anchor_E = started(loop)
    loop.step()
    loop.snapshot()
    frozen_E = loop.weights_E.clone()
    for _ in range(2):
        loop.step()
    carried_E = loop.weights_E - frozen_E
    new_anchor_E = anchor_E * 0.5
    loop.apply(new_anchor_E, ranges=((4, 10_000),), committed_tokens=64)
    assert torch.equal(loop.weights_E, carried_E + new_anchor_E)
    assert loop.snapshot() == Snapshot(2 * 64, 8, 2, 2 * 64)
    out_E = torch.empty_like(anchor_E)
    loop.pseudo_gradient_into(out_E)
    assert torch.equal(out_E, new_anchor_E - loop.weights_E)


def test_an_abandoned_round_keeps_all_progress(make_loop: LoopMaker) -> None:
    loop = make_loop()
    anchor_E = started(loop)
    loop.step()
    loop.snapshot()
    loop.step()
    loop.discard()
    loop.step()
    assert loop.snapshot() == Snapshot(3 * 64, 12, 3, 3 * 64)
    out_E = torch.empty_like(anchor_E)
    loop.pseudo_gradient_into(out_E)
    assert torch.equal(out_E, anchor_E - loop.weights_E)


def test_applying_mid_stream_does_not_repeat_or_skip_a_sample(make_loop: LoopMaker) -> None:
    """One node that applies its own result every other step reads the same samples as one that never does."""
    plain, rounds = make_loop(), make_loop()
    for loop in (plain, rounds):
        started(loop)
    left = 0
    for _ in range(4):
        plain_losses = [plain.step().loss, plain.step().loss]
        first = rounds.step().loss
        snapshot = rounds.snapshot()
        out_E = torch.empty(rounds.layout.elements)
        rounds.pseudo_gradient_into(out_E)
        second = rounds.step().loss
        left += snapshot.samples
        rounds.apply(rounds._anchor - out_E, ranges=((left, 10_000),))
        assert [first, second] == pytest.approx(plain_losses, rel=1e-3)
    assert rounds.progress.samples_repeated == 0


@pytest.mark.parametrize(("consumed_samples", "first"), [(40, 40), (8, 12), (0, 12)])
def test_samples_contributed_before_a_restart_are_not_skipped_again(
    make_loop: LoopMaker, consumed_samples: int, first: int
) -> None:
    loop = make_loop()
    anchor_E = started(loop)
    for _ in range(3):
        loop.step()
    loop.rebase(anchor_E, ranges=((consumed_samples, 10_000),), committed_tokens=0, consumed_samples=consumed_samples)
    assert loop._loader.next().taken.samples[0] == first
    assert loop.snapshot().samples == max(0, 12 - consumed_samples)


def test_new_samples_at_the_same_anchor_leave_the_snapshot_and_all_progress(make_loop: LoopMaker) -> None:
    loop = make_loop()
    anchor_E = started(loop, ((0, 100),))
    loop.step()
    snapshot, weights_E = loop.snapshot(), loop.weights_E.clone()
    loop.step()
    loop.set_ranges(((200, 300),))
    out_E = torch.empty_like(anchor_E)
    loop.pseudo_gradient_into(out_E)
    assert torch.equal(out_E, anchor_E - weights_E)
    loop.apply(anchor_E - out_E, ranges=((200 + snapshot.samples, 300),))
    assert loop.snapshot() == Snapshot(64, 4, 1, 64)


def test_each_fragment_contains_what_was_trained_since_its_own_last_round(make_loop: LoopMaker) -> None:
    """A node alone, whose outer step takes over its own update: its weights never move but by training."""
    plain, turns = make_loop(), make_loop()
    for loop in (plain, turns):
        started(loop)
    middle = turns.layout.layer_offsets[2]
    parts = (slice(0, middle), slice(middle, turns.layout.elements))
    left, since = 0, [0, 0]
    for number in range(5):
        part = parts[number % 2]
        for _ in range(3):
            plain.step()
        turns.step()
        turns.step()
        since = [tokens + 2 * 64 for tokens in since]
        snapshot, out_E = turns.snapshot(part), torch.zeros(turns.layout.elements)
        assert snapshot.fragment_tokens == since[number % 2]
        turns.pseudo_gradient_into(out_E)
        assert not out_E[parts[1 - number % 2]].any()  # nothing is said of the others
        turns.step()
        since = [tokens + 64 for tokens in since]
        since[number % 2] = 64
        left += snapshot.samples
        turns.apply(turns._anchor - out_E, ranges=((left, 10_000),), moved=part)
        assert torch.allclose(turns.weights_E, plain.weights_E, atol=1e-6)
    assert turns.progress.samples_repeated == 0


def test_after_several_rounds_a_snapshot_is_carried_and_other_fragments_are_rebased(make_loop: LoopMaker) -> None:
    loop = make_loop()
    anchor_E = started(loop)
    middle = loop.layout.layer_offsets[2]
    first, second = slice(0, middle), slice(middle, loop.layout.elements)
    loop.step()
    loop.snapshot(first)
    frozen_E = loop.weights_E.clone()
    loop.step()
    trained_E, new_anchor_E = loop.weights_E.clone(), anchor_E * 0.5
    loop.apply(new_anchor_E, ranges=((4, 10_000),), committed_tokens=64)
    assert torch.equal(loop.weights_E[first], (trained_E - frozen_E + new_anchor_E)[first])
    assert torch.equal(loop.weights_E[second], (trained_E - anchor_E + new_anchor_E)[second])
    assert loop.snapshot(second).fragment_tokens == 2 * 64
    assert loop.snapshot(first).fragment_tokens == 64


def test_a_node_without_fresh_samples_trains_on_and_counts_repeated_ones(make_loop: LoopMaker) -> None:
    loop = make_loop()
    started(loop, ((0, 6),))
    for _ in range(3):
        loop.step()
    assert loop.snapshot() == Snapshot(3 * 64, 6, 3, 3 * 64)
    assert loop.progress.samples_repeated == 6


def test_evaluation_and_generation_do_not_change_training(make_loop: LoopMaker) -> None:
    disturbed, plain = make_loop(), make_loop()
    for loop in (disturbed, plain):
        anchor_E = started(loop)
        loop.step()
    disturbed.evaluate(anchor_E)
    disturbed.generate(anchor_E, b"a reef", 5)
    for loop in (disturbed, plain):
        loop.step()
    assert torch.equal(disturbed.weights_E, plain.weights_E)


def test_a_seed_determines_the_generated_text(make_loop: LoopMaker) -> None:
    loop = make_loop()
    anchor_E = started(loop)
    for _ in range(80):
        loop.step()
    text = loop.generate(loop.weights_E, b"a reef ", 40, seed=1)
    assert text == loop.generate(loop.weights_E, b"a reef ", 40, seed=1)
    assert text != loop.generate(loop.weights_E, b"a reef ", 40, seed=2)
    assert loop.generate(anchor_E, b"", 3)


def test_a_gradient_that_is_not_finite_skips_its_step(make_loop: LoopMaker) -> None:
    loop = make_loop()
    started(loop)
    loop.step()
    before_E = loop.weights_E.clone()
    loop.model.gradients_E[0] = math.nan
    loop.step()
    assert torch.equal(loop.weights_E, before_E)
    assert loop.stepper is not None
    assert loop.stepper.skipped_steps == 1
    loop.step()
    assert not torch.equal(loop.weights_E, before_E)


def test_layers_of_every_kind_are_timed(make_loop: LoopMaker) -> None:
    loop = make_loop()
    facts = device_facts(loop.device)
    times = measure_layer_times(loop.spec, loop.run, facts, SystemClock())
    assert [kind for kind, _, _ in times] == ["embedding", "block", "head"]
    assert all(forward > 0 and backward > 0 for _, forward, backward in times)


def test_an_audit_tells_an_update_from_samples_that_it_was_trained_on(tmp_path: Path) -> None:
    letters = torch.randint(97, 123, (9000,), generator=torch.Generator().manual_seed(2))
    (tmp_path / "text.txt").write_text("".join(map(chr, letters.tolist())))
    corpus = load_corpus(tiny_spec(), str(tmp_path / "text.txt"))
    auditor, trainer = InnerLoop(tiny_spec(), corpus, "cpu"), InnerLoop(tiny_spec(), corpus, "cpu")
    own, other = range(32), range(100, 132)
    anchor_E = started(trainer, ((0, 32),))
    started(auditor, ((200, 264),))
    auditor.step()
    weights_E = auditor.weights_E.clone()
    while trainer.progress.samples + trainer.progress.samples_repeated < 4 * 32:
        trainer.step()
    trainer.snapshot()
    update_E = torch.empty_like(anchor_E)
    trainer.pseudo_gradient_into(update_E)
    found = auditor.audit(anchor_E, update_E.clone(), own, other)
    assert found.score > 4
    assert found.own > found.other
    assert found.samples == 32
    assert auditor.audit(anchor_E, update_E.clone(), other, own).score < -4
    assert auditor.audit(anchor_E, torch.zeros_like(anchor_E), own, other).score == 0
    assert abs(auditor.audit(anchor_E, update_E.clone(), range(300, 332), other).score) < 3
    end = trainer.layout.layer_offsets[1]  # the embedding learns samples by heart, blocks hardly
    update_E[end:] = torch.nan
    assert auditor.audit(anchor_E, update_E, own, other, slice(end)).score > 2
    assert torch.equal(auditor.weights_E, weights_E)
    for loop in (auditor, trainer):
        loop.close()
