"""A trainer that loads before its daemon knows whether it wants it."""

import asyncio
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from support.process_swarm import MODEL, SPEC

from atoll.core.errors import CorpusError
from atoll.node.trainer.preload import TrainerPreload
from atoll.node.trainer.trainer import TrainerConfig
from atoll.node.trainer.trainer_process import TrainerProcess

DEADLINE = timedelta(seconds=180)

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def config(tmp_path: Path) -> TrainerConfig:
    text = tmp_path / "corpus.txt"
    text.write_text("a reef grows where nobody looks\n" * 2000)
    spec = SPEC.format(model=MODEL, nodes=1, tokens=10**6, corpus=text, round_tokens=1000, codec="fp32")
    return TrainerConfig(spec, device="cpu")


async def test_it_holds_what_it_was_told_and_lives_on_when_taken(tmp_path: Path, config: TrainerConfig) -> None:
    child = await TrainerProcess.start(tmp_path / "log")
    ahead = TrainerPreload(child, replace(config, span=(0, 1)), DEADLINE)
    trainer = await ahead.take((0, 1))
    assert trainer is not None
    try:
        await ahead.abandon()  # of what was taken: nothing
        assert (trainer.pid, trainer.facts.held_layers) == (child.process.pid, range(2))
        await trainer.initialise()
    finally:
        await trainer.stop(DEADLINE)


@pytest.mark.parametrize("loaded", [False, True])
async def test_one_with_other_layers_ends(tmp_path: Path, config: TrainerConfig, loaded: bool) -> None:
    child = await TrainerProcess.start(tmp_path / "log")
    ahead = TrainerPreload(child, replace(config, span=(0, 1)), DEADLINE)
    if loaded:
        await asyncio.wait([ahead._taking], timeout=DEADLINE.total_seconds())
    assert await ahead.take((1, 2)) is None
    assert not psutil.pid_exists(child.process.pid)
    await ahead.abandon()


async def test_whoever_stops_waiting_for_it_can_still_end_it(tmp_path: Path, config: TrainerConfig) -> None:
    child = await TrainerProcess.start(tmp_path / "log")
    ahead = TrainerPreload(child, config, DEADLINE)
    taking = asyncio.create_task(ahead.take(None))
    await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert psutil.pid_exists(child.process.pid)
    await ahead.abandon()
    assert not psutil.pid_exists(child.process.pid)


async def test_what_it_cannot_load_is_said_to_who_takes_it(tmp_path: Path, config: TrainerConfig) -> None:
    ahead = TrainerPreload(
        await TrainerProcess.start(tmp_path / "log"), replace(config, corpus_path="/nowhere"), DEADLINE
    )
    with pytest.raises(CorpusError):
        await ahead.take(None)
    await ahead.abandon()
    unasked = TrainerPreload(
        await TrainerProcess.start(tmp_path / "log"), replace(config, corpus_path="/nowhere"), DEADLINE
    )
    await unasked.abandon()  # its error is nobody's
