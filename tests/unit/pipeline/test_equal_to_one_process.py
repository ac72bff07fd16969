"""A route of any length computes, bit for bit, what one process computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.routes import RouteStages

from atoll.core.clock import SystemClock
from atoll.core.run_spec import RunSpec, parse_run_spec
from atoll.node.data.corpus import Corpus, load_corpus
from atoll.node.pipeline.stage_checks import MicroBatchShape
from atoll.node.training.loader import Loader
from atoll.node.training.loop import InnerLoop
from atoll.node.training.sample_feed import SampleFeed

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 50
SAMPLES, MICRO_BATCHES, TOKENS = 2, 2, 8


def spec_of(model: str = "", optimizer: str = "") -> RunSpec:
    return parse_run_spec(
        'version = 1\n[run]\nname = "t"\nseed = 5\nstop_tokens = 100000\n'
        f"[model]\ndimension = 32\nlayers = 2\nheads = 4\nkv_heads = 2\nhidden_dimension = 48\n{model}\n"
        f'[data]\npath = "x"\nsequence_length = {TOKENS}\nvalidation_samples = 8\n'
        f'[optimizer]\nschedule = "constant"\nlearning_rate = 0.01\nclip_norm = 0.5\n'
        f"micro_batch_samples = {SAMPLES}\naccumulate = {MICRO_BATCHES}\n{optimizer}\n[sync]\nround_tokens = 1000\n"
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    (tmp_path / "text.txt").write_text("a reef is a ring of islands; " * 200)
    return load_corpus(spec_of(), str(tmp_path / "text.txt"))


def batches(spec: RunSpec, corpus: Corpus) -> Iterator[list[torch.Tensor]]:
    """What the trainer's loop reads, as micro-batches."""
    loader = Loader(corpus, SAMPLES * MICRO_BATCHES, SystemClock())
    loader.restart(SampleFeed(((0, 10_000),)))
    try:
        for _ in range(STEPS):
            yield list(torch.split(loader.next().tokens_BT, SAMPLES))
    finally:
        loader.close()


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("", ""), ("tie_embeddings = true", ""), ("", 'name = "muon"')],
    ids=["untied", "tied", "muon"],
)
def test_the_trainer_s_loop_and_routes_of_1_2_and_4_stages_are_equal(
    corpus: Corpus, model: str, optimizer: str
) -> None:
    spec = spec_of(model, optimizer)
    loop = InnerLoop(spec, corpus, "cpu")
    try:
        anchor_E = torch.empty(loop.layout.elements)
        loop.initialise_into(anchor_E)
        loop.load(anchor_E, ranges=((0, 10_000),))
        losses = [loop.step().loss for _ in range(STEPS)]
    finally:
        loop.close()
    assert losses[-1] < 0.7 * losses[0]
    for stages in (1, 2, 4):
        route_stages = RouteStages(loop.run.architecture, stages, spec.optimizer, MicroBatchShape(SAMPLES, TOKENS))
        route_stages.load(anchor_E)
        assert [route_stages.route.flush(tokens).loss for tokens in batches(spec, corpus)] == losses
        assert torch.equal(route_stages.weights(), loop.weights_E)
