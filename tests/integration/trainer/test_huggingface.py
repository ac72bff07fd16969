"""Hugging Face decoders in the trainer process: the bits of a plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from support.eventually import eventually
from support.hf_runs import config_of, model_section, named_of, plain_loop, pretrained, spec_text, text_of

from atoll.node.trainer.trainer import Trainer, TrainerConfig

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DEADLINE = timedelta(seconds=180)
RANGES = ((0, 4000),)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(text_of())
    return path


@contextlib.asynccontextmanager
async def trainer_on(spec: str, text: Path, base: Path | None = None) -> AsyncIterator[Trainer]:
    config = TrainerConfig(spec, str(text), device="cpu", base_path=str(base) if base else None)
    trainer = await Trainer.spawn(config, log_path=text.parent / "trainer.log", timeout=DEADLINE)
    try:
        yield trainer
    finally:
        await trainer.stop(DEADLINE)
        assert not psutil.pid_exists(trainer.pid)


async def trained(trainer: Trainer, steps: int) -> tuple[int, torch.Tensor, torch.Tensor]:
    """At least so many steps from genesis: how many, the genesis, and genesis − weights."""
    await trainer.initialise()
    genesis = trainer.anchor.clone()
    await trainer.load(ranges=RANGES, committed_tokens=0)
    await trainer.train()
    await eventually(lambda: trainer.status.steps >= steps)
    await trainer.pause()
    snapshot = await trainer.snapshot()
    return snapshot.steps, genesis, trainer.pseudo_gradient.clone()


@pytest.mark.parametrize(("tied", "adapted"), [(False, False), (True, True)], ids=["dense", "tied, lora"])
async def test_a_trainer_process_has_the_bits_of_a_plain_loop(
    tied: bool, adapted: bool, text: Path, tmp_path: Path
) -> None:
    config = config_of("llama", tie_word_embeddings=tied)
    base = pretrained(tmp_path / "base", tie_word_embeddings=tied) if adapted else None
    spec = spec_text(model_section(config, base, ["q_proj", "v_proj"] if adapted else None))
    async with trainer_on(spec, text, base) as trainer:
        facts = trainer.facts
        assert [kind for kind, _, _ in facts.layer_times] == ["embedding", "block", "head"]
        assert facts.tokens_per_second > 0
        assert facts.elements == trainer.anchor.numel() == sum(row.parameters for row in facts.layers.layers)
        assert (sum(row.frozen_parameters for row in facts.layers.layers) > 0) == adapted
        steps, genesis_E, gradient_E = await trained(trainer, 6)
        first = (await trainer.evaluate()).value
        trainer.anchor.sub_(gradient_E)
        assert (await trainer.evaluate()).value < first
        assert await trainer.generate("a reef", 5, seed=3) == await trainer.generate("a reef", 5, seed=3)
    with plain_loop(spec, text, RANGES, named_of(spec, genesis_E, base)) as (plain, loader):
        for _ in range(steps):
            plain.step([loader.next().tokens_BT])
    assert torch.equal(genesis_E - plain.weights(), gradient_E)
    assert bool(gradient_E.any())
