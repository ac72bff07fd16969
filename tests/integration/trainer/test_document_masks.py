"""Trainer processes of a run with document masks: on one device and on two."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from support.documents import document_spec_text, gradient_of, unpacked, windows_of, write_documents

from atoll.core.errors import ConfigError
from atoll.core.run_spec import parse_run_spec
from atoll.node.data.corpus import load_corpus
from atoll.node.model.run_model import run_model
from atoll.node.trainer.trainer import Trainer, TrainerConfig

DEADLINE = timedelta(seconds=180)
ONE_STEP = 3600.0  # the least seconds of a step: none follows the first one within the test

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.mark.parametrize("family", ["", "llama"])
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
async def test_a_step_and_an_evaluation_equal_those_of_unpacked_documents(
    tmp_path: Path, devices: str, family: str
) -> None:
    text, spec = write_documents(tmp_path / "text.jsonl"), document_spec_text(family)
    config = TrainerConfig(spec, str(text), device=devices, minimum_step_seconds=ONE_STEP)
    trainer = await Trainer.spawn(config, log_path=tmp_path / "trainer.log", timeout=DEADLINE)
    try:
        await trainer.initialise()
        genesis_E = trainer.anchor.mul_(5).clone()
        await trainer.load(ranges=((0, 1000),), committed_tokens=0)
        held_out = (await trainer.evaluate()).value
        await trainer.train()
        async with asyncio.timeout(DEADLINE.total_seconds()):
            while not trainer.status.steps:
                await asyncio.sleep(0.01)
        loss = trainer.status.train_loss
        await trainer.pause()
        assert (await trainer.snapshot()).steps == 1
        moved_E = trainer.pseudo_gradient.clone()
    finally:
        await trainer.stop(DEADLINE)
    parsed = parse_run_spec(spec)
    run, corpus = run_model(parsed, 256), load_corpus(parsed, str(text))
    expected, gradient_E = unpacked(run, genesis_E, windows_of(corpus, [corpus.window(sample) for sample in range(6)]))
    assert abs(loss - expected) < 1e-5
    torch.testing.assert_close(gradient_of(moved_E), gradient_E, atol=1e-5, rtol=1e-5)
    assert abs(held_out - unpacked(run, genesis_E, windows_of(corpus, corpus.validation_windows()))[0]) < 1e-5


async def test_a_family_that_cannot_keep_documents_apart_is_refused_at_the_start(tmp_path: Path) -> None:
    text, spec = write_documents(tmp_path / "text.jsonl"), document_spec_text("llama")
    spec = spec.replace('model_type = "llama"', 'model_type = "gpt_oss"')
    with pytest.raises(ConfigError, match="cannot be trained with document_masks"):
        await Trainer.spawn(TrainerConfig(spec, str(text)), log_path=tmp_path / "trainer.log", timeout=DEADLINE)
